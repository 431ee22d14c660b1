"""Ranks that die one after the other, each in a process of its own; the program of tests/test_faults.py.

Ranks are named by their number at the start.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from epmoe.core import groups
from epmoe.core.cases import Case
from epmoe.core.faults import is_consequence, rebuild, regroup
from epmoe.core.groups import EPGroup
from epmoe.core.layer import MoELayer
from epmoe.core.verify import Row, build_case, worst_row

TIMEOUT = 60.0  # seconds, of the groups: longer than anything here may take


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one survivor saw of one death.

    Attributes:
        rank: at the start.
        noticed: the call that the dead rank left out ended with an error that says so, after `waited` seconds.
        rows: the worst row of every layer on the smaller group, against the oracle without the lost experts.
        ranks: of the smaller group.
    """

    rank: int
    noticed: bool
    waited: float
    rows: list[Row | None]
    ranks: int


def live(
    rank: int, folder: str, cases: Sequence[Case], deaths: Sequence[int], conn: Connection
) -> None:
    """Build all layers, then lose one rank after the other, and send a `Step` for each."""
    torch.set_num_threads(1)
    group = groups.init(rank, cases[0].ranks, "cpu", Path(folder) / "all", TIMEOUT)
    layers = [build_case(group, case) for case in cases]
    for layer, case in zip(layers, cases, strict=True):
        call(layer, case, rank)
    living = list(range(group.size))
    for number, victim in enumerate(deaths):
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL) if number % 2 else os._exit(9)
        layer, case = layers[number % len(layers)], cases[number % len(layers)]
        noticed, waited = call_the_dead(layer, case, rank)
        gone = [living.index(victim)]
        group = regroup(group, gone, Path(folder) / f"without-{victim}", TIMEOUT)
        layers = [rebuild(layer, gone, group) for layer in layers]
        living.remove(victim)
        rows = [
            judged(layer, replace(case, gone=tuple(deaths[: number + 1])), rank)
            for layer, case in zip(layers, cases, strict=True)
        ]
        conn.send(Step(rank=rank, noticed=noticed, waited=waited, rows=rows, ranks=group.size))
    close(group, layers)
    conn.send("done")


def call(layer: MoELayer, case: Case, rank: int) -> torch.Tensor:
    """The tokens that `rank` brought at the start, whatever its number is now."""
    return layer(case.tokens_of(0, rank), *case.routing(0, rank))


def call_the_dead(layer: MoELayer, case: Case, rank: int) -> tuple[bool, float]:
    """Whether a call in which a rank is missing ends with an error that says so, and after how many seconds."""
    started = time.monotonic()
    try:
        call(layer, case, rank)
    except RuntimeError as error:
        return is_consequence(error), time.monotonic() - started
    return False, time.monotonic() - started


def judged(layer: MoELayer, case: Case, rank: int) -> Row | None:
    everything = case.weights_of(range(case.shape.experts)).to(torch.float64)
    return worst_row(case, 0, rank, call(layer, case, rank), everything)


def close(group: EPGroup, layers: Sequence[MoELayer]) -> None:
    for layer in layers:
        layer.close()
    group.close()
