"""Traces say what layers did: held against the layer's own counts, the draw's exact load, and themselves."""

import copy

import pytest

from epmoe.core.plan.load import drawn_load
from epmoe.core.traces import STAGES, Scenario, scenarios, small, tokens_of, trace_stages, verify
from epmoe.core.traces.limits import explorer

PLAYED = [
    Scenario(ranks=4, experts=8, topk=2, routing="uniform"),
    Scenario(ranks=4, experts=8, topk=1, routing="hot_expert"),
    Scenario(ranks=4, experts=4, topk=2, routing="one_rank"),
]


@pytest.fixture(scope="module", params=STAGES)
def traces(request, pool):
    """A few traces of one stage."""
    toy = trace_stages(pool, request.param, [Scenario()])
    return toy + trace_stages(pool, request.param, PLAYED)


def load_of(trace: dict):
    toy = tokens_of(Scenario(**{k: v for k, v in trace["scenario"].items() if k != "name"}))
    return drawn_load(toy.shape, [toy.ids_TK(r) for r in range(toy.ranks)], toy.placement)


def test_every_assignment_is_delivered_once(traces):
    for trace in traces:
        load = load_of(trace)
        wanted = sorted((t["token"], e) for t in trace["tokens"] for e in t["experts"])
        given = [
            (row["token"], e) for rows in trace["delivered"] for row in rows for e in row["experts"]
        ]
        assert sorted(given) == wanted
        for rank, rows in enumerate(trace["delivered"]):
            assert sum(len(row["experts"]) for row in rows) == load.assignments[rank]
            for row in rows:
                assert all(trace["owners"][e] == rank for e in row["experts"])


def test_messages_fit_the_bytes_of_the_ledger(traces):
    """Rows that cross, times their size, are the bytes that the ledger saw leave, with the counts if any."""
    for trace in traces:
        counts = 8 * (trace["ranks"] - 1) if trace["counts"] else 0
        for rank, book in enumerate(trace["ledger"]):
            out = (
                sum(m["from"] == rank != m["to"] for m in trace["out"]) * trace["row_bytes"]["out"]
            )
            home = (
                sum(m["from"] == rank != m["to"] for m in trace["home"])
                * trace["row_bytes"]["home"]
            )
            assert book["wire_bytes"] == out + home + counts


def test_counts_are_the_draw_s(traces):
    for trace in traces:
        if trace["counts"]:
            assert [tuple(row) for row in trace["counts"]] == list(load_of(trace).slots_SD)
        assert (trace["counts"] is None) == (trace["stage"] != "01_variable_a2a")


def test_rows_go_home_the_way_they_came(traces):
    for trace in traces:
        out = sorted((m["from"], m["to"], m["index"]) for m in trace["out"])
        assert sorted((m["to"], m["from"], m["index"]) for m in trace["home"]) == out


def test_a_trace_that_lies_is_refused(traces):
    verify(traces[0])
    wrong = copy.deepcopy(traces[0])
    wrong["results"][0]["y"][0] += 1.0
    with pytest.raises(AssertionError, match="token 0"):
        verify(wrong)
    swapped = copy.deepcopy(traces[0])
    row = next(r for rows in swapped["delivered"] for r in rows if r["token"] == 1)
    row["token"] = 0
    with pytest.raises(AssertionError, match="not its token"):
        verify(swapped)
    lost = copy.deepcopy(traces[0])
    lost["home"][0]["y"] = [9.0, 9.0, 9.0, 9.0]
    with pytest.raises(AssertionError, match="changed on its way"):
        verify(lost)


def test_the_toy_by_hand(pool):
    """Four rows cross in the reference, of which two have work; two in the variable exchange."""
    crossing = {}
    for stage in ("00_reference", "01_variable_a2a"):
        (trace,) = trace_stages(pool, stage, [Scenario()])
        crossing[stage] = [(m["token"], m["to"]) for m in trace["out"] if m["from"] != m["to"]]
    assert sorted(crossing["00_reference"]) == [(0, 1), (1, 1), (2, 0), (3, 0)]
    assert sorted(crossing["01_variable_a2a"]) == [(1, 1), (3, 0)]


def test_scenarios_have_names_of_their_own():
    names = [scenario.name for scenario in scenarios()]
    assert len(names) == len(set(names)) == 37


def test_published_traces_drop_only_what_verify_needs(traces):
    shown = small(traces[0])
    assert "x0" not in shown["delivered"][0][0]
    assert set(shown) == set(traces[0])


def test_explorer_holds_plain_numbers():
    data = explorer()
    assert set(data["gpus"]) == {"h100", "h200", "b200"}
    assert all(case["output"]["floor_seconds"] > 0 for case in data["reference"])
