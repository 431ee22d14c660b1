"""`launch` inside a program that torchrun started: the ranks exist, so run on this one and share the results."""

import faulthandler
import itertools
import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from epmoe.core import groups
from epmoe.core.errors import RankFailedError, RunTimeoutError
from epmoe.core.ranks.rank_worker import dump_value
from epmoe.core.ranks.time_limits import check_seconds
from epmoe.core.ranks.transport import Choice

_GRACE = 2.0  # seconds a failed rank waits, so that all ranks can fail with their own words
_runs = itertools.count()
_worlds: list[groups.EPGroup] = []


def under_torchrun() -> bool:
    """Whether torchrun, or something that sets its variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def world_size(asked: int) -> int:
    """How many ranks there are: torchrun's world, or as many as were asked for."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else asked


def speaks() -> bool:
    """Whether this process is the one that prints: rank 0 of torchrun's world, or the only one."""
    return not under_torchrun() or os.environ["RANK"] == "0"


class WorldRanks:
    """The ranks that torchrun started, used as a `RankPool` is; every rank gets all results."""

    def __init__(self, ranks: int, device: str = "auto"):
        self._asked, self._device = ranks, device
        self.group = _world(device)
        self.ranks = self.group.size
        kind, transport = self.group.device.type, self.group.transport
        self.choice = Choice(
            self.ranks, transport, kind, self.ranks if kind == "cuda" else 0, False, self.describe()
        )

    def describe(self) -> str:
        """One sentence: what runs."""
        return f"{self.group.size} ranks of torchrun's world on {self.group.device.type} over {self.group.transport}"

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """fn(group, *args, **kwargs) on this rank; the results of all, by rank. Collective."""
        check_seconds("timeout", timeout)
        return run_under_torchrun(fn, args, kwargs, self._asked, self._device, timeout)

    def __enter__(self) -> "WorldRanks":
        return self

    def __exit__(self, *exception: object) -> None:
        """The world lives as long as its programs."""


def run_under_torchrun(
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    ranks: int,
    device: str,
    timeout: float,
) -> list[Any]:
    """fn(group, ...) on this rank; every rank gets the results of all. Collective.

    Raises: what fn raised here; RankFailedError naming the rank that failed elsewhere; RunTimeoutError. A rank that
    hangs inside fn prints its stack and exits when the time is over, which makes torchrun end the others.
    """
    group = _world(device)
    if ranks != group.size and group.rank == 0:
        print(
            f"launch: torchrun's world of {group.size} is used, not ranks={ranks}", file=sys.stderr
        )
    error, value = None, None
    faulthandler.dump_traceback_later(timeout, exit=True)
    try:
        value = fn(group, *args, **kwargs)
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
    except Exception as raised:
        error = raised
    finally:
        faulthandler.cancel_dump_traceback_later()
    if group.size == 1:
        if error is not None:
            raise error
        return [value]
    _compare_ends(group, error, timeout)
    packed = group.all_gather_objects(dump_value(value))
    return [pickle.loads(each) for each in packed]


def _world(device: str) -> groups.EPGroup:
    """One group for all runs: torchrun's store cannot serve a second default group."""
    if not _worlds:
        joined = dist.is_initialized()
        _worlds.append(_join_world() if joined else groups.from_torchrun(device))
    return _worlds[0]


def _join_world() -> groups.EPGroup:
    on_cuda = "cuda:nccl" in dist.get_backend_config().split(",")
    where = f"cuda:{torch.cuda.current_device()}" if on_cuda else "cpu"
    return groups.join(dist.group.WORLD, where)


def _compare_ends(group: groups.EPGroup, error: Exception | None, timeout: float) -> None:
    """Through the store, not the group: a failed rank's peers may be waiting in a collective that never ends."""
    store, key = dist.distributed_c10d._get_default_store(), f"epmoe/run{next(_runs)}"
    text = None if error is None else f"{type(error).__name__}: {error}"
    store.set(f"{key}/{group.rank}", json.dumps(text))
    deadline = time.monotonic() + (timeout if error is None else _GRACE)
    waiting = set(range(group.size)) - {group.rank}
    while waiting and time.monotonic() < deadline:
        for rank in [r for r in waiting if store.check([f"{key}/{r}"])]:
            waiting.discard(rank)
            other = json.loads(store.get(f"{key}/{rank}"))
            if other is not None and error is None:
                raise RankFailedError(f"rank {rank} of {group.size} raised {other}")
        time.sleep(0.01)
    if error is not None:
        error.add_note(f"raised on rank {group.rank} of {group.size}")
        raise error
    if waiting:
        raise RunTimeoutError(
            f"after {timeout} s ranks {sorted(waiting)} of {group.size} had not finished"
        )
