"""`epmoe tune`: measure a stage's configurations offline, so that run time is a pure lookup.

A stage that can be tuned offers `Stage.tuner`: it gets a `Request`, tries candidates on every rank of the group, lets
the slowest rank score and any failing rank veto, and returns one entry. Entries are kept in a JSON file; what is there
already is not measured again, so an interrupted sweep goes on where it stopped.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from epmoe.core import groups, registry
from epmoe.core.errors import InputError, UnsupportedError
from epmoe.core.groups import EPGroup
from epmoe.core.launch import open_ranks
from epmoe.core.shape import MoEShape

VARIABLE = "EPMOE_TUNING"  # names the user's own file, read besides those that ship with a stage


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to tune for; the same on all ranks.

    Attributes:
        shape: of the layer.
        ranks: EP.
        rank: the rank whose experts are measured, where one process plays it; None: every rank its own.
        tokens: T per rank.
        dtype: of the layer.
        candidates: how many configurations of each product to try.
        repeats: timed calls of each.
        layers: weight sets to go round, so that weights come from memory and not from a cache.
        seed: of the routing; other draws than anything that is reported.
    """

    shape: MoEShape
    ranks: int
    rank: int | None
    tokens: int
    dtype: torch.dtype
    candidates: int = 40
    repeats: int = 20
    layers: int = 2
    seed: int = 900_000


@dataclass(frozen=True)
class Tuner:
    """What a stage offers to be tuned; both are rank programs.

    Attributes:
        situation: (group, request) -> {"for": ..., "versions": ...}, the key of the entry.
        tune: (group, request) -> the whole entry and its "device".
    """

    situation: Callable[[EPGroup, Request], dict[str, Any]]
    tune: Callable[[EPGroup, Request], dict[str, Any]]


def default_file() -> Path:
    """Where a user's own entries live: $EPMOE_TUNING, or a file in the user's cache folder."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "epmoe" / "tuning.json"


def tuner_of(stage: str) -> Tuner:
    """The stage's tuner. Raises UnsupportedError where it has none."""
    tuner = registry.load(stage).tuner
    if tuner is None:
        raise UnsupportedError(f"{registry.resolve(stage)} has nothing to tune")
    return tuner


@contextmanager
def runner(ep: int, loopback: bool, device: str, timeout: float) -> Iterator[Any]:
    """run(tuner, request) -> entry: here where one rank is played, on `ep` ranks otherwise."""
    if loopback or ep == 1:
        where = "cuda" if device == "auto" and torch.cuda.is_available() else device
        group = groups.single("cpu" if where == "auto" else where)
        yield (lambda tuner, request: tuner(group, request)), group.device.type
        return
    with open_ranks(ep, device) as pool:
        yield (
            (lambda tuner, request: pool.run(tuner, request, timeout=timeout)[0]),
            pool.choice.device_type,
        )


def load(path: Path) -> dict[str, Any]:
    """The file's content; an empty one where there is none. Raises InputError for something else."""
    if not path.is_file():
        return {"device": None, "entries": []}
    try:
        data = json.loads(path.read_text())
        data = {"device": data["device"], "entries": data["entries"]}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no tuning file: {error!r}; name another with --out") from error
    return data


def matches(entry: dict[str, Any], key: dict[str, Any]) -> bool:
    """Whether the entry was made for the same situation with the same versions."""
    return entry["for"] == key["for"] and entry.get("versions") == key["versions"]


def add(data: dict[str, Any], device: str, entry: dict[str, Any], path: Path) -> None:
    """Put the entry in and write the file in one step; an older one for the same situation goes."""
    if data["device"] not in (None, device):
        raise InputError(
            f"{path} is for {data['device']}, this is {device}: name another with --out"
        )
    data["device"] = device
    data["entries"] = [one for one in data["entries"] if one["for"] != entry["for"]] + [entry]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(data, indent=1) + "\n")
    fresh.replace(path)
