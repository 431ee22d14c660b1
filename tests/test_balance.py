"""Maps from routing counts: every expert placed, slots equal, never worse than contiguous, always the same."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from epmoe.core.balance import balance
from epmoe.core.checkpoints import inspect
from epmoe.core.cli import app
from epmoe.core.commands.balance import read_counts, routed_counts
from epmoe.core.errors import InputError
from epmoe.core.placement import Placement, contiguous
from epmoe.core.tour import find_model

QUIET = settings(max_examples=300, deadline=None, derandomize=True, database=None)


@st.composite
def problems(draw) -> tuple[list[int], int, int]:
    """Counts, ranks and redundant slots: few experts, so that replicas are many, and skewed counts."""
    ranks = draw(st.integers(1, 7))
    counts = draw(st.lists(st.integers(0, 9) | st.integers(0, 10**6), min_size=1, max_size=24))
    most = len(counts) - -(-len(counts) // ranks)
    return counts, ranks, draw(st.integers(0, most))


@QUIET
@given(problems())
def test_any_counts(problem):
    counts, ranks, redundant = problem
    found = balance(counts, ranks, redundant)
    placement = found.after
    assert all(placement.homes)
    assert placement.experts == len(counts)
    held = placement.counts()
    assert max(held) - min(held) <= len(counts) % ranks > 0 or max(held) == min(held)
    assert max(held) <= max(contiguous(len(counts), ranks).counts()) + redundant
    assert sum(found.loads(placement)) == pytest.approx(sum(counts))
    assert max(found.loads(placement)) <= max(found.loads(found.before))
    assert found.gained == (max(found.loads(placement)) < max(found.loads(found.before)))
    assert balance(counts, ranks, redundant) == found


@QUIET
@given(problems())
def test_all_redundant_slots_are_used_where_something_is_gained(problem):
    counts, ranks, redundant = problem
    found = balance(counts, ranks, redundant)
    if found.gained:
        assert sum(found.after.counts()) == len(counts) + redundant * ranks


def test_worked_example():
    """The numbers of the module's docstring."""
    found = balance([6, 1, 1, 2], 2)
    assert not found.gained
    assert found.loads(found.after) == (7, 3)
    found = balance([6, 1, 1, 2], 2, redundant=1)
    assert found.after.homes[0] == found.after.homes[3] == (0, 1)
    assert found.loads(found.after) == (5, 5)
    assert found.excess(found.after) == 1.0


def test_longest_first_by_hand():
    """9 and 8 part; 5 goes to the 8, 4 to the 9 with the last slot: 13 and 13."""
    found = balance([9, 8, 5, 4], 2)
    assert found.after.homes == ((0,), (1,), (1,), (0,))
    assert (found.loads(found.before), found.loads(found.after)) == ((17, 9), (13, 13))


def test_the_hottest_replica_gets_the_next_slot():
    """100 and 60 with two more slots: 100 is halved, then 60 is the hottest, and is halved."""
    found = balance([100, 60, 1, 1], 2, redundant=1)
    assert [len(homes) for homes in found.after.homes] == [2, 2, 1, 1]


def test_a_tight_fit_finds_different_ranks():
    """One slot is missing to have everything everywhere: the least loaded rank alone would leave two alike."""
    for missing in range(4):
        counts = [7 if e == missing else 100 - e for e in range(4)]
        found = balance(counts, 4, redundant=2)
        assert found.after.counts() == (3, 3, 3, 3)


def test_nothing_counted_gains_nothing():
    found = balance([0, 0, 0], 2)
    assert not found.gained
    assert found.after == contiguous(3, 2)
    assert found.excess(found.after) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 2), "counts are empty"),
        (([1, -1], 2), r"counts\[1\]=-1: give a whole number"),
        (([1, 0.5], 2), r"counts\[1\]=0.5: give a whole number"),
        (([1, True], 2), r"counts\[1\]=True: give a whole number"),
        (([1, 2], 0), "ranks=0"),
        (([1, 2], 2, -1), "redundant=-1"),
        (([1, 2, 3], 2, 2), "redundant=2: .* give 0 to 1 for 3 experts on 2 ranks"),
    ],
)
def test_bad_counts_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        balance(*arguments)


