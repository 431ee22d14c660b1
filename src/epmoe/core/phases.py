"""What a layer call spends its time on: named phases, for a profiler's timeline and for a stopwatch.

    route                       logits become ids and weights, where no kernel does it on the way
    call                        one layer call
      dispatch                  rows go out: `pack` is all of it but its exchanges
        exchange                one collective
      experts                   the local experts
      combine                   results come home: `merge` is all of it but its exchanges
        exchange
    replay                      a captured call: the graph as one piece, what is inside cannot be timed

    with phases.recording(group) as record:         # collective: the ranks' clocks start at one barrier
        for _ in range(3):
            layer(x_TH, topk_ids_TK, topk_weights_TK, max_tokens=8)
    phase_times.summarise(group.all_gather_objects(record.spans()))

Recording takes CUDA events on the current stream (the host's clock on a CPU); nothing waits until spans are read.
Inside a graph capture nothing is recorded, `skipped` counts what was left out. With EPMOE_NVTX=1, or in
`with phases.nvtx():`, every phase is an NVTX range as well (of a captured call once, at its capture). When nobody
looks, a phase is one truth test and an empty with-block.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch

from epmoe.core import ambient
from epmoe.core.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from epmoe.core.groups import EPGroup

P = ParamSpec("P")
T = TypeVar("T")

VARIABLE = "EPMOE_NVTX"
_CALLS = (("call",), ("replay",))
_ALIGNMENTS = 20  # barriers; the tightest one starts the clocks


class Watcher(Protocol):
    """Somebody who is told when a phase begins and ends; phases nest."""

    def begin(self, name: str, facts: Mapping[str, Any]) -> None: ...
    def end(self) -> None: ...


class _Nvtx:
    """Ranges for Nsight and other profilers."""

    def begin(self, name: str, facts: Mapping[str, Any]) -> None:
        try:
            torch.cuda.nvtx.range_push(f"epmoe:{name} {facts.get('op', '')}".rstrip())
        except RuntimeError as error:
            raise UnsupportedError(
                f"NVTX ranges were asked for ({VARIABLE}=1 or phases.nvtx()) and this torch, {torch.__version__}, has "
                "none: install a CUDA build, or do not ask"
            ) from error

    def end(self) -> None:
        torch.cuda.nvtx.range_pop()


def _asked_for(environment: Mapping[str, str]) -> list[Watcher]:
    return [_Nvtx()] if environment.get(VARIABLE) == "1" else []


_watchers: list[Watcher] = _asked_for(os.environ)
_UNWATCHED = contextlib.nullcontext()


def phase(name: str, **facts: Any) -> contextlib.AbstractContextManager[None]:
    """The block is a phase of that name. `facts` are plain numbers and words that a trace shows beside it."""
    return _Phase(name, facts) if _watchers else _UNWATCHED


def phased(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: every call of the function is a phase of that name."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def in_phase(*args: P.args, **kwargs: P.kwargs) -> T:
            with phase(name):
                return function(*args, **kwargs)

        return in_phase

    return decorate


class _Phase:
    def __init__(self, name: str, facts: Mapping[str, Any]):
        self._name, self._facts = name, facts
        self._told: list[Watcher] = []

    def __enter__(self) -> None:
        try:
            for watcher in list(_watchers):
                watcher.begin(self._name, self._facts)
                self._told.append(watcher)
        except UnsupportedError:
            self.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        while self._told:
            self._told.pop().end()


@contextlib.contextmanager
def nvtx() -> Iterator[None]:
    """Every phase in the block is an NVTX range. Raises UnsupportedError at the first one where torch has no NVTX."""
    with _watching(_Nvtx()):
        yield


@contextlib.contextmanager
def recording(group: "EPGroup") -> Iterator["Recording"]:
    """Time every phase in the block on this rank. Collective: the clocks of all ranks start at one barrier.

    Raises InputError inside a CUDA graph capture: events that are captured carry no time.
    """
    if ambient.capturing(group.device):
        raise InputError("phases cannot be recorded inside a CUDA graph capture: record around it")
    record = Recording(group)
    with _watching(record):
        yield record


@contextlib.contextmanager
def _watching(watcher: Watcher) -> Iterator[None]:
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@dataclass(frozen=True, kw_only=True)
class Span:
    """One phase that ran.

    Attributes:
        path: names from the outermost phase on, such as ("call", "dispatch", "exchange").
        call: the call that it belongs to, from 0; `route` belongs to the call that follows.
        start, end: seconds since the recording began; of ranks, comparable within `Recording.aligned_within`.
        facts: what `phase` was told.
    """

    path: tuple[str, ...]
    call: int
    start: float
    end: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Recording:
    """The phases of one rank between `recording`'s entry and exit.

    Attributes:
        skipped: phases inside a graph capture: they were not timed.
        aligned_within: seconds; no two ranks' clocks started further apart.
    """

    def __init__(self, group: "EPGroup"):
        self.skipped = 0
        self._on_gpu, self._device = group.device.type == "cuda", group.device
        self._open: list[tuple[tuple[str, ...], Mapping[str, Any], Any] | None] = []
        self._done: list[tuple[tuple[str, ...], int, Mapping[str, Any], Any, Any]] = []
        self._calls = 0
        self._origin, self.aligned_within = self._align(group)

    def _align(self, group: "EPGroup") -> tuple[Any, float]:
        """A mark of the moment when all ranks left one barrier, and how long the slowest rank was in it."""
        marks, took = [], []
        for _ in range(_ALIGNMENTS):
            if self._on_gpu:
                torch.cuda.synchronize(self._device)
            start = time.perf_counter_ns()
            group.barrier()
            marks.append(self._mark())
            if self._on_gpu:
                marks[-1].synchronize()
            took.append(time.perf_counter_ns() - start)
        slowest = [max(rounds) for rounds in zip(*group.all_gather_ints(took), strict=True)]
        best = slowest.index(min(slowest))
        return marks[best], slowest[best] / 1e9

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, mark: Any) -> float:
        return self._origin.elapsed_time(mark) / 1e3 if self._on_gpu else mark - self._origin

    def begin(self, name: str, facts: Mapping[str, Any]) -> None:
        """A phase begins; called by `phase`."""
        if ambient.capturing(self._device):
            self.skipped += 1
            self._open.append(None)
            return
        outer = self._open[-1][0] if self._open and self._open[-1] else ()
        self._open.append(((*outer, name), facts, self._mark()))

    def end(self) -> None:
        """The innermost open phase ends; called by `phase`."""
        opened = self._open.pop()
        if opened is None:
            return
        path, facts, start = opened
        self._done.append((path, self._calls, facts, start, self._mark()))
        self._calls += path in _CALLS

    def spans(self) -> list[Span]:
        """What ended so far, by start, an outer phase before its parts. Waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        spans = [
            Span(
                path=path,
                call=call,
                start=self._seconds(start),
                end=self._seconds(end),
                facts=dict(facts),
            )
            for path, call, facts, start, end in self._done
        ]
        return sorted(spans, key=lambda span: (span.start, len(span.path)))
