"""Routing statistics: the toy by hand, every draw against a count in plain Python, no wait before they are read."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from epmoe.core import groups, ledger, phases
from epmoe.core.cases import Case
from epmoe.core.conformance.plugin import NEEDS_CUDA
from epmoe.core.errors import InputError
from epmoe.core.expert_tables import ExpertTables
from epmoe.core.graphs import GraphedCall
from epmoe.core.groups import EPGroup
from epmoe.core.placement import Placement, contiguous, replicated, round_robin
from epmoe.core.routing import route
from epmoe.core.routing_stats import (
    RoutingCounter,
    RoutingStats,
    count_draw,
    count_routing,
    render,
)
from epmoe.core.shape import SHAPES, MoEShape
from epmoe.core.toy import TOY
from epmoe.core.verify import bring, build_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = MoEShape(hidden=16, intermediate=16, experts=8, topk=2)
HOMES = replicated([(0, 1), (0,), (1, 2), (2,)], 3)


def toy_stats() -> RoutingStats:
    return count_draw([TOY.ids_TK(rank) for rank in range(2)], TOY.placement)


def test_the_toy_by_hand():
    """The numbers of the module's text."""
    stats = toy_stats()
    assert stats.visits_SE == ((1, 2, 1, 0), (1, 0, 1, 2))
    assert stats.visits == (2, 2, 2, 2)
    assert stats.hits_SD == ((2, 1), (1, 2))
    assert stats.slots_SD == ((3, 1), (1, 3))
    assert (stats.tokens, stats.idle, stats.active) == ((2, 2), (0, 0), (2, 2))
    assert stats.rank_imbalance == stats.expert_imbalance == 1.0
    assert stats.needed_share is None
    assert stats.with_delivered([4, 4]).needed_share == 6 / 8


@given(
    ids=st.lists(
        st.lists(st.lists(st.integers(-2, 5), min_size=2, max_size=2), max_size=6),
        min_size=3,
        max_size=3,
    ),
    placement=st.sampled_from([contiguous(4, 3), HOMES]),
)
@settings(max_examples=60, deadline=None)
def test_counts_are_those_of_a_loop(ids: list[list[list[int]]], placement: Placement):
    """Ids of -2, -1, 4 and 5 are no experts; an expert named twice is two assignments and one hit."""
    tensors = [torch.tensor(rows, dtype=torch.int32).reshape(-1, 2) for rows in ids]
    stats = count_draw(tensors, placement)
    active: list[set[int]] = [set(), set(), set()]
    for source, rows in enumerate(ids):
        owner_E = placement.owners_from(source)
        real = [[e for e in row if 0 <= e < 4] for row in rows]
        for expert in range(4):
            assert stats.visits_SE[source][expert] == sum(row.count(expert) for row in real)
        for rank in range(3):
            mine = [[e for e in row if owner_E[e] == rank] for row in real]
            assert stats.hits_SD[source][rank] == sum(1 for row in mine if row)
            assert stats.slots_SD[source][rank] == sum(map(len, mine))
            active[rank].update(*mine)
        assert stats.idle[source] == sum(1 for row in real if not row)
        assert stats.tokens[source] == len(rows)
    assert stats.active == tuple(map(len, active))


def test_uneven_routing_shows():
    """All of 4 tokens to expert 3: its rank does everything, and it is four times the mean of the experts."""
    stats = count_draw(
        [torch.full((4, 1), 3), torch.empty(0, 1, dtype=torch.int64)], contiguous(4, 2)
    )
    assert (stats.rank_imbalance, stats.expert_imbalance) == (2.0, 4.0)
    assert (stats.assignments, stats.active, stats.needed) == ((0, 4), (0, 1), (0, 4))
    nothing = count_draw([torch.full((2, 1), -1)] * 2, contiguous(4, 2))
    assert (nothing.idle, nothing.rank_imbalance, nothing.visits) == ((2, 2), 1.0, (0,) * 4)


def test_an_expert_that_nobody_holds_is_visited_and_hits_no_rank():
    tables = ExpertTables(contiguous(4, 2), 0)
    tables.mask([1])
    counter = RoutingCounter(tables)
    counter.add(torch.tensor([[0, 3], [2, 3]]))
    assert counter._counts.tolist() == [1, 0, 1, 2, 1, 0, 1, 2]  # experts, ranks, idle, tokens


def test_counting_waits_for_nothing_and_is_not_the_layers():
    counter = RoutingCounter(ExpertTables(TOY.placement, 0))
    with ledger.record() as book:
        counter.add(TOY.ids_TK(0))
    assert (book.host_syncs.total(), book.launches.total()) == (0, 0)
    with ledger.record() as book:
        count_routing(TOY.ids_TK(0), TOY.placement.owner_table(), 2)
    assert book.host_syncs.total() == 0 < book.launches.total()


