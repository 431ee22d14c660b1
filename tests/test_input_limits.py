"""Values that nothing can be done with are refused where they are given, with the value and the fix in the message."""

import json
import math
from typing import Any

import pytest
from typer.testing import CliRunner

from epmoe.core import cli, launch, own_file
from epmoe.core.balance import balance
from epmoe.core.capabilities import Spec, Wishes
from epmoe.core.commands import check
from epmoe.core.commands.balance import read_counts
from epmoe.core.errors import InputError
from epmoe.core.placement import contiguous, round_robin
from epmoe.core.shape import named_shape

E = named_shape("tiny").experts
DEEP = "[" * 100_000


@pytest.fixture
def no_ranks(monkeypatch):
    def started(*args, **kwargs):
        pytest.fail("ranks were started before the arguments were looked at")

    monkeypatch.setattr(launch, "choose_here", started)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": 0},
        {"ranks": -1},
        {"ranks": 2.0},
        {"ranks": True},
        {"tokens": -1},
        {"topk": 0},
        {"experts": "8"},
        {"local_experts": 0},
        {"arch": "x"},
        {"arch": (9,)},
        {"memory": "5"},
        {"memory": -1},
        {"deterministic": "no"},
    ],
)
def test_needs_that_are_none(wrong: dict[str, Any]):
    (name,) = wrong
    with pytest.raises(InputError, match=f"{name}=.*: give"):
        Spec(**wrong)


def test_wishes_that_are_none():
    with pytest.raises(InputError, match="memory='5'"):
        Wishes(memory="5")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("limit", [math.nan, math.inf, 0, -3, "5", True])
def test_launch_refuses_a_time_limit_that_is_none(limit, no_ranks):
    with pytest.raises(InputError, match=r"timeout=.*above 0"):
        launch.launch(print, timeout=limit)
    with pytest.raises(InputError, match=r"start_timeout=.*above 0"):
        launch.RankPool(2, start_timeout=limit)


@pytest.mark.parametrize("words", ["--tokens 0", "--tokens 8,0", "--out {folder}"])
def test_tune_refuses_before_it_tunes(words, no_ranks, tmp_path):
    line = ["tune", "--device", "cpu", *words.format(folder=tmp_path).split()]
    assert isinstance(CliRunner().invoke(cli.app, line).exception, InputError)


def test_tune_refuses_a_folder_that_the_environment_names(no_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv(own_file.VARIABLE, str(tmp_path))
    result = CliRunner().invoke(cli.app, ["tune", "--device", "cpu"])
    assert "cannot be written" in str(result.exception)


@pytest.mark.parametrize("content", [DEEP.encode(), b"\xff\xfe", b"[1e400]", b"[NaN]"])
def test_files_that_are_no_json(content, tmp_path):
    file = tmp_path / "file.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=str(file)):
        own_file.load(file)
    with pytest.raises(InputError):
        balance(read_counts(file)[0], 2)


def test_counts_beyond_a_counter():
    with pytest.raises(InputError, match=r"counts\[1\]=.* from 0 to"):
        balance([1, 10**400], 2)
    assert balance([2**63 - 1, 1], 2).excess(contiguous(2, 2)) > 1


def test_check_runs_the_map_that_a_layer_would_get(tmp_path):
    file = tmp_path / "map.json"
    wanted = {"round_robin": round_robin(E, 2), str(file): contiguous(E, 2)}
    file.write_text(wanted[str(file)].to_json())
    for text, placement in wanted.items():
        case = check.cases("00_reference", "tiny", "1", "uniform", 2, 1, text)[0]
        assert case.placed() == placement


def test_counts_of_a_file(tmp_path):
    file = tmp_path / "counts.json"
    file.write_text(json.dumps([[1, 2], [3, 4]]))
    assert read_counts(file) == {0: [1, 2], 1: [3, 4]}