def test_maps_travel_as_json():
    after = balance([100, 60, 1, 1], 2, redundant=1).after
    assert Placement.from_json(after.to_json()) == after


# ---- the command

COUNTS = [[100, 60, 1, 1], [5, 5, 5, 5]]


def command(*arguments: str):
    return CliRunner().invoke(app, ["balance", *arguments])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps(COUNTS))
    return path


def test_command_shows_what_is_gained_and_what_is_not(file):
    result = command(str(file), "--ep", "2", "--redundant", "1")
    assert result.exit_code == 0, result.output
    first, replicated, second = [line.split() for line in result.output.splitlines()[4:7]]
    assert first == ["0", "contiguous", "2", "160.0", "81.0", "1.98"]
    assert replicated == ["replicated", "3", "81.0", "81.0", "1.00"]
    assert second == ["1", "contiguous", "2", "10.0", "10.0", "1.00"]
    assert "serves 54% of what it did. layer 1: nothing is gained" in " ".join(
        result.output.split()
    )


def test_command_writes_what_other_commands_read(file, tmp_path):
    out = tmp_path / "map.json"
    result = command(str(file), "--ep", "2", "--layer", "0", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert Placement.from_json(out.read_text()) == balance(COUNTS[0], 2).after
    shown = CliRunner().invoke(
        app, ["plan", "--shape", "toy", "--ep", "2", "--tokens", "4", "--placement", str(out)]
    )
    assert shown.exit_code == 0, shown.output


def test_check_runs_on_the_map(tmp_path):
    out = tmp_path / "map.json"
    out.write_text(balance([90, 5, 5, 9], 2, redundant=1).after.to_json())
    words = ["check", "01", "--shape", "toy", "--ranks", "2", "--tokens", "3", "--draw", "uniform"]
    words += ["--seeds", "1", "--placement", str(out), "--device", "cpu", "--json", "-"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    (case,) = json.loads(result.stdout)["cases"]
    assert {rank["layer"]["placement"] for rank in case["ranks"]} == {"replicated"}


def test_command_writes_a_map_for_every_layer(file):
    result = command(str(file), "--ep", "2", "--json", "-")
    maps = [Placement.from_json(json.dumps(one)) for one in json.loads(result.stdout)]
    assert maps == [balance(one, 2).after for one in COUNTS]


def test_command_counts_a_checkpoints_own_routing():
    """The tiny model reads the tour's text: every token names K experts of each layer."""
    model = find_model(None)
    info = inspect(model)
    one = info.moe_layers[1]
    counts = routed_counts(model, None, None, 50)
    assert tuple(counts) == info.moe_layers
    of_layer = counts[one]
    assert routed_counts(model, one, None, 50) == {one: of_layer}
    assert len(of_layer) == info.shape.experts
    assert sum(of_layer) == 50 * info.shape.topk
    assert max(of_layer) > 2 * sum(of_layer) / len(of_layer)  # real routing is uneven


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "one of the two"),
        (("{file}", "--model", "x"), "one of the two"),
        (("{file}", "--text", "x"), "give --model too"),
        (("{file}", "--layer", "2"), "layers 0 to 1"),
        (("{file}", "--ep", "2", "--redundant", "3"), "redundant=3"),
        (("no_such_file",), "no counts in no_such_file"),
    ],
)
def test_command_refuses(file, arguments, message):
    result = command(*(str(file) if a == "{file}" else a for a in arguments))
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)


@pytest.mark.parametrize("text", ["{}", "[]", "7", "[1,", "[1, [2]]"])
def test_other_files_are_named(tmp_path, text):
    path = tmp_path / "counts.json"
    path.write_text(text)
    assert isinstance(command(str(path)).exception, InputError)


def test_layers_of_different_numbers_of_experts_are_refused(tmp_path):
    """One of them lacks counts, and its map would be of another model."""
    path = tmp_path / "counts.json"
    path.write_text("[[1, 2], [3, 4], [1]]")
    with pytest.raises(InputError, match="2 experts in layer 0 and 1 in layer 2"):
        read_counts(path)
