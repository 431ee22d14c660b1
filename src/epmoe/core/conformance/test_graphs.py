"""CUDA graphs, where the stage declares them. All skip without a CUDA device, naming the command that runs them."""

import pytest
import torch

from epmoe.core.cases import Case
from epmoe.core.conformance import graph_program, soak_program
from epmoe.core.conformance.shapes import USUAL
from epmoe.core.verify import tolerance

RANKS = [1, 2, 4]


def _offered(capabilities):
    if not capabilities.graph_capturable:
        pytest.skip("not offered: the stage does not declare graph_capturable")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_7C_replays_with_other_routing(stage, gpu_run, capabilities, ranks, dtype):
    """7C, 7E: one capture, 12 replays with other tokens, ids and T; rows past T hold NaN and name nobody."""
    _offered(capabilities)
    calls = tuple(tuple((c * (r + 3) + r) % 9 for r in range(ranks)) for c in range(10))
    tokens = (*calls, (0,) * ranks, (8,) * ranks)
    for kind in ("uniform", "one_rank", "masked"):
        case = Case(stage=stage, shape=USUAL, tokens=tokens, kind=kind, dtype=dtype, capacity=8)
        for rows in gpu_run(graph_program.graph_replays, case):
            assert all(row is None or row.right for row in rows), rows


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_thousand_replays(stage, gpu_run, capabilities, ranks, dtype):
    """1,000 replays, each with fresh tokens and routing of every kind, ranks idle at times; some held to eager bits."""
    _offered(capabilities)
    case = Case(stage=stage, shape=USUAL, tokens=((8,) * ranks,), dtype=dtype, capacity=8)
    for found in gpu_run(soak_program.soak, case, 1000, timeout=240.0):
        assert found.replays == 1000
        # float32's tolerance is made for thousands of rows, that of half types for the few of other checks
        tail = 1 if dtype == torch.float32 else 2
        assert found.error <= tail * tolerance(dtype), found
        assert found.unlike_eager == 0, found


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", RANKS)
def test_7B_several_graphs(stage, gpu_run, capabilities, ranks):
    """7B: graphs of two sizes, one deleted, then the other, then eager, then captured again."""
    _offered(capabilities)
    case = Case(stage=stage, shape=USUAL, tokens=((3, 0, 4, 1)[:ranks],), capacity=8)
    for rows in gpu_run(graph_program.several_graphs, case):
        assert all(row is None or row.right for row in rows), rows


@pytest.mark.gpu
def test_7D_real_capture_refused(stage, gpu_run, capabilities):
    """7D: a stage that waits for the host says so in a real capture; the stream works on."""
    if capabilities.graph_capturable:
        pytest.skip("the stage can be captured: see the other checks here")
    case = Case(stage=stage, shape=USUAL, tokens=((3, 2),))
    for found in gpu_run(graph_program.real_refused_capture, case):
        assert found["said"].startswith("NotCapturableError"), found
        assert found["row"].right, found["row"]
