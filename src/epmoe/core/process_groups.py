"""What `groups` needs from torch.distributed, with the differences between its versions and transports levelled."""

import atexit
import contextlib
import os
import sys
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from epmoe.core import ledger
from epmoe.core.errors import UnsupportedError

# Ranks of one host meet here: a host name that resolves to another interface would otherwise cost minutes.
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"

_abandoned_at_exit: "weakref.WeakSet[Any]" = weakref.WeakSet()

# torch 2.13 renamed both and warns about the old names, which are the only ones in 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(out: torch.Tensor, x: torch.Tensor, group: Any) -> None:
    """out [size*n, ...] = x [n, ...] of every rank; a copy where `group` is None."""
    if group is None:
        return _copy(out, x)
    _all_gather(_movable(out), _movable(x), group=group)


def reduce_scatter(out: torch.Tensor, x: torch.Tensor, group: Any) -> None:
    """out [n, ...] = sum over ranks of block `rank` of x [size*n, ...]; a copy where `group` is None."""
    if group is None:
        return _copy(out, x)
    _reduce_scatter(out, x, group=group)


def all_to_all(
    out: torch.Tensor,
    x: torch.Tensor,
    receives: Sequence[int] | None,
    sends: Sequence[int] | None,
    group: Any,
) -> None:
    """Block d of x to rank d, rows per block in `sends` or equal; a copy where `group` is None."""
    if group is None:
        return _copy(out, x)
    dist.all_to_all_single(_movable(out), _movable(x), receives, sends, group=group)


def resolve_device(device: torch.device | str) -> torch.device:
    """A cpu or an indexed cuda device.

    Raises:
        UnsupportedError: another kind of device, or a CUDA device that this process does not see.
    """
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device {found}: cpu and cuda are supported")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(f"device {found}: no CUDA device is visible here; use device='cpu'")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found


def backends(group: Any) -> list[str]:
    """Such as ["cpu:gloo", "cuda:nccl"]."""
    return dist.get_backend_config(group).split(",")


def first_ranks(parent: Any, n: int) -> Any:
    """A new process group of the first `n` ranks of `parent`, with its backends; those n ranks call it."""
    ranks = dist.get_process_group_ranks(parent)[:n]
    config = dist.get_backend_config(parent)
    # Local synchronisation: only the n members take part, so the parent need not be the whole world.
    return dist.new_group(ranks, backend=config, use_local_synchronization=True)


def abort(group: Any) -> None:
    """Destroy `group`, with all others where it is the default one, and talk to nobody: peers may be dead."""
    if "cuda:nccl" in backends(group):
        # Destroying would wait for kernels that wait for the dead. torch has no public name for this yet.
        dist.distributed_c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def abandon_at_exit(group: Any) -> Any:
    """`group`, an EPGroup, which is abandoned before Python ends unless it was closed.

    A thread of gloo's that lets go of its last tensor once Python has ended aborts the whole process. Torch ends these
    threads with the last reference to its group, so no forgotten group may hold one. Abandoned and not closed: at exit
    a peer may be gone already.
    """
    _abandoned_at_exit.add(group)
    return group


@atexit.register
def _abandon_all() -> None:
    for group in list(_abandoned_at_exit):
        with contextlib.suppress(Exception):  # the program's own exit code is what counts now
            group.abandon()


def rendezvous(where: str, rank: int, size: int, limit: timedelta) -> Any:
    """The store where ranks meet: a file (which means one host), or what a url names."""
    if "://" not in where:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
        return dist.FileStore(where, size)
    store, _, _ = next(iter(dist.rendezvous(where, rank, size, timeout=limit)))
    return store


def _copy(out: torch.Tensor, x: torch.Tensor) -> None:
    with ledger.paused():  # stands for a transfer, which is in the ledger already
        out.copy_(x)


def _movable(x: torch.Tensor) -> torch.Tensor:
    """Bytes for dtypes that transports do not know (float8): moving rows needs no arithmetic."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
