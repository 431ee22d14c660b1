"""`epmoe stages --why`: what it asks for by itself, what it shows, and what it refuses."""

import json
import shlex

import pytest
import torch
from docs_hooks import fact_choosing
from typer.testing import CliRunner

from epmoe.core import measured, own_file, registry
from epmoe.core.choosing import candidates
from epmoe.core.cli import app
from epmoe.core.commands import terminal
from epmoe.core.commands.stages import situation, weigh
from epmoe.core.errors import InputError
from epmoe.core.measured import Comparison, Situation


@pytest.fixture(autouse=True)
def no_file(monkeypatch, tmp_path):
    monkeypatch.setenv(own_file.VARIABLE, str(tmp_path / "own.json"))
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path / "own.json"


def stages(words: str):
    return CliRunner().invoke(app, ["stages", *shlex.split(words)])


def data_of(words: str) -> dict:
    return json.loads(stages(f"--why {words} --json -").stdout)


def test_the_table_has_the_choice_and_every_other_with_its_reasons():
    done = stages("--why --device cuda --arch 7.5 --ranks 4")
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert "chosen 02_fixed_capacity ladder order" in lines
    assert "03_fused_triton compute capability (7, 5) is below (8, 0)" in lines
    for name in ("00_reference", "01_variable_a2a", "all_gather+triton"):
        assert name in done.output
    assert "transport=nccl" in done.output
    assert "arch=7.5" in done.output


def test_json_says_the_same():
    data = data_of("--device cuda --arch 9.0 --ranks 4 --batch-invariant")
    assert data["chosen"] == "03_fused_triton"
    assert data["options"] == {"batch_invariant": True}
    assert set(registry.names()) <= {data["chosen"], *data["reasons"]}
    assert "is not batch invariant" in data["reasons"]["02_fixed_capacity"]


def test_by_default_this_machine_is_asked_about():
    spec = situation()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert spec.device == device
    assert spec.ranks == max(1, torch.cuda.device_count())
    assert spec.device_name == own_file.device_name(torch.device(device))
    assert (spec.arch is None) == (device == "cpu")


def test_a_gpu_that_is_not_here_has_no_measurements():
    assert situation(device="cuda", arch="7.5").device_name is None
    assert situation(arch="7.5").device == "cuda"


def test_measured_times_of_this_machine_are_used(no_file):
    shape = situation().shape
    found = Comparison(
        device="cpu",
        situation=Situation(
            transport="gloo", dtype="float32", hidden=shape.hidden, intermediate=shape.intermediate,
            experts=shape.experts, topk=shape.topk, ranks=2, tokens=8,
        ),
        microseconds={"01_variable_a2a": 10.0, "02_fixed_capacity": 20.0},
        created="2026-11-29",
        versions={"torch": "2"},
    )  # fmt: skip
    measured.keep([found], no_file)
    words = "--device cpu --ranks 2 --tokens 8"
    data = data_of(words)
    assert data["chosen"] == "01_variable_a2a"
    assert data["by"] == "measured: 10.0 us, T=8 on cpu, 2026-11-29 (torch 2)"
    assert data_of(words + " --graph")["by"] == "ladder order"
    assert data_of(words + "0")["by"] == "ladder order"


def test_nobody_can_is_a_table_too_and_exit_code_1():
    done = stages("--why --device cpu --memory 1KiB")
    assert done.exit_code == 1
    assert "No stage can serve this." in done.output
    data = data_of("--device cpu --memory 1KiB")
    assert data["chosen"] is None
    assert all(data["reasons"].values())


def test_without_why_questions_are_refused():
    done = stages("--ranks 4 --graph")
    assert isinstance(done.exception, InputError)
    assert str(done.exception) == "--ranks, --graph: only --why looks at that, add it"


def test_the_list_names_what_options_switch_on(monkeypatch):
    monkeypatch.setattr(terminal.answers, "width", 150)  # whatever terminal the tests run in
    rows = {row["stage"]: row for row in json.loads(stages("--json -").stdout)}
    assert rows["03_fused_triton"]["grants"] == {"batch_invariant": {"batch_invariant": True}}
    assert rows["00_reference"]["grants"] == {}
    assert "batch_invariant=True" in stages("").output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--device tpu", "give 'auto', 'cpu' or 'cuda'"),
        ("--arch nine", "give a compute capability"),
        ("--arch 9.0 --device cpu", "a CPU has no compute capability"),
        ("--dtype int8", "choose auto, float32"),
        ("--shape nobody", "no shape is called"),
        ("--transport pigeon", "choose one of single, gloo, nccl, loopback"),
        ("--transport nccl --device cpu --ranks 2", "that is gloo, or loopback"),
        ("--placement upside_down", "choose one of contiguous"),
        ("--memory lots", "give bytes, or a number of KiB"),
    ],
)
def test_wrong_questions_are_named(words, message):
    done = stages(f"--why {words}")
    assert isinstance(done.exception, InputError), done.output
    assert message in str(done.exception)


def test_the_situations_of_the_site():
    """What the page says is what `select` says: a choice or every reason, in each of its situations."""
    found = {
        name: weigh(fact_choosing.spec_of(asked), ())
        for name, asked in fact_choosing.SITUATIONS.items()
    }
    everything = set(candidates())
    for name, data in found.items():
        assert set(data["reasons"]) == everything - {data["chosen"]}, name
        assert all(data["reasons"].values()), name
    assert found["a laptop without a GPU, four ranks on it"]["chosen"] == "02_fixed_capacity"
    assert found["an old GPU (compute capability 7.5)"]["chosen"] == "02_fixed_capacity"
    assert found["four GPUs, decode in CUDA graphs"]["chosen"] == "03_fused_triton"
    invariant = found["a token's bits independent of its batch"]
    assert invariant["options"] == {"batch_invariant": True}
    assert found["the same with 2 GiB for buffers"]["chosen"] is None
    assert found["the same in rounds of C = 2048"]["chosen"] == "03_fused_triton"
