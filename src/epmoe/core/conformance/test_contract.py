"""The ledger's exact counts, refusal of captures, the promises of parts, sizes that a stage must not mind."""

import torch

from epmoe.core.cases import Case
from epmoe.core.conformance import program
from epmoe.core.conformance.shapes import SMALL


def test_ledger_is_exact(stage, check):
    """The same case counts the same: collectives, bytes, host syncs, launches, allocations, rows."""
    ids = ([[0, 5]] * 4, [[3, 6]] * 2)
    case = Case(stage=stage, shape=SMALL, tokens=((4, 2),) * 3, ids=(ids,) * 3)
    first, second = check(case), check(case)
    assert [[c.ledger for c in r.calls] for r in first] == [
        [c.ledger for c in r.calls] for r in second
    ]
    for one in first:
        # the first call may allocate what the later ones use again
        assert one.calls[1].ledger == one.calls[2].ledger


def test_parts_keep_their_promises(stage, check):
    """Checked mode: what is delivered, and what experts answer, is what `epmoe.core.contract` says of the parts.

    In float16: sums in the tokens' own dtype would be float32 too in float32. The fullest rank brings 4 tokens to two
    calls, and the others other numbers: what follows from the capacity alone is the same in both.
    """
    tokens, dtype = ((4, 0, 2), (0, 0, 0), (3, 4, 0)), torch.float16
    how = {"kind": "masked", "capacity": 4, "check": True, "dtype": dtype}
    check(Case(stage=stage, shape=SMALL, tokens=tokens, **how))


def test_no_bytes_leave_a_single_rank(stage, check):
    (one,) = check(Case(stage=stage, shape=SMALL, tokens=((4,),)))
    assert one.calls[0].ledger["wire_bytes"] == 0


def test_capturable_stages_never_wait(stage, capabilities, check):
    """7D: a call that can be captured reads nothing back and sends the same bytes whatever the routing."""
    tokens = ((5, 2), (0, 7), (5, 2))
    reports = check(Case(stage=stage, shape=SMALL, tokens=tokens, declared=True, capacity=8))
    waits = [call.ledger["host_syncs"] for one in reports for call in one.calls]
    if capabilities.graph_capturable:
        assert set(waits) == {0}, waits
        for one in reports:
            assert one.calls[0].ledger["wire_bytes"] == one.calls[2].ledger["wire_bytes"]
    else:
        assert min(waits) >= 1, (
            "a stage that never waits for the host could declare graph_capturable"
        )


def test_7D_capture_refused_in_words(stage, capabilities, run):
    """7D: a stage that waits for the host says so during a capture, and works on afterwards."""
    case = Case(stage=stage, shape=SMALL, tokens=((3, 2),))
    for found in run(program.refused_capture, case):
        if capabilities.graph_capturable:
            assert found["said"] == ""
        else:
            assert found["said"].startswith(f"NotCapturableError: {stage} waits for the host")
        assert found["row"].right, found["row"]
