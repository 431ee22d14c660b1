"""How a run on several ranks ended: collect the outcomes, then decide which error is the one to show."""

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from epmoe.core.errors import InputError, RankFailedError, RunTimeoutError
from epmoe.core.ranks.rank_process import RankProcess
from epmoe.core.ranks.rank_worker import Outcome

# After the first failure the other ranks get this long to end by themselves, so that they can be kept, and so that a
# rank which only noticed a closed connection is not blamed before the one that closed it. Seconds.
GRACE = 2.0
GRACE_AFTER_CONSEQUENCE = 3.0
_STACK_WAIT = 1.0


@dataclass(frozen=True)
class RunEnd:
    """Outcomes by arrival, and the ranks without one (their stacks as text)."""

    ranks: int
    outcomes: list[Outcome]
    stuck: dict[int, str]
    seconds: float
    goal: str = "finished"

    @property
    def reusable(self) -> bool:
        """Every rank ended by itself, is sound, and communicated as often as the others."""
        return (
            not self.stuck
            and all(o.fit_for_more for o in self.outcomes)
            and len({o.operations for o in self.outcomes}) == 1
        )

    def results(self) -> list[Any]:
        """The values by rank, or the error of the rank that failed first."""
        failures = [o for o in self.outcomes if o.value is None]
        if failures:
            raise _first_error(failures, self.ranks)
        if self.stuck:
            raise RunTimeoutError(_describe_stuck(self))
        by_rank = sorted(self.outcomes, key=lambda o: o.rank)
        return [pickle.loads(o.value) for o in by_rank if o.value is not None]


def collect(members: Sequence[RankProcess], timeout: float, goal: str = "finished") -> RunEnd:
    """Wait until every rank has ended, the time is over, or a failure's grace is over."""
    began = time.monotonic()
    deadline, outcomes = began + timeout, []
    pending = {member.conn: member for member in members}
    while pending and (left := deadline - time.monotonic()) > 0:
        for member in _ended(list(pending.values()), left):
            del pending[member.conn]
            outcome = _receive(member)
            outcomes.append(outcome)
            if outcome.value is None:
                grace = GRACE_AFTER_CONSEQUENCE if outcome.consequence else GRACE
                deadline = min(deadline, time.monotonic() + grace)
    stuck = _stacks(list(pending.values())) if pending else {}
    return RunEnd(len(members), outcomes, stuck, time.monotonic() - began, goal)


def _ended(members: list[RankProcess], timeout: float) -> list[RankProcess]:
    """Those with something to read, waiting up to `timeout`; also the dead whose connection a child of theirs holds."""
    dead = [member for member in members if member.process.poll() is not None]
    readable = set(wait([m.conn for m in members], timeout=0 if dead else min(timeout, 1.0)))
    return [m for m in members if m.conn in readable or m in dead]


def _receive(member: RankProcess) -> Outcome:
    try:
        if member.process.poll() is None or member.conn.poll():
            return member.conn.recv()
        raise EOFError
    except (EOFError, OSError):
        died = f"rank {member.rank} {member.how_it_died()}"
        trace = member.stderr_tail()
        return Outcome(member.rank, time.monotonic(), 0, text=died, trace=trace, fit_for_more=False)


def _stacks(members: list[RankProcess]) -> dict[int, str]:
    """Where each rank is now: Python stacks through a signal, which also reaches a rank inside C code."""
    for member in members:
        member.dump_stack()
    deadline = time.monotonic() + _STACK_WAIT
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if all("most recent call first" in m.stderr_tail() for m in members):
            break
    time.sleep(0.05)  # the header is there; let the frames follow
    return {m.rank: _own_frames(m.stderr_tail()) for m in members}


def _own_frames(stacks: str) -> str:
    """Without the thread that only watches for the parent's end."""
    blocks = stacks.split("\n\n")
    return "\n\n".join(block for block in blocks if "_wait_for_hangup" not in block)


def _describe_stuck(end: RunEnd) -> str:
    ranks = ", ".join(str(rank) for rank in sorted(end.stuck))
    parts = [f"after {end.seconds:.1f} s these of {end.ranks} ranks had not {end.goal}: {ranks}"]
    parts += [f"rank {rank} was here:\n{text}" for rank, text in sorted(end.stuck.items())]
    return "\n".join(parts)


def _first_error(failures: list[Outcome], ranks: int) -> BaseException:
    """The earliest failure that is not the consequence of another one, as its own type where it pickles."""
    first = min(failures, key=lambda o: (o.consequence, o.at))
    if first.error is None:
        return RankFailedError(f"{first.text}; the end of its stderr:\n{first.trace or '(empty)'}")
    if not first.error:
        return RankFailedError(f"rank {first.rank} of {ranks} raised {first.text}\n{first.trace}")
    try:
        error = pickle.loads(first.error)
    except Exception:  # its class exists only over there
        return RankFailedError(f"rank {first.rank} of {ranks} raised {first.text}\n{first.trace}")
    everywhere = len({o.text for o in failures}) == 1 and len(failures) == ranks
    if everywhere and ranks > 1 and isinstance(error, InputError):
        error.add_note(f"raised on all {ranks} ranks")
    else:
        error.add_note(f"raised on rank {first.rank} of {ranks}:\n{first.trace}")
    return error
