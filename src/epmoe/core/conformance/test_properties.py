"""Random layers and calls: whatever the sizes, the promise is the same."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from epmoe.core import groups
from epmoe.core.capabilities import Capabilities
from epmoe.core.cases import Case
from epmoe.core.conformance.plugin import judged, skip_unless_served
from epmoe.core.draws import KINDS
from epmoe.core.shape import MoEShape
from epmoe.core.verify import run_case


@st.composite
def cases(draw, stage: str, ranks: int, can: Capabilities) -> Case:
    """Any legal case of `ranks` ranks with small sizes, of what the stage offers."""
    experts = draw(st.integers(1, 12))
    shape = MoEShape(
        # a narrower layer's answer may be all but zero by chance, which is no yardstick
        hidden=draw(st.integers(8, 40)),
        intermediate=draw(st.integers(8, 24)),
        experts=experts,
        topk=draw(st.integers(1, experts)),
    )
    calls = draw(st.integers(1, 3))
    rank = st.integers(0, ranks - 1)
    several = st.sets(rank, min_size=1).map(lambda held: tuple(sorted(held)))
    kinds = {
        "contiguous": st.just("contiguous"),
        "round_robin": st.just("round_robin"),
        "explicit": st.lists(rank, min_size=experts, max_size=experts).map(tuple),
        "replicated": st.lists(several, min_size=experts, max_size=experts).map(tuple),
    }
    offered = [placements for kind, placements in kinds.items() if kind in can.placements]
    some = st.sets(rank, max_size=ranks - 1).map(lambda held: tuple(sorted(held)))
    return Case(
        stage=stage,
        shape=shape,
        tokens=tuple(tuple(draw(st.integers(0, 9)) for _ in range(ranks)) for _ in range(calls)),
        kind=draw(st.sampled_from(KINDS)),
        placement=draw(st.one_of(offered)),
        gone=draw(some) if can.maskable else (),
        lost=draw(st.sampled_from(["drop", "renormalise"])),
        seed=draw(st.integers(0, 1000)),
        strided=draw(st.booleans()),
        declared=draw(st.booleans()),
    )


def holds_everywhere(
    judge: Callable[[Case], object], ranks: int, stage: str, can: Capabilities, examples: int
) -> None:
    """`judge` raises for no case."""

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(cases(stage, ranks, can))
    def holds(case: Case) -> None:
        judge(case)

    holds()


def test_any_case_on_one_rank(stage, pool, capabilities, check, interpreted):
    """In this process, without torch.distributed; on a rank where kernels need one that was started for them."""

    def here(case: Case) -> None:
        skip_unless_served(pool, capabilities, case)
        judged([run_case(groups.single(pool.choice.device_of(0)), case)])

    examples = 4 if interpreted else 40
    holds_everywhere(check if interpreted else here, 1, stage, capabilities, examples)


def test_any_case_on_three_ranks(stage, capabilities, check, interpreted):
    holds_everywhere(check, 3, stage, capabilities, 3 if interpreted else 16)
