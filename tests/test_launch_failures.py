"""Ranks that raise, die and hang: the run ends in seconds, and shows the real error."""

import ctypes
import os
import pickle
import signal
import sys
import threading
import time

import pytest
import torch.distributed as dist
from tests.processes import alive, pid_of

from epmoe.core.errors import InputError, RankFailedError, RunTimeoutError
from epmoe.core.launch import RankPool
from epmoe.core.ranks import rank_process
from epmoe.core.ranks.rank_worker import Outcome, is_consequence
from epmoe.core.ranks.run_end import RunEnd

RANKS = 3
SECONDS = 20.0  # what "in seconds" means on a busy machine; the runs' own limit is 60


@pytest.fixture(scope="module")
def pool():
    with RankPool(RANKS, device="cpu") as pool:
        yield pool


@pytest.fixture
def quick(pool):
    """The test ends in seconds; ranks are up before the clock starts."""
    pool.run(pid_of)
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SECONDS


# ---- a rank raises


def _raises_on(group, who, error):
    if group.rank in who:
        raise error
    group.barrier()


def test_the_real_error_of_one_rank_comes_home_with_its_type(pool, quick):
    with pytest.raises(KeyError, match="lost") as caught:
        pool.run(_raises_on, [1], KeyError("lost"))
    note = "".join(caught.value.__notes__)
    assert "rank 1 of 3" in note
    assert "_raises_on" in note  # the remote traceback


def test_peers_that_were_left_waiting_are_replaced_by_fresh_ranks(pool):
    before = pool.run(pid_of)
    with pytest.raises(KeyError):
        pool.run(_raises_on, [0], KeyError("x"))
    assert not set(before) & set(pool.run(pid_of))
    assert not any(alive(pid) for pid in before)


def test_the_same_input_error_on_all_ranks_is_raised_once_and_ranks_are_kept(pool, quick):
    before = pool.run(pid_of)
    with pytest.raises(InputError, match="T=9 over 8") as caught:
        pool.run(_raises_on, range(RANKS), InputError("T=9 over 8"))
    assert caught.value.__notes__ == ["raised on all 3 ranks"]
    assert pool.run(pid_of) == before


def test_ranks_that_ended_after_different_numbers_of_exchanges_are_replaced(pool):
    def out_of_step(group):
        if group.rank == 0:
            group._operations[0] += 1  # as a rank would that made one more exchange than its peers

    before = pool.run(pid_of)
    assert pool.run(out_of_step) == [None] * RANKS
    assert not set(before) & set(pool.run(pid_of))


def test_the_first_error_by_time_wins(pool):
    def both(group):
        time.sleep(0.4 * (2 - group.rank))
        raise ValueError(f"rank {group.rank}")

    with pytest.raises(ValueError, match="rank 2"):
        pool.run(both)


class _Stubborn(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def _stubborn():
    raise _Stubborn(1, 2)


def _interrupted():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("fails", "name"),
    [
        (_stubborn, "_Stubborn"),
        (_interrupted, "KeyboardInterrupt"),
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: pytest.skip("not here"), "Skipped: not here"),
    ],
    ids=["own-init", "interrupt", "exit", "skip"],
)
def test_errors_that_cannot_come_home_are_told(pool, fails, name, quick):
    with pytest.raises(RankFailedError, match=f"rank . of 3 raised {name}"):
        pool.run(lambda group: fails())


def test_a_result_that_does_not_pickle_is_an_error(pool):
    with pytest.raises(TypeError, match="pickle"):
        pool.run(lambda group: threading.Lock())


# ---- a rank dies


