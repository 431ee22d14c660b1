"""The doctor: a finding for everything, never an exception, and a fix wherever something is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from epmoe.core.commands import doctor
from epmoe.core.commands.doctor import (
    Finding,
    diagnose,
    judge_architectures,
    judge_triton,
    parse_version,
)


def test_everything_is_looked_at_and_every_problem_has_a_fix():
    findings = diagnose()
    names = [f.name for f in findings]
    assert names == sorted(set(names), key=names.index)
    assert {"python", "torch", "triton", "interpreter", "gloo", "cuda", "nccl"} <= set(names)
    assert {"gpu sharing", "multi-process service", "vllm", "memory", "cores"} <= set(names)
    assert all(f.fix for f in findings if f.ok is not True)
    by_name = {f.name: f for f in findings}
    assert by_name["python"].ok
    assert by_name["torch"].ok
    assert by_name["gloo"].ok


@pytest.mark.parametrize(
    ("version", "ok"),
    [
        ("3.5.1", False),
        ("3.6.0", True),
        ("3.7.1", True),
        ("3.8.0", False),
        ("4.0", False),
        (None, None),
    ],
)
def test_triton_outside_its_range_is_named_with_the_range(version, ok):
    finding = judge_triton(version, "ImportError: x")
    assert finding.ok is ok
    assert (">=3.6,<3.8" in finding.fix) is (ok is not True)


@pytest.mark.parametrize(
    ("capabilities", "ok"),
    [([], None), ([(9, 0)], True), ([(8, 0), (12, 0)], True), ([(9, 0), (7, 5)], False)],
)
def test_the_weakest_device_decides(capabilities, ok):
    finding = judge_architectures(capabilities)
    assert finding.ok is ok
    assert bool(finding.fix) is (ok is not True)


def test_versions_are_compared_as_numbers():
    assert parse_version("2.13.0+cpu") == (2, 13) > parse_version("2.9.1")
    assert parse_version("unknown") == (0, 0)


def test_a_look_that_breaks_is_a_finding(monkeypatch):
    def _gloo():
        raise OSError("libgloo is gone")

    monkeypatch.setattr(doctor, "_gloo", _gloo)
    finding = next(f for f in diagnose() if f.name == "gloo")
    assert finding.ok is False
    assert "libgloo is gone" in finding.detail


def installed_vllm(environment: Path, version: str) -> None:
    folder = environment / f"lib/python3.12/site-packages/vllm-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def test_vllm_is_looked_for_where_the_commands_look(monkeypatch, tmp_path):
    monkeypatch.setenv(doctor.VLLM_PYTHON, str(tmp_path / "bin" / "python"))
    missing = doctor._vllm()
    assert missing.ok is None
    assert "make setup-vllm" in missing.fix
    assert "pip install" not in missing.fix
    installed_vllm(tmp_path, "0.32.0")
    assert doctor._vllm().ok
    assert doctor.VLLM_PYTHON in doctor._vllm().detail


def test_another_vllm_than_the_tested_one_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv(doctor.VLLM_PYTHON, str(tmp_path / "bin" / "python"))
    installed_vllm(tmp_path, "0.31.2")
    assert doctor._vllm().ok is False
    assert "0.32" in doctor._vllm().fix


def test_nobody_is_asked_to_switch_the_interpreter_on(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = doctor._interpreter()
    assert (found.ok, found.fix) == (True, "")


def test_lines_read_well():
    assert str(Finding("a", True, "fine")) == "ok   a: fine"
    assert str(Finding("a", False, "bad", "mend")) == "FAIL a: bad -> mend"
    assert str(Finding("a", None, "absent", "b")) == "--   a: absent -> b"


BLOCKED = """
import sys
for name in {names!r}:
    sys.modules[name] = None  # an import raises ImportError
from epmoe.core.commands.doctor import diagnose
for finding in diagnose():
    print(finding)
"""


@pytest.mark.parametrize("names", [["triton"], ["torch", "triton"]], ids=["no-triton", "no-torch"])
def test_it_works_where_packages_are_missing_and_no_gpu_is_visible(names):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_PTXAS_PATH": "/nowhere/ptxas"}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(names=names)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = {line[5:].split(":")[0]: line for line in done.stdout.splitlines()}
    assert lines["triton"].startswith("--")
    assert "pip install" in lines["triton"]
    assert lines["torch"].startswith("FAIL" if "torch" in names else "ok")
    assert lines["cores"].startswith("ok")
