"""Stages that were timed against each other, as `epmoe bench --remember` keeps them in the user's own file.

One `Comparison` is one point of a bench: stages in one run, on the same draws. It speaks for layers of the same device,
transport, dtype, sizes and ranks, at its own number of tokens and at those less than an octave away; for no others.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from epmoe.core import own_file
from epmoe.core.capabilities import Spec
from epmoe.core.errors import InputError
from epmoe.core.values import dtype_name, is_whole

LEAST_EFFECT = 0.02  # of a time: less is a tie, for a claim of `epmoe bench` and for a choice
OCTAVES = 1.0  # a comparison speaks for half to twice its tokens


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What was measured: sizes as in `MoEShape`, tokens and experts as in `Spec`."""

    transport: str
    dtype: str
    hidden: int
    intermediate: int
    experts: int
    topk: int
    ranks: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Times of some stages with their default options.

    Attributes:
        device: its name.
        situation: what was measured.
        microseconds: of one layer, by registered name; the slowest rank's median.
        created: UTC, ISO 8601.
        versions: of the libraries that count.
    """

    device: str
    situation: Situation
    microseconds: Mapping[str, float]
    created: str
    versions: Mapping[str, str | None]

    def octaves(self, spec: Spec) -> float:
        """How far from the tokens that `spec` asks for, infinite where another situation is asked for."""
        shape, mine = spec.shape, self.situation
        if shape is None or spec.dtype is None or not spec.tokens:
            return math.inf
        asked = Situation(
            transport=spec.transport or "",
            dtype=dtype_name(spec.dtype),
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            experts=shape.experts,
            topk=shape.topk,
            ranks=spec.ranks or 0,
            tokens=mine.tokens,
        )
        if (self.device, mine) != (spec.device_name, asked):
            return math.inf
        return abs(math.log2(mine.tokens / spec.tokens))

    def __str__(self) -> str:
        day = self.created.partition("T")[0]
        libraries = ", ".join(f"{name} {found}" for name, found in self.versions.items() if found)
        return f"T={self.situation.tokens} on {self.device}, {day} ({libraries})"

    def entry(self) -> dict[str, Any]:
        """As the file keeps it."""
        return {
            "for": asdict(self.situation),
            "versions": dict(self.versions),
            "created": self.created,
            "microseconds": dict(self.microseconds),
        }


def nearest(spec: Spec, comparisons: Sequence[Comparison]) -> Comparison | None:
    """The comparison that speaks for `spec`, the nearest in tokens (of two as near, the smaller), or None."""
    near = [one for one in comparisons if one.octaves(spec) <= OCTAVES]
    return min(near, key=lambda one: (one.octaves(spec), one.situation.tokens), default=None)


def read(path: Path | None = None) -> list[Comparison]:
    """What the user's own file (or `path`) holds; nothing where there is none.

    Raises:
        InputError: the file is broken; names it, the entry and the fix.
    """
    path = path or own_file.default_file()
    data = own_file.load(path)
    return [
        _comparison(data["device"], entry, f"{path}, {own_file.TIMES}[{place}]")
        for place, entry in enumerate(data[own_file.TIMES])
    ]


def keep(comparisons: Sequence[Comparison], path: Path | None = None) -> Path:
    """Write them into the user's own file (or `path`); older ones for the same situations go. Returns the file.

    Raises:
        InputError: the file is broken or about another device.
    """
    path = path or own_file.default_file()
    for one in comparisons:
        own_file.add(own_file.load(path), own_file.TIMES, one.device, one.entry(), path)
    return path


def _comparison(device: str, entry: dict[str, Any], where: str) -> Comparison:
    problem = _problem(entry)
    if problem:
        raise InputError(f"{where}: {problem}; take that entry out, or measure it again")
    return Comparison(
        device=device,
        situation=Situation(**entry["for"]),
        microseconds=entry["microseconds"],
        created=entry["created"],
        versions=entry["versions"],
    )


def _problem(entry: dict[str, Any]) -> str | None:
    """What is wrong with an entry of the file, or None."""
    found, wanted = entry["for"], {field.name: field.type for field in fields(Situation)}
    if set(found) != set(wanted):
        return f"its situation has {', '.join(sorted(found))}, not {', '.join(sorted(wanted))}"
    for name, kind in wanted.items():
        value = found[name]
        right = isinstance(value, str) if kind is str else is_whole(value) and value >= 1
        if not right:
            return f"{name} is {value!r}, not a {'name' if kind is str else 'whole number of at least 1'}"
    times = entry.get("microseconds")
    if not isinstance(times, dict) or not times:
        return f"microseconds are {times!r}, not a time by stage"
    for stage, time in times.items():
        if isinstance(time, bool) or not isinstance(time, int | float) or not 0 < time < math.inf:
            return f"the time of {stage} is {time!r}, not a number above 0"
    if not isinstance(entry.get("created"), str) or not isinstance(entry.get("versions"), dict):
        return "it does not say when it was created, and with which versions"
    return None
