"""Every fusion switched off alone: the same result, and the launches that it saves come back."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from epmoe.core import ledger
from epmoe.core.cases import Case
from epmoe.core.groups import EPGroup
from epmoe.core.shape import MoEShape
from epmoe.core.verify import build_case, tolerance
from epmoe.fused_triton.fusions import FUSIONS

STAGE = Path(__file__).parents[1].name
SHAPE = MoEShape(name="odd", hidden=37, intermediate=21, experts=6, topk=3)
ALL = {"route_pack", "group", "gate_up", "down", "reduce", "merge"}


def route_and_run(group: EPGroup, case: Case) -> tuple[Tensor, Counter[str]]:
    """One call from logits, ranks 0 to 3 with different numbers of tokens: the result and what was launched."""
    layer = build_case(group, case)
    x_TH = case.tokens_of(0, group.rank).to(group.device)
    generator = torch.Generator().manual_seed(group.rank)
    logits_TE = torch.randn(len(x_TH), case.shape.experts, generator=generator).to(group.device)
    with ledger.record() as book:
        y_TH = layer.from_logits(x_TH, logits_TE, max_tokens=case.max_tokens(0))
    layer.close()
    return y_TH.cpu(), book.launches


@pytest.fixture
def route(run):
    def route(*without: str) -> list[tuple[Tensor, Counter[str]]]:
        case = Case(
            stage=STAGE,
            shape=SHAPE,
            tokens=((3, 0, 1, 5),),
            declared=True,
            options={"without": ",".join(without)},
        )
        return run(route_and_run, case)

    return route


@pytest.mark.parametrize("fusion", [f for f in FUSIONS if f != "router"])
def test_off_alone_gives_the_same_bits(stage, route, fusion):
    """A twin adds in the same order. Both calls route in torch: without "pack", the router cannot be fused either."""
    for (y_TH, _), (fused_TH, _) in zip(route("router", fusion), route("router"), strict=True):
        assert torch.equal(y_TH, fused_TH)


def test_another_router_rounds_weights_by_itself(stage, route):
    """The same experts, or whole outputs would differ; their weights within a few roundings."""
    for (y_TH, _), (fused_TH, _) in zip(route("router"), route(), strict=True):
        largest = max(fused_TH.abs().flatten().tolist(), default=0.0)
        torch.testing.assert_close(
            y_TH, fused_TH, rtol=0, atol=tolerance(torch.float32) / 2 * largest
        )


@pytest.mark.parametrize("fusion", FUSIONS)
def test_off_alone_costs_launches(stage, route, fusion):
    """All but one save launches; "overlap" saves time between them."""
    for (_, launches), (_, fused) in zip(route(fusion), route(), strict=True):
        saved = launches.total() - fused.total()
        assert saved == 0 if fusion == "overlap" else saved > 0, dict(launches)


def test_the_ladder_ends_at_six_kernels(stage, route):
    """Switched on one by one, in the order of the list, no fusion adds a launch; on every rank, with tokens or none."""
    off, ladder = list(FUSIONS), []
    while True:
        ladder.append([launches.total() for _, launches in route(*off)])
        if not off:
            break
        off.pop(0)
    for before, after in itertools.pairwise(ladder):
        assert all(b >= a for b, a in zip(before, after, strict=True)), ladder
    for y_TH, launches in route():
        expected = ALL if len(y_TH) else ALL - {"merge"}  # an empty grid starts nothing
        assert launches == Counter(expected)
