"""`epmoe tune`: measure a stage's configurations offline, so that run time is a pure lookup.

A stage that can be tuned offers `Stage.tuner`: it gets a `Request`, tries candidates on every rank of the group, lets
the slowest rank score and any failing rank veto, and returns one entry. Entries are kept in the user's own file
(`own_file`); what is there already is not measured again, so an interrupted sweep goes on where it stopped.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from epmoe.core import groups, registry
from epmoe.core.errors import UnsupportedError
from epmoe.core.groups import EPGroup
from epmoe.core.launch import open_ranks
from epmoe.core.placement import contiguous
from epmoe.core.ranks.torchrun import world_size
from epmoe.core.ranks.transport import one_device
from epmoe.core.room import check_room, rank_weight_bytes
from epmoe.core.shape import MoEShape


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to tune for; the same on all ranks.

    Attributes:
        shape: of the layer.
        ranks: EP.
        rank: the rank whose experts are measured, where one process plays it; None: every rank its own.
        tokens: T per rank.
        dtype: of the layer.
        candidates: how many tiles of each product to try; a stage may try other schedules of the fastest besides.
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


Program = Callable[[EPGroup, Request], Any]
Run = Callable[[Program, Request], Any]


@dataclass(frozen=True)
class Tuner:
    """What a stage offers to be tuned.

    Attributes:
        situation: (group, request) -> {"for": ..., "versions": ...}, the key of the entry; a rank program.
        tune: (group, request) -> the whole entry and its "device"; a rank program.
        columns: what `cells` are called in a table.
        cells: what an entry holds, in words, by `columns`.
    """

    situation: Program
    tune: Program
    columns: Sequence[str]
    cells: Callable[[dict[str, Any]], Sequence[str]]


def tuner_of(stage: str) -> Tuner:
    """The stage's tuner. Raises UnsupportedError where it has none."""
    tuner = registry.load(stage).tuner
    if tuner is None:
        raise UnsupportedError(f"{registry.resolve(stage)} has nothing to tune")
    return tuner


@contextmanager
def runner(ep: int, loopback: bool, device: str, timeout: float) -> Iterator[tuple[Run, str]]:
    """What runs a program of a `Tuner` and gives rank 0's answer, and on which kind of device, cpu or cuda.

    It runs here where one process plays a rank, else on torchrun's world or `ep` ranks, each program for at most
    `timeout` seconds.
    """
    ranks = world_size(ep)
    if loopback or ranks == 1:
        group = groups.single(one_device(device))
        yield (lambda program, request: program(group, request)), group.device.type
        return
    with open_ranks(ranks, device) as pool:
        yield (
            (lambda program, request: pool.run(program, request, timeout=timeout)[0]),
            pool.choice.device_type,
        )


def check_memory(group: EPGroup, request: Request) -> None:
    """Raise InputError on every rank where the weights do not fit into a CPU's memory; a rank program."""
    shape = request.shape
    layer_bytes = rank_weight_bytes(shape, contiguous(shape.experts, request.ranks), request.dtype)
    check_room(group, shape.name, request.layers, layer_bytes)


def matches(entry: dict[str, Any], key: dict[str, Any]) -> bool:
    """Whether the entry was made for the same situation with the same versions."""
    return entry["for"] == key["for"] and entry.get("versions") == key["versions"]
