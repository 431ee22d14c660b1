"""What recorded phases come to: seconds per call, the slowest rank, the spread over ranks, and what was waiting.

An exchange ends when the last rank has come. So what it takes on the rank where it is shortest is moving rows, and what
another rank spends above that on the same exchange is waiting. Worked, for two ranks whose experts take 5 and 35 us:

    rank 0   experts  5   exchange 40   of it waiting 30
    rank 1   experts 35   exchange 10   of it waiting  0
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box

from epmoe.core.errors import InputError
from epmoe.core.phases import Span
from epmoe.core.tables import WholeTable

Path = tuple[str, ...]
Totals = Mapping[Path, Mapping[int, float]]  # path -> call -> seconds

_OWN_WORK = {"call": "other", "dispatch": "pack", "combine": "merge"}
_ORDER = ("route", "call", "dispatch", "pack", "exchange", "experts", "combine", "merge", "other")


def with_own_work(spans: Sequence[Span]) -> list[Span]:
    """`spans` and the gaps between the parts of a call, a dispatch and a combine, as `other`, `pack` and `merge`."""
    found = list(spans)
    for span in spans:
        if name := _OWN_WORK.get(span.path[-1]):
            found += [
                Span(path=(*span.path, name), call=span.call, start=start, end=end)
                for start, end in _gaps(span, spans)
            ]
    return sorted(found, key=lambda span: (span.start, len(span.path)))


def _gaps(span: Span, spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Where `span` runs and none of its parts does."""
    parts = [
        s for s in spans if s.path[:-1] == span.path and span.start <= s.start and s.end <= span.end
    ]
    edges = [span.start, *(edge for part in parts for edge in (part.start, part.end)), span.end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """One phase over all ranks and calls; seconds per call, the median over calls.

    Attributes:
        path: as in `Span`.
        by_rank: of every rank.
        waiting: of it, what every rank spent on exchanges above the rank where they were shortest.
    """

    path: Path
    by_rank: tuple[float, ...]
    waiting: tuple[float, ...]

    @property
    def slowest(self) -> int:
        """The rank that spends most on it."""
        return self.by_rank.index(max(self.by_rank))

    @property
    def spread(self) -> float:
        """Seconds between the slowest rank and the fastest."""
        return max(self.by_rank) - min(self.by_rank)


def summarise(by_rank: Sequence[Sequence[Span]]) -> list[PhaseTime]:
    """Seconds per call of every phase; a phase comes before its parts.

    Args:
        by_rank: what `Recording.spans` gave on every rank.

    Raises:
        InputError: the ranks' recordings hold different numbers of exchanges, so they are of different calls.
    """
    filled = [with_own_work(spans) for spans in by_rank]
    times, waits = [_totals(spans) for spans in filled], _waiting(by_rank)
    paths = dict.fromkeys(span.path for spans in filled for span in spans)
    return [
        PhaseTime(
            path=path,
            by_rank=tuple(_median(one.get(path, {})) for one in times),
            waiting=tuple(_median(one.get(path, {})) for one in waits),
        )
        for path in sorted(paths, key=_place)
    ]


def _place(path: Path) -> list[int]:
    return [_ORDER.index(name) if name in _ORDER else len(_ORDER) for name in path]


def _totals(spans: Sequence[Span]) -> Totals:
    totals: dict[Path, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        totals[span.path][span.call] += span.seconds
    return totals


def _waiting(by_rank: Sequence[Sequence[Span]]) -> list[Totals]:
    """Of every rank, what its exchanges took above the rank where the same exchange was shortest."""
    exchanges = [[span for span in spans if span.path[-1] == "exchange"] for spans in by_rank]
    least = shortest([[span.seconds for span in spans] for spans in exchanges])
    return [_waits_of(spans, least) for spans in exchanges]


def shortest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Of every exchange its shortest duration on any rank, in the unit given.

    Raises:
        InputError: the ranks recorded different numbers of exchanges.
    """
    counts = [len(durations) for durations in by_rank]
    if len(set(counts)) > 1:
        raise InputError(
            f"the ranks recorded {counts} exchanges: they must be equal, record the same calls on all ranks"
        )
    return [min(same) for same in zip(*by_rank, strict=True)]


def _waits_of(spans: Sequence[Span], least: Sequence[float]) -> Totals:
    """By path and call, counted for the exchange and for every phase around it."""
    totals: dict[Path, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span, moving in zip(spans, least, strict=True):
        for depth in range(len(span.path)):
            totals[span.path[: depth + 1]][span.call] += span.seconds - moving
    return totals


def _median(by_call: Mapping[int, float]) -> float:
    return statistics.median(by_call.values()) if by_call else 0.0


def render(times: Sequence[PhaseTime]) -> WholeTable:
    """One row per phase, parts indented; microseconds per call."""
    table = WholeTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("phase", no_wrap=True)  # its indent is the tree
    table.numbers("slowest\nus", "on\nrank", "waiting\nus", "fastest\nus", "spread\nus")
    for time in times:
        seconds = (time.waiting[time.slowest], min(time.by_rank), time.spread)
        table.add_row(
            "  " * (len(time.path) - 1) + time.path[-1],
            _us(max(time.by_rank)),
            str(time.slowest),
            *map(_us, seconds),
        )
    return table


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"
