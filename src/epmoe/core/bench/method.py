"""From events to a number that may be claimed.

All subjects take part in every block, in ABBA order: forward with half of the replays, then backward with the other
half, so a drift of the clocks that is linear within a block adds the same to everybody. A block gives every subject
one time, the slowest rank's. Two subjects are compared by the median of their per-block ratios, with a bootstrap
interval; a difference may be claimed when the interval excludes 1 and the effect is at least 2%.

Why paired: clocks, temperature and other tenants move all times of a block together; the ratio does not see it.
Source of the bootstrap: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13 (percentiles).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from epmoe.core.errors import InputError
from epmoe.core.groups import EPGroup
from epmoe.core.measured import LEAST_EFFECT

_RESAMPLES = 10_000
_NO_PEERS = ("single", "loopback")


@dataclass(frozen=True)
class Estimate:
    """A median with its bootstrap 95% interval."""

    median: float
    low: float
    high: float

    def values(self) -> list[float]:
        """Median, low and high."""
        return [self.median, self.low, self.high]

    @property
    def claim(self) -> str:
        """ "faster", "slower" or "no difference" for a ratio of times, by the rule above."""
        if self.high < 1 and 1 - self.median >= LEAST_EFFECT:
            return "faster"
        if self.low > 1 and self.median - 1 >= LEAST_EFFECT:
            return "slower"
        return "no difference"


def median_interval(values: Sequence[float], level: float = 0.95, seed: int = 0) -> Estimate:
    """The median and its percentile-bootstrap interval; equal for equal values and seed."""
    if not values or not all(math.isfinite(v) for v in values):
        raise InputError(f"{list(values)}: a median needs finite values, at least one")
    data = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(data), (_RESAMPLES, len(data)))
    low, high = np.quantile(_medians(data[picks]), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(np.median(data)), float(low), float(high))


def _medians(rows: np.ndarray) -> np.ndarray:
    """np.median of every short row, ten times faster: sorting whole rows beats looking for their middle."""
    ordered, count = np.sort(rows, axis=1), rows.shape[1]
    return (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2


def ratio(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Block by block a / b: below 1, a is the faster one."""
    if len(a) != len(b):
        raise InputError(f"{len(a)} blocks against {len(b)}: ratios are taken within a block")
    return median_interval([x / y for x, y in zip(a, b, strict=True)])


def abba(names: Sequence[str]) -> list[str]:
    """The order within a block: forward, then backward. A, B gives A B B A."""
    return [*names, *reversed(names)]


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Per sample the slowest rank's time."""
    if len({len(samples) for samples in by_rank}) != 1:
        raise InputError(f"ranks took {[len(s) for s in by_rank]} samples: they must be as many")
    return [max(sample) for sample in zip(*by_rank, strict=True)]


class Clock(Protocol):
    """Times work from a start that all ranks share to its end on this rank."""

    kind: str

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def milliseconds(self) -> float:
        """Of the last start and stop."""
        ...


class DeviceClock:
    """CUDA events on the current stream. Ranks start together: a tiny all-gather is in the stream before the event."""

    kind = "CUDA events"

    def __init__(self, group: EPGroup):
        self.group = group
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._mine = torch.zeros(1, device=group.device)
        self._all = torch.zeros(group.size, device=group.device)

    def start(self) -> None:
        if self.group.transport not in _NO_PEERS:
            self.group.all_gather(self._all, self._mine)
        self._events[0].record()

    def stop(self) -> None:
        self._events[1].record()

    def milliseconds(self) -> float:
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1])


class HostClock:
    """time.perf_counter, for CPUs; ranks start at a host barrier."""

    kind = "host clock"

    def __init__(self, group: EPGroup):
        self.group = group
        self._start = self._stop = 0.0

    def start(self) -> None:
        self.group.barrier()
        self._start = time.perf_counter()

    def stop(self) -> None:
        self._stop = time.perf_counter()

    def milliseconds(self) -> float:
        return (self._stop - self._start) * 1e3


def clock_for(group: EPGroup) -> Clock:
    """Events on a GPU, the host's clock elsewhere."""
    return DeviceClock(group) if group.device.type == "cuda" else HostClock(group)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """What is timed: `run(draw)` queues one chain of `layers` layer calls; `replays` of them per block."""

    run: Callable[[int], object]
    layers: int
    replays: int


def measure(
    clock: Clock, contestants: Mapping[str, Contestant], draws: int, blocks: int
) -> dict[str, list[float]]:
    """Microseconds per layer on this rank: one sample per contestant and block; block b works on draw b % draws.

    Collective: every rank calls it with the same contestants in the same order.
    """
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for block in range(blocks):
        spent = dict.fromkeys(contestants, 0.0)
        counts = dict.fromkeys(contestants, 0)
        for name in abba(list(contestants)):
            one = contestants[name]
            half = max(1, one.replays // 2)
            clock.start()
            for _ in range(half):
                one.run(block % draws)
            clock.stop()
            spent[name] += clock.milliseconds()
            counts[name] += half * one.layers
        for name in contestants:
            samples[name].append(spent[name] * 1e3 / counts[name])
    return samples


def blocks_for(blocks: int, draws: int) -> int:
    """At least `blocks`, and as many of every draw."""
    return math.ceil(blocks / draws) * draws


def over_floor(samples: Sequence[float], floors: Sequence[float]) -> Estimate:
    """Time / floor, the mean over draws of each draw's median, with a bootstrap interval over its blocks.

    Args:
        samples: one time per block; block b worked on draw b % len(floors).
        floors: of every draw, in the same unit.
    """
    draws = len(floors)
    if not draws or len(samples) % draws or min(floors) <= 0:
        raise InputError(
            f"{len(samples)} blocks over floors {list(floors)}: give as many blocks of each draw, floors above 0"
        )
    data = np.asarray(samples, dtype=np.float64).reshape(-1, draws) / np.asarray(floors)
    picks = np.random.default_rng(0).integers(0, len(data), (_RESAMPLES // 5, *data.shape))
    resampled = np.take_along_axis(data[None], picks, axis=1)
    means = np.median(resampled, axis=1).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(np.median(data, axis=0).mean()), float(low), float(high))
