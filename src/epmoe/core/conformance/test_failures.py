"""10C, a rank is wrong, raises or dies: every rank ends with the same clear error in seconds, the group lives on."""

import time

import pytest

from epmoe.core.cases import Case
from epmoe.core.conformance import failure_program
from epmoe.core.conformance.shapes import SMALL
from epmoe.core.errors import RankFailedError

# what the message must name, by mistake
CALLS = {
    "dtype": ["InputError", "float16", "float32"],
    "hidden": ["InputError", "17", "H=16"],
    "topk": ["InputError", "(4, 4)", "(4, 2)"],
    "rows": ["InputError", "(3, 2)", "(4, 2)"],
    "tokens": ["CapacityError", "5 tokens", "=4"],
    "high id": ["InputError", "13", "0 to 7"],
    "low id": ["InputError", "-2", "0 to 7"],
    "ids dtype": ["InputError", "int16", "int32 or int64"],
    "weights dtype": ["InputError", "bfloat16", "float32"],
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_10C_wrong_call(stage, run, ranks):
    case = Case(stage=stage, shape=SMALL, tokens=((4,) * ranks,), check=True, overflow="raise")
    results = run(failure_program.mistakes, case)
    for name, words in CALLS.items():
        texts = {said[name] for said, _ in results}
        assert len(texts) == 1, (name, texts)
        (text,) = texts
        assert f"rank {ranks - 1}: " in text, (name, text)
        assert all(word in text for word in words), (name, text)
    for _, row in results:
        assert row.right, row


BUILDS = {
    "capacity": ["DisagreementError", "max_tokens_per_rank", "rank 0 has 4", "rank 1 has 5"],
    "dtype": ["DisagreementError", "float32", "float16"],
    "shape": ["DisagreementError", "hidden=16", "hidden=24"],
    "check": ["DisagreementError", "check"],
    "overflow": ["DisagreementError", "overflow", "rounds"],
    "option": ["InputError", "rank 1", "no_such_option"],
    "placement": ["DisagreementError", "placement"],
    "lost": ["DisagreementError", "lost", "rank 0 has drop"],
    "weights": ["InputError", "rank 1", "(3, 16, 24)", "(4, 16, 24)"],
}


def test_10C_wrong_build(stage, run):
    case = Case(stage=stage, shape=SMALL, tokens=((4, 4),))
    results = run(failure_program.wrong_builds, case)
    for name, words in BUILDS.items():
        texts = {said[name] for said in results}
        assert len(texts) == 1, (name, texts)
        (text,) = texts
        assert all(word in text for word in words), (name, text)


def test_10C_rank_raises(stage, run, check):
    """The raised error comes home as itself, although the other ranks wait in a collective."""
    case = Case(stage=stage, shape=SMALL, tokens=((4, 4),))
    check(case)  # ranks are there and warm: their start is not part of the time below
    started = time.monotonic()
    with pytest.raises(ArithmeticError, match="the last rank gives up"):
        run(failure_program.fails_midway, case, "raises")
    assert time.monotonic() - started < 20
    check(case)


def test_10C_rank_dies(stage, run, check):
    case = Case(stage=stage, shape=SMALL, tokens=((4, 4),))
    check(case)  # ranks are there and warm: their start is not part of the time below
    started = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1"):
        run(failure_program.fails_midway, case, "dies")
    assert time.monotonic() - started < 20
    check(case)
