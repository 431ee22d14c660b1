"""Phases: told to whoever looks and to nobody else, timed on every rank, added up by hand."""

import itertools

import pytest
import torch

from epmoe.core import ambient, groups, phase_times, phases
from epmoe.core.cases import Case
from epmoe.core.conformance.plugin import NEEDS_CUDA
from epmoe.core.errors import InputError, UnsupportedError
from epmoe.core.graphs import GraphedCall
from epmoe.core.groups import EPGroup
from epmoe.core.phase_times import PhaseTime, summarise, with_own_work
from epmoe.core.phases import Span, phase
from epmoe.core.shape import SHAPES
from epmoe.core.verify import bring, build_case

DISPATCH, COMBINE = ("call", "dispatch"), ("call", "combine")
EXCHANGES = {"00": (3, 1), "01": (4, 1), "02": (1, 1)}  # in dispatch, in combine


class Listener:
    """Writes down what it is told."""

    def __init__(self):
        self.heard: list[str] = []

    def begin(self, name, facts):
        self.heard.append(" ".join([name, *map(str, facts.values())]))

    def end(self):
        self.heard.append("end")


def span(*path: str, start: float, end: float, call: int = 0) -> Span:
    return Span(path=path, call=call, start=start, end=end)


def case_of(stage: str, *tokens: tuple[int, ...], **changes) -> Case:
    return Case(stage=stage, shape=SHAPES["tiny"], tokens=tokens, **changes)


def record_calls(group: EPGroup, case: Case) -> tuple[list[Span], float]:
    """Every call of the case, recorded; a rank program."""
    layer = build_case(group, case)
    with phases.recording(group) as record:
        for call in range(len(case.tokens)):
            layer(*bring(group, case, call))
    layer.close()
    return record.spans(), record.aligned_within


# ---- who is told


def test_nobody_looks_nothing_is_made():
    assert phase("dispatch", rows=3) is phase("combine")


def test_watchers_hear_names_facts_and_ends_and_may_nest():
    outer, inner = Listener(), Listener()
    with phases._watching(outer), phase("call"):
        with phases._watching(inner), phase("exchange", op="all_to_all"):
            pass
        with phase("experts"):
            pass
    assert outer.heard == ["call", "exchange all_to_all", "end", "experts", "end", "end"]
    assert inner.heard == ["exchange all_to_all", "end"]


def test_a_phase_that_raises_has_ended():
    group = groups.single()
    with phases.recording(group) as record:
        with pytest.raises(ZeroDivisionError), phase("call"), phase("experts"):
            _ = 1 / 0
        with phase("call"):
            pass
    assert [s.path for s in record.spans()] == [("call",), ("call", "experts"), ("call",)]
    assert [s.call for s in record.spans()] == [0, 0, 1]


def test_a_function_can_be_a_phase():
    @phases.phased("call")
    def double(x: int, *, plus: int = 0) -> int:
        """Doubles."""
        return 2 * x + plus

    listener = Listener()
    with phases._watching(listener):
        assert double(3, plus=1) == 7
    assert (listener.heard, double.__doc__) == (["call", "end"], "Doubles.")


# ---- NVTX


def test_nvtx_ranges_are_balanced_and_say_which_exchange(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("pop"))
    layer = build_case(groups.single(), case_of("02", (2,)))
    with phases.nvtx():
        layer(*bring(groups.single(), case_of("02", (2,)), 0))
    layer(*bring(groups.single(), case_of("02", (2,)), 0))
    assert told == [
        *("epmoe:call", "epmoe:dispatch", "epmoe:exchange all_to_all", "pop", "pop"),
        *("epmoe:experts", "pop", "epmoe:combine", "epmoe:exchange all_to_all", "pop", "pop"),
        "pop",
    ]


def test_nvtx_where_torch_has_none_is_an_error_that_leaves_no_phase_open(monkeypatch):
    def missing(name: str) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", missing)
    listener = Listener()
    with (
        phases._watching(listener),
        phases.nvtx(),
        pytest.raises(UnsupportedError, match=r"EPMOE_NVTX=1.*install a CUDA build"),
        phase("call"),
    ):
        pass
    assert listener.heard == ["call", "end"]


def test_the_environment_asks_for_nvtx():
    assert phases._asked_for({}) == phases._asked_for({"EPMOE_NVTX": "0"}) == []
    assert len(phases._asked_for({"EPMOE_NVTX": "1"})) == 1


# ---- what is recorded


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_rank_records_the_same_phases_inside_one_another(name, pool):
    """Two calls on two ranks, of which one brings nothing."""
    results = pool.run(record_calls, case_of(name, (3, 0), (2, 5)), ranks=2)
    dispatches, combines = EXCHANGES[name]
    for spans, within in results:
        assert 0 < within < 5
        for call in (0, 1):
            paths = [s.path for s in spans if s.call == call]
            assert paths == [
                *(("call",), DISPATCH, *[(*DISPATCH, "exchange")] * dispatches),
                *(("call", "experts"), COMBINE, *[(*COMBINE, "exchange")] * combines),
            ]
        check_nesting(spans)
    rows = {s.facts["rows"] for spans, _ in results for s in spans if s.path[-1] == "experts"}
    assert max(rows) > 0


