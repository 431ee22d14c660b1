"""`epmoe bench` from the command line to a valid file, on a CPU, in seconds."""

import json
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from epmoe.core.balance import balance
from epmoe.core.bench import vllm_subjects
from epmoe.core.bench.results import load
from epmoe.core.bench.run import Config, estimate_seconds, run
from epmoe.core.bench.subjects import resolve_names
from epmoe.core.bench.workload import Routing
from epmoe.core.cli import app
from epmoe.core.errors import InputError
from epmoe.core.groups import single

QUICK = ["--draws", "2", "--blocks", "2", "--replays", "2", "--layers", "2", "--device", "cpu"]


def bench(*words):
    return CliRunner().invoke(app, ["bench", *words], catch_exceptions=False)


def test_stages_on_two_ranks_end_to_end(tmp_path):
    path = tmp_path / "r.json"
    words = ["--shape", "tiny", "--ep", "2", "--tokens", "1,5", "--subjects", "01,02"]
    done = bench(*words, *QUICK, "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "01_variable_a2a" in done.output
    assert "bench: T=1: 01_variable_a2a" in done.stderr, "rank 0 tells how far it is"
    assert "bench: T=5: 01_variable_a2a" in done.stderr
    result = load(path)
    assert [p.tokens for p in result.points] == [1, 5]
    assert result.setting["transport"] == "gloo"
    assert result.setting["clock"] == "host clock"
    for point in result.points:
        assert set(point.subjects) == {"01_variable_a2a", "02_fixed_capacity"}
        assert {m.mode for m in point.subjects.values()} == {"eager"}
        assert len(point.draws) == 2
        assert all(len(d.active) == 2 for d in point.draws)


def test_loopback_is_labelled_and_run_may_be_said(tmp_path):
    path = tmp_path / "r.json"
    words = ["--shape", "tiny", "--ep", "4", "--loopback", "--rank", "1", "--tokens", "3"]
    done = bench("run", *words, "--subjects", "02,grouped_mm,01", *QUICK, "--json", str(path))
    assert done.exit_code == 0, done.output
    result = load(path)
    assert result.setting["loopback"] is True
    assert result.setting["transport"] == "loopback"
    assert result.setting["rank"] == 1
    assert "transport loopback" in result.points[0].refused["01_variable_a2a"]
    assert result.points[0].ratios[0].of == "02_fixed_capacity"


@pytest.mark.parametrize("where", [("--loopback", "--rank", "1"), ()], ids=["loopback", "ranks"])
def test_replicas_are_measured_behind_the_same_gates(tmp_path, where):
    file, path = tmp_path / "map.json", tmp_path / "r.json"
    file.write_text(balance(range(32), 2, redundant=2).after.to_json())
    words = ["--shape", "tiny", "--ep", "2", "--tokens", "3", "--placement", str(file), *where]
    done = bench("run", *words, "--subjects", "02,grouped_mm", *QUICK, "--json", str(path))
    assert done.exit_code == 0, done.output
    result = load(path)
    assert result.setting["placement"] == "replicated"
    assert result.points[0].subjects["02_fixed_capacity"].error is None
    assert "knows no replicas" in result.points[0].refused["grouped_mm"]


def test_other_maps_are_not_remembered():
    words = ["--shape", "tiny", "--ep", "2", "--placement", "round_robin", "--remember"]
    with pytest.raises(InputError, match="times of contiguous maps"):
        bench("run", *words, *QUICK)


def test_time_limit_leaves_sizes_out_and_says_so():
    config = Config(
        shape="tiny", ep=2, loopback=True, tokens=(1, 2), subjects=("grouped_mm",), seconds=-1
    )
    result = run(single("cpu"), config)
    assert result.points == []
    assert set(result.skipped) == {"1", "2"}
    assert "the limit is -1 s" in result.skipped["1"]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_under_torchrun_every_rank_ends_alike_and_rank_0_answers(monkeypatch, tmp_path, rank):
    config = Config(
        shape="tiny", ep=2, loopback=True, tokens=(1,), subjects=("grouped_mm",), draws=1, blocks=1
    )
    result = run(single("cpu"), config)
    subjects = result.points[0].subjects
    subjects["grouped_mm"] = replace(subjects["grouped_mm"], error="was wrong")
    monkeypatch.setattr("epmoe.core.bench.cli._run", lambda *_: result)
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    done = bench("--json", "-")
    assert done.exit_code == 1
    assert done.output == (result.text() if rank == "0" else "")


@pytest.mark.parametrize(("words", "ep"), [((), 2), (("--loopback",), 4)])
def test_under_torchrun_its_world_is_measured(monkeypatch, words, ep):
    seen = []

    def measure(config, *_):
        seen.append(config.ep)
        raise typer.Exit

    monkeypatch.setattr("epmoe.core.bench.cli._run", measure)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    bench("--ep", "4", *words)
    assert seen == [ep]


def test_a_run_in_which_nobody_was_measured_is_no_success():
    words = ["--shape", "tiny", "--ep", "2", "--loopback", "--tokens", "1"]
    done = bench(*words, "--subjects", "vllm-default,vllm-tuned", *QUICK)
    assert done.exit_code == 1
    assert "nothing was measured" in done.stderr
    assert done.stdout.count("need a CUDA device") == 2, "also where the sweep could not run"
    assert "ratio of times" not in done.stdout


def test_estimate_runs_nothing():
    done = bench("--ep", "4", "--loopback", "--estimate", "--subjects", "02,grouped_mm")
    assert done.exit_code == 0
    assert "for 2 subjects on h200" in done.output
    base = Config(tokens=(1, 8))
    assert estimate_seconds(base, 2) == pytest.approx(2 * estimate_seconds(base, 1))
    half = Config(tokens=(1, 8), blocks=10)
    assert estimate_seconds(half, 2) == pytest.approx(estimate_seconds(base, 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": ()}, "at least one T"),
        ({"tokens": (0,)}, "at least 1"),
        ({"draws": 0}, "draws=0"),
        ({"rank": 4}, "between 0 and 3"),
        ({"rank": 1}, "rank=1: only loopback plays one rank, add --loopback"),
    ],
)
def test_bad_settings_are_refused(changes, words):
    with pytest.raises(InputError, match=words):
        Config(**changes)


def test_a_word_that_is_no_command_is_called_so():
    done = bench("foo", "--ep", "2")
    assert done.exit_code == 2
    assert "No such command 'foo'" in done.stderr


def test_bad_routing_and_subject_are_refused():
    with pytest.raises(InputError, match=r"skew=2\.0: uniform has no exponent"):
        Routing(kind="uniform", skew=2.0)
    with pytest.raises(InputError, match="hot_expert has no exponent"):
        Routing.parse("hot_expert:0.5")
    with pytest.raises(InputError, match="choose one of uniform"):
        Routing(kind="masked")
    with pytest.raises(InputError, match="no stage called"):
        resolve_names(["nonsense"], 1)
    with pytest.raises(InputError, match="named twice"):
        resolve_names(["02", "fixed_capacity"], 1)


def test_ranks_and_ep_must_fit():
    with pytest.raises(InputError, match="loopback takes one process"):
        run(single("cpu"), Config(shape="tiny", ep=2, tokens=(1,)))


def test_auto_means_every_stage_and_the_vllm_that_fits():
    alone, several = resolve_names(["auto"], 1), resolve_names(["auto"], 2)
    assert "02_fixed_capacity" in alone
    assert "grouped_mm" in alone
    assert "vllm-default" in alone
    assert "vllm-agrs" not in alone
    assert "vllm-agrs" in several
    assert "vllm-default" not in several


@pytest.mark.parametrize("rows", [4, 128, 512, 2048, 8192, 32768])
def test_candidates_are_distinct_and_fit(rows):
    found = vllm_subjects.candidates(rows, 100)
    assert len(found) >= 8
    assert len({json.dumps(c) for c in found}) == len(found)
    for c in found:
        tile = (c["BLOCK_SIZE_M"] + c["BLOCK_SIZE_N"]) * c["BLOCK_SIZE_K"] * 2
        assert tile * c["num_stages"] <= 227 * 1024
    assert vllm_subjects.candidates(rows, 3) == found[:3]


def test_configs_travel_in_vllms_format(tmp_path):
    path = tmp_path / "E=72,N=2048.json"
    configs = {4: vllm_subjects.candidates(4, 1)[0], 512: vllm_subjects.candidates(512, 1)[0]}
    vllm_subjects.write_configs(path, configs)
    assert vllm_subjects.read_configs(path) == configs
    assert "triton_version" in json.loads(path.read_text())
    path.write_text("[]")
    with pytest.raises(InputError, match="no vLLM configuration"):
        vllm_subjects.read_configs(path)
