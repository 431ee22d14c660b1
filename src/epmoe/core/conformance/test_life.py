"""From build to close: several layers at once, many cycles, what a closed layer says."""

import pytest

from epmoe.core.cases import Case
from epmoe.core.conformance import program
from epmoe.core.conformance.shapes import SMALL
from epmoe.core.shape import MoEShape


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["small_first", "large_first"])
def test_14B_layers_of_other_sizes_interleaved(stage, run, order):
    """14B: other H, K, E and C side by side, built in both orders and called in turn."""
    small = Case(stage=stage, shape=SMALL, tokens=((8, 2), (0, 3), (5, 8)))
    wide = MoEShape(hidden=40, intermediate=16, experts=6, topk=4)
    large = Case(stage=stage, shape=wide, tokens=((32, 1), (7, 0), (20, 32)), seed=1)
    first, second = [(small, large)[i] for i in order]
    for rows in run(program.interleaved, first, second):
        assert all(row is None or row.right for row in rows), rows


@pytest.mark.large
def test_10E_build_and_close_leak_nothing(stage, run):
    """10E: 50 cycles leave no file, process group or tensor behind."""
    case = Case(stage=stage, shape=SMALL, tokens=((3, 2),))
    for early, late in run(program.cycles, case, 50):
        assert early == late, "open files, process groups, live tensors"


@pytest.mark.large
def test_10E_many_layers_on_one_group(stage, run):
    """10E: 48 layers alive at once, as in a model."""
    case = Case(stage=stage, shape=SMALL, tokens=((3, 2),))
    for row in run(program.many_layers, case, 48):
        assert row.right, row


@pytest.mark.parametrize("ranks", [1, 2])
def test_warmup_describe_close(stage, run, ranks):
    """Warm-up is harmless, close may be called twice, a closed layer says so."""
    case = Case(stage=stage, shape=SMALL, tokens=((3, 2)[:ranks],), capacity=8)
    for found in run(program.ends, case):
        assert found["row"].right, found["row"]
        assert found["describe"]["stage"] == stage
        assert found["describe"]["ranks"] == ranks
        assert found["describe"]["max_tokens_per_rank"] == 8
        assert found["after"].startswith(f"InputError: this {stage} layer is closed")
