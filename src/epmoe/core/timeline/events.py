"""Recorded phases as a trace that Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

The Trace Event Format of the Chromium project
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): a JSON object whose `traceEvents` are

    ph "M"   metadata: the name and the place of every rank, which is a process with one thread
    ph "X"   a phase, complete: `ts` and `dur` in microseconds; parts lie inside their outer phase
    ph "C"   a counter: rows that the experts were `given`, that were `needed`, and that were `computed`

Process and thread numbers start at 1, since viewers of system traces keep 0 for the idle task.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from epmoe.core.phase_times import with_own_work
from epmoe.core.phases import Span
from epmoe.core.timeline import RankRecord, Report

Event = dict[str, Any]


def chrome_trace(records: Sequence[RankRecord], report: Report) -> dict[str, Any]:
    """The whole file as plain data; records by rank."""
    events = [event for rank in range(len(records)) for event in _names(rank)]
    timed = [e for rank, record in enumerate(records) for e in _rank_events(rank, record)]
    # an outer phase before a part that begins with it: viewers nest by this order
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    said = {"what": report.what, "where": report.where, "command": report.command}
    other = {**said, "created": report.created, **report.machine, **report.setting}
    clocks = {"aligned_within_us": report.aligned_within * 1e6, "skipped": report.skipped}
    return {
        "traceEvents": events + timed,
        "displayTimeUnit": "ns",
        "otherData": {name: str(value) for name, value in (other | clocks).items()},
    }


def _names(rank: int) -> list[Event]:
    common = {"ph": "M", "pid": rank + 1, "tid": rank + 1, "ts": 0}
    return [
        {"name": "process_name", "args": {"name": f"rank {rank}"}, **common},
        {"name": "process_sort_index", "args": {"sort_index": rank}, **common},
        {"name": "thread_name", "args": {"name": "phases"}, **common},
    ]


def _rank_events(rank: int, record: RankRecord) -> Iterator[Event]:
    for span in with_own_work(record.spans):
        yield _complete(rank, span)
    yield from _rows(rank, record)


def _complete(rank: int, span: Span) -> Event:
    return {
        "name": span.path[-1],
        "cat": "phase",
        "ph": "X",
        "ts": _ns(span.start) / 1e3,
        "dur": (_ns(span.end) - _ns(span.start)) / 1e3,
        "pid": rank + 1,
        "tid": rank + 1,
        "args": {"call": span.call, **span.facts},
    }


def _rows(rank: int, record: RankRecord) -> Iterator[Event]:
    """Rows of every call, from the moment when its first experts begin until its last ones are done."""
    given = record.given
    if given is None:
        return
    for call in range(len(record.computed)):
        experts = [s for s in record.spans if s.path[-1] == "experts" and s.call == call]
        rows = {
            "given": given[call],
            "needed": record.routing[call].needed[rank],
            "computed": record.computed[call],
        }
        yield _counter(rank, experts[0].start, rows)
        yield _counter(rank, experts[-1].end, dict.fromkeys(rows, 0))


def _counter(rank: int, at: float, rows: dict[str, int]) -> Event:
    return {
        "name": "rows",
        "ph": "C",
        "ts": _ns(at) / 1e3,
        "pid": rank + 1,
        "tid": rank + 1,
        "args": rows,
    }


def _ns(seconds: float) -> int:
    """Whole nanoseconds: what viewers keep, and parts stay inside their outer phase."""
    return round(seconds * 1e9)
