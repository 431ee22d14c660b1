"""`launch` inside a program that torchrun started: the ranks exist, so run on this one and share the results."""

import atexit
import contextlib
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
from epmoe.core.rank_worker import dump_value

_GRACE = 2.0  # seconds a failed rank waits, so that all ranks can fail with their own words
_runs = itertools.count()
_worlds: list[groups.EPGroup] = []


def under_torchrun() -> bool:
    """Whether torchrun, or something that sets its variables, started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


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
        if not joined:
            atexit.register(_leave_world)
    return _worlds[0]


def _join_world() -> groups.EPGroup:
    on_cuda = "cuda:nccl" in dist.get_backend_config().split(",")
    where = f"cuda:{torch.cuda.current_device()}" if on_cuda else "cpu"
    return groups.join(dist.group.WORLD, where)


def _leave_world() -> None:
    with contextlib.suppress(
        Exception
    ):  # at exit a peer may be gone already; nothing is left to save
        dist.destroy_process_group()


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