def check_nesting(spans: list[Span]) -> None:
    """By start; every part lies in its outer phase; brothers do not overlap."""
    assert [s.start for s in spans] == sorted(s.start for s in spans)
    for part in (s for s in spans if len(s.path) > 1):
        outer = [s for s in spans if s.path == part.path[:-1] and s.start <= part.start]
        assert outer[-1].end >= part.end >= part.start
    for depth in (1, 2, 3):
        level = [s for s in spans if len(s.path) == depth]
        assert all(a.end <= b.start for a, b in itertools.pairwise(level))


def test_rounds_are_one_call_and_logits_have_a_route_before_it():
    group, case = groups.single(), case_of("02", (7,), capacity=3)
    layer = build_case(group, case)
    x_TH, _, _ = bring(group, case, 0)
    with phases.recording(group) as record:
        layer.from_logits(x_TH, torch.randn(7, case.shape.experts))
    spans = record.spans()
    assert [s.path for s in spans].count(DISPATCH) == 3
    assert spans[0].path == ("route",)
    assert {s.call for s in spans} == {0}
    layer.close()


def test_the_bytes_of_exchanges_are_the_ledgers(pool):
    """One hook: an exchange is told to both."""
    ((spans, _), _) = pool.run(record_calls, case_of("02", (4, 4)), ranks=2)
    facts = [s.facts for s in spans if s.path[-1] == "exchange"]
    assert [f["op"] for f in facts] == ["all_to_all"] * 2
    assert facts[1]["wire_bytes"] == 4 * 128 * 4  # float32 sums of the other rank's four tokens


def test_a_capture_is_not_timed_and_counted_as_skipped(monkeypatch):
    with phases.recording(groups.single()) as record:
        monkeypatch.setattr(ambient, "capturing", lambda device: True)
        with phase("call"), phase("dispatch"):
            pass
    assert (record.spans(), record.skipped) == ([], 2)


# ---- what it comes to


def test_gaps_are_pack_merge_and_other():
    spans = [
        span("call", start=0, end=10),
        span(*DISPATCH, start=1, end=5),
        span(*DISPATCH, "exchange", start=3, end=4),
        span(*COMBINE, start=7, end=10),
        span(*COMBINE, "exchange", start=7, end=9),
    ]
    found = {(s.path[-1], s.start, s.end) for s in with_own_work(spans) if s not in spans}
    assert found == {
        *(("pack", 1, 3), ("pack", 4, 5), ("merge", 9, 10)),
        *(("other", 0, 1), ("other", 5, 7)),
    }


def worked(slow: float, late: float, call: int, at: float) -> list[Span]:
    """One call: experts, then an exchange that starts `late` and ends with everybody's at 45."""
    return [
        span("call", start=at, end=at + 45, call=call),
        span("call", "experts", start=at, end=at + slow, call=call),
        span("call", "exchange", start=at + late, end=at + 45, call=call),
    ]


def test_waiting_is_what_an_exchange_takes_above_the_rank_that_comes_last():
    """The module's worked numbers, twice the same call and once another: medians do not see it."""
    early = [*worked(5, 5, 0, 0), *worked(5, 5, 1, 50), *worked(1, 40, 2, 100)]
    late = [*worked(35, 35, 0, 0), *worked(35, 35, 1, 50), *worked(1, 40, 2, 100)]
    found = {time.path: time for time in summarise([early, late])}
    experts, exchange = found["call", "experts"], found["call", "exchange"]
    assert (experts.by_rank, experts.slowest, experts.spread) == ((5, 35), 1, 30)
    assert (exchange.by_rank, exchange.waiting) == ((40, 10), (30, 0))
    assert found[("call",)].waiting == (30, 0)
    assert list(found) == [("call",), ("call", "exchange"), ("call", "experts"), ("call", "other")]


def test_a_table_says_rank_and_spread():
    time = PhaseTime(path=("call", "experts"), by_rank=(5e-6, 35e-6), waiting=(0.0, 0.0))
    table = phase_times.render([time])
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["  experts", "35.0", "1", "0.0", "5.0", "30.0"]


def test_recordings_of_different_calls_are_refused():
    one = [span("call", "exchange", start=0, end=1)]
    with pytest.raises(InputError, match=r"\[1, 2\] exchanges"):
        summarise([one, one * 2])


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_CUDA)
@pytest.mark.parametrize("name", ["01", "02", "03"])
def test_events_on_a_gpu_nest_and_add_up(name):
    spans, within = record_calls(groups.single("cuda"), case_of(name, (64,), (64,), (64,)))
    check_nesting(spans)
    assert 0 < within < 1
    times = {time.path: max(time.by_rank) for time in summarise([spans])}
    parts = sum(seconds for path, seconds in times.items() if len(path) == 2)
    assert times[("call",)] == pytest.approx(parts, rel=0.5)  # medians do not add up exactly
    assert 0 < times["call", "experts"] < times[("call",)] < 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_CUDA)
def test_a_captured_call_is_timed_as_one_replay():
    group, case = groups.single("cuda"), case_of("02", (8,), declared=True)
    layer, arguments = build_case(group, case), bring(group, case, 0)
    with phases.nvtx(), phases.recording(group) as record:
        graph = GraphedCall(layer, 8)
        eager = len(record.spans())
        graph(*arguments)
        graph(*arguments)
    assert record.skipped == 6  # call, dispatch and combine with an exchange each, experts
    replays = [s for s in record.spans() if s.path == ("replay",)]
    assert len(record.spans()) == eager + 2
    assert [s.call for s in replays] == [replays[0].call, replays[0].call + 1]
    assert all(0 < s.seconds < 1 for s in replays)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
        with pytest.raises(InputError, match="record around it"), phases.recording(group):
            pass
    graph.close()
    layer.close()