@pytest.mark.parametrize(
    ("death", "words"),
    [
        (lambda: os._exit(7), "exited with code 7"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
        (lambda: ctypes.string_at(0), "(?s)killed by SIGSEGV.*Segmentation fault"),
    ],
    ids=["exit", "SIGKILL", "segfault"],
)
def test_a_dead_rank_is_named_with_how_it_died(pool, death, words, quick):
    def run(group):
        if group.rank == 1:
            print("last words", file=sys.stderr, flush=True)
            death()
        group.barrier()

    pool.run(pid_of)
    with pytest.raises(
        RankFailedError, match=f"(?s)rank 1 .*{words.removeprefix('(?s)')}"
    ) as caught:
        pool.run(run)
    assert "last words" in str(caught.value)


def test_a_rank_that_dies_while_a_child_holds_its_connection_is_seen(pool, quick):
    def run(group):
        if group.rank == 1:
            if os.fork() == 0:
                time.sleep(60)
            os._exit(5)
        group.barrier()

    pool.run(pid_of)
    with pytest.raises(RankFailedError, match="rank 1 exited with code 5"):
        pool.run(run)


# ---- a rank hangs


def _loses_itself(group):
    if group.rank == 1:
        time.sleep(100)
    group.barrier()


def test_a_hang_ends_by_its_limit_and_says_where(pool, quick):
    before = pool.run(pid_of)
    with pytest.raises(RunTimeoutError) as caught:
        pool.run(_loses_itself, timeout=1.5)
    text = str(caught.value)
    assert "3 ranks had not finished: 0, 1, 2" in text
    assert "in _loses_itself" in text
    assert "in barrier" in text
    assert "_wait_for_hangup" not in text
    assert not any(alive(pid) for pid in before)


def test_only_the_stuck_rank_is_named(pool, quick):
    pool.run(pid_of)
    with pytest.raises(RunTimeoutError, match="had not finished: 1\n"):
        pool.run(lambda group: group.rank != 1 or time.sleep(100), timeout=1.0)


def test_an_interrupt_of_the_wait_leaves_no_rank_running(pool):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = pool.run(pid_of)
    kept = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            pool.run(_loses_itself)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, kept)
    assert not any(alive(pid) for pid in before)
    assert len(pool.run(pid_of)) == RANKS


# ---- a rank does not start


def test_ranks_that_die_at_the_start_say_why(monkeypatch):
    monkeypatch.setattr(rank_process, "_BOOT", "raise SystemExit('no boot')")
    with RankPool(2, device="cpu") as pool, pytest.raises(RankFailedError) as caught:
        pool.run(pid_of)
    assert "exited with code 1" in str(caught.value)
    assert "no boot" in str(caught.value)


def test_a_start_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr(rank_process, "_BOOT", "import time; time.sleep(60)")
    with RankPool(1, device="cpu", start_timeout=0.5) as pool:
        with pytest.raises(RunTimeoutError, match="ranks had not started: 0"):
            pool.run(pid_of)
        monkeypatch.undo()
        pool._start_timeout = 60
        assert len(pool.run(pid_of)) == 1


# ---- whose fault it is


def _ended(rank, at, *, consequence=False, error=ValueError):
    packed = pickle.dumps(error(f"from {rank}"))
    return Outcome(rank, at, 0, error=packed, text=f"{rank}", consequence=consequence)


def test_a_consequence_is_not_blamed_while_there_is_a_cause():
    early = _ended(0, 1.0, consequence=True, error=RuntimeError)
    late = _ended(1, 2.0)
    with pytest.raises(ValueError, match="from 1"):
        RunEnd(2, [early, late], {}, 2.0).results()
    with pytest.raises(RuntimeError, match="from 0"):
        RunEnd(2, [early], {1: "somewhere"}, 2.0).results()


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (dist.DistNetworkError("anything"), True),
        (
            dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
            True,
        ),
        (dist.DistBackendError("Duplicate GPU detected"), False),
        (ValueError("connection closed by peer"), False),
        (RuntimeError("size mismatch"), False),
    ],
)
def test_what_counts_as_a_consequence(error, verdict):
    assert is_consequence(error) is verdict
    wrapped = AssertionError("layer failed")
    wrapped.__cause__ = error
    assert is_consequence(wrapped) is verdict