def test_counts_add_up_until_they_are_reset():
    counter = RoutingCounter(ExpertTables(TOY.placement, 0))
    counter.add(TOY.ids_TK(0))
    counter.add(TOY.ids_TK(0).long())
    assert counter.read(groups.single()).visits == (2, 4, 2, 0)
    counter.reset()
    assert counter.read(groups.single()).visits == (0, 0, 0, 0)


def count_calls(group: EPGroup, case: Case) -> tuple[RoutingStats, RoutingStats]:
    """All calls counted by the layer, and the last one alone; a rank program."""
    layer = build_case(group, case)
    layer(*bring(group, case, 0))
    layer.counter = RoutingCounter(layer.spec.tables)
    for call in range(len(case.tokens)):
        layer(*bring(group, case, call))
    every = layer.counter.read(group)
    layer.counter.reset()
    layer(*bring(group, case, len(case.tokens) - 1))
    last = layer.counter.read(group)
    layer.counter = None
    layer(*bring(group, case, 0))
    layer.close()
    return every, last


def test_a_layer_counts_its_calls_and_all_ranks_read_the_same(pool):
    """In rounds too: 9 tokens on a rank of capacity 4 are 9 tokens."""
    tokens = ((9, 3), (0, 5), (2, 2))
    case = Case(stage="02", shape=SHAPES["tiny"], tokens=tokens, kind="masked", capacity=4)
    results = pool.run(count_calls, case, ranks=2)
    assert results[0] == results[1]
    every, last = results[0]
    assert every.tokens == (11, 10)
    draws = [[case.routing(call, rank)[0] for rank in (0, 1)] for call in range(3)]
    assert last == count_draw(draws[2], case.placed())
    whole = count_draw(
        [torch.cat([draw[rank] for draw in draws]) for rank in (0, 1)], case.placed()
    )
    assert every == whole
    assert sum(every.idle) > 0


def test_a_router_on_the_way_out_is_no_phase_and_its_choice_is_counted():
    group = groups.single(DEVICE)
    case = Case(stage="03", shape=SMALL, tokens=((3,),))
    layer = build_case(group, case)
    layer.counter = RoutingCounter(layer.spec.tables)
    logits_TE = torch.randn(3, SMALL.experts, device=group.device)
    with phases.recording(group) as record:
        layer.from_logits(bring(group, case, 0)[0], logits_TE, max_tokens=3)
    assert [s.path[-1] for s in record.spans()] == [
        *("call", "dispatch", "exchange", "experts", "combine", "exchange")
    ]
    ids_TK, _ = route(logits_TE, SMALL.router, SMALL.topk)
    visits = layer.counter.read(group).visits
    assert visits == tuple((ids_TK == expert).sum().item() for expert in range(SMALL.experts))
    layer.close()


def test_fewer_rows_than_are_needed_cannot_be():
    with pytest.raises(InputError, match="rank 1 was given 2 rows and needs 3"):
        toy_stats().with_delivered([3, 2])


def test_the_table_says_what_the_numbers_say():
    console = Console(width=120)
    with console.capture() as said:
        console.print(render(toy_stats().with_delivered([4, 4])))
    words = " ".join(said.get().split())
    assert "0 2 0 4 1.00 2 4 3" in words
    assert "4 of 4 experts are named; the busiest, expert 0, 2 times, 1.00 times the mean" in words
    assert "75% of the rows given to experts are needed" in words


def test_statistics_add_up_where_the_map_is_one():
    twice = toy_stats() + toy_stats()
    assert (twice.visits, twice.hits_SD, twice.tokens) == ((4, 4, 4, 4), ((4, 2), (2, 4)), (4, 4))
    other = count_draw([TOY.ids_TK(rank) for rank in range(2)], round_robin(4, 2))
    with pytest.raises(InputError, match="owners differ"):
        _ = twice + other


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_CUDA)
@pytest.mark.parametrize("name", ["02", "03"])
def test_replays_of_a_captured_call_are_counted(name):
    group = groups.single("cuda")
    case = Case(stage=name, shape=SHAPES["tiny"], tokens=((8,), (5,)), capacity=8, declared=True)
    layer = build_case(group, case)
    layer.counter = RoutingCounter(layer.spec.tables)
    graph = GraphedCall(layer, 8)
    layer.counter.reset()
    for call in (0, 1, 1):
        graph(*bring(group, case, call))
    stats = layer.counter.read(group)
    draws = [case.routing(call, 0)[0] for call in (0, 1, 1)]
    assert stats.visits_SE == count_draw([torch.cat(draws)], case.placed()).visits_SE
    assert stats.tokens == (24,)  # a replay runs all rows of its graph; the padding names no expert
    assert stats.idle == (6,)
    graph.close()
    layer.close()
