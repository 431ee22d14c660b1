"""What `make setup` installs: pins for everything that is asked for, and the right build of torch."""

import re
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.pin import pins
from tools.setup_env import main, pinned, torch_candidates

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ASKED_FOR = [*PROJECT["dependencies"], *EXTRAS["dev"], *EXTRAS["docs"]]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def all_pins() -> dict[str, Requirement]:
    lines = [line for line in CONSTRAINTS.splitlines() if line and not line.startswith("#")]
    return {canonical(Requirement(line).name): Requirement(line) for line in lines}


@pytest.mark.parametrize("text", ASKED_FOR)
def test_every_requirement_has_a_pin_inside_its_range(text):
    asked = Requirement(text)
    pin = all_pins()[canonical(asked.name)]
    (exact,) = pin.specifier
    assert exact.operator == "=="
    assert asked.specifier.contains(exact.version), f"{pin} is outside of {asked}"
    assert str(pin.marker) == str(asked.marker)


@pytest.mark.parametrize("text", PROJECT["dependencies"])
def test_what_runs_here_is_inside_the_ranges(text):
    asked = Requirement(text)
    if asked.marker is None or asked.marker.evaluate():
        assert asked.specifier.contains(version(asked.name), prereleases=True)


def test_torch_without_a_gpu_is_the_cpu_build_where_there_is_one():
    candidates = [requirement for requirement, _ in torch_candidates("2.13.0", has_gpu=False)]
    assert candidates == ["torch==2.13.0+cpu", "torch==2.13.0"]


def test_torch_with_a_gpu_is_never_the_cpu_build_by_choice():
    first, second = (requirement for requirement, _ in torch_candidates("2.13.0", has_gpu=True))
    assert (first, second) == ("torch===2.13.0", "torch==2.13.0")
    assert not Requirement(first).specifier.contains("2.13.0+cpu")
    assert Requirement(second).specifier.contains("2.13.0+cpu")


def test_pins_leave_out_builds_and_the_project():
    frozen = (
        "torch==2.13.0+cpu\npip==23.2\nepmoe==0.1.0\ntriton==3.7.1\nBabel==2.19\n-e /somewhere\n"
    )
    assert pins(frozen) == [
        "Babel==2.19",
        "torch==2.13.0",
        "triton==3.7.1; sys_platform == 'linux'",
    ]


def test_a_pin_that_is_missing_is_named():
    assert pinned("triton", CONSTRAINTS) == "3.7.1"
    with pytest.raises(SystemExit, match="no-such-thing"):
        pinned("no-such-thing", CONSTRAINTS)


def test_an_old_python_is_told_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr("tools.setup_env.sys.version_info", (3, 10, 9))
    assert main(["dev"]) == 1
    assert "Python 3.11" in capsys.readouterr().out


def test_make_names_a_missing_python(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "setup_env.py").touch()
    done = subprocess.run(
        ["make", "setup", "PYTHON="], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "no Python >= 3.11 found" in done.stderr


@pytest.mark.parametrize("script", [".ci/run"])
def test_scripts_parse_and_can_be_run(script):
    path = ROOT / script
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.stat().st_mode & 0o111
