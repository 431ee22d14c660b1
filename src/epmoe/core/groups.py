"""The group of ranks that share one set of experts, and the only place that communicates.

Two planes, so that what a layer costs can be told apart from what its set-up costs:

* data plane: `all_gather`, `reduce_scatter`, `all_to_all` on tensors of `group.device`; every call is in the ledger;
* control plane: `barrier`, `all_gather_ints`, `all_gather_objects` on host values; never in the ledger, and never on the
  CUDA stream where the group has a gloo side.
"""

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from epmoe.core import exchange_checks as checks
from epmoe.core import ledger, transport
from epmoe.core.errors import DisagreementError, InputError, UnsupportedError
from epmoe.core.exchange_checks import Counts

# torch 2.13 renamed both and warns about the old names, which 2.11 has alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(eq=False)
class EPGroup:
    """`size` ranks, of which this process is `rank`; made by `single`, `init`, `from_torchrun` or `join`.

    transport is "single" (one rank, no torch.distributed), "gloo" (cpu) or "nccl" (cuda). With `check_exchanges` every
    data-plane call first compares dtype, row shape and counts over the control plane, so that ranks which do not fit
    raise the same `DisagreementError` everywhere instead of waiting for each other.
    """

    rank: int
    size: int
    device: torch.device
    transport: str
    process_group: Any = None
    control_group: Any = None
    owns_process_group: bool = False
    check_exchanges: bool = False
    closed: bool = False
    store: Any = field(default=None, repr=False)
    _subgroups: "dict[int, EPGroup | None]" = field(default_factory=dict, repr=False)
    # One cell, shared with the subgroups: how often this process communicated. The pool compares it between ranks.
    _operations: list[int] = field(default_factory=lambda: [0], repr=False)

    # ---- data plane

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [size*n, ...] = the x [n, ...] of every rank, in rank order; n is the same on every rank."""
        problem = checks.misfit("all_gather", out, x, self.device)
        problem = problem or checks.blocks("all_gather", out, x, self.size)
        self._agree("all_gather", x, problem, rows=tuple(x.shape[:1]))
        self._record("all_gather", x, (self.size - 1) * x.nbytes)
        if self.process_group is None:
            return _copy(out, x)
        _all_gather(_movable(out), _movable(x), group=self.process_group)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [n, ...] = the sum over ranks of their block `rank` of x [size*n, ...], taken in x's dtype."""
        problem = checks.misfit("reduce_scatter", x, out, self.device) or checks.unsummable(x)
        problem = problem or checks.blocks("reduce_scatter", x, out, self.size)
        self._agree("reduce_scatter", x, problem, rows=tuple(x.shape[:1]))
        self._record("reduce_scatter", x, x.nbytes - x.nbytes // self.size)
        if self.process_group is None:
            return _copy(out, x)
        _reduce_scatter(out, x, group=self.process_group)

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        recv_counts: Counts = None,
        send_counts: Counts = None,
    ) -> None:
        """Send block d of x [S, ...] to rank d; out [R, ...] holds the blocks of ranks 0, 1, ... in order.

        Counts are rows of dim 0, host integers, one per rank; both or neither (then all blocks are equal).
        """
        recv = None if recv_counts is None else [int(n) for n in recv_counts]
        send = None if send_counts is None else [int(n) for n in send_counts]
        problem = checks.misfit("all_to_all", out, x, self.device)
        problem = problem or checks.miscount(out, x, recv, send, self.size)
        self._agree("all_to_all", x, problem, None if send else tuple(x.shape[:1]), recv, send)
        kept = x.shape[0] // self.size if send is None else send[self.rank]
        self._record("all_to_all", x, x.nbytes - kept * (x.nbytes // max(1, x.shape[0])))
        if self.process_group is None:
            return _copy(out, x)
        dist.all_to_all_single(_movable(out), _movable(x), recv, send, group=self.process_group)

    # ---- control plane

    def barrier(self) -> None:
        """Return when every rank has called it. Says nothing about work queued on a CUDA stream."""
        self.all_gather_ints([0])

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """The `values` of every rank, by rank; the same number of them on every rank."""
        with _off_the_books():
            return self._gather_control(torch.tensor(list(values), dtype=torch.int64)).tolist()

    def all_gather_objects(self, obj: Any) -> list[Any]:
        """The `obj` of every rank, by rank; anything that pickles. For ranks that trust each other."""
        with _off_the_books():
            mine = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
            lengths = [row[0] for row in self.all_gather_ints([len(mine)])]
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: len(mine)] = mine
            rows = self._gather_control(padded).numpy()
        return [pickle.loads(row[:n].tobytes()) for row, n in zip(rows, lengths, strict=True)]

    # ---- life -----------------------------------------------------------------------------------------------------

    def subgroup(self, n: int) -> "EPGroup | None":
        """The first `n` ranks as a group (None on the others). Collective over those n ranks; cached until `close`."""
        if not 1 <= n <= self.size:
            raise InputError(
                f"subgroup of {n} ranks asked from a group of {self.size}: give 1 to {self.size}"
            )
        if n == self.size:
            return self
        if n not in self._subgroups:
            self._subgroups[n] = self._make_subgroup(n) if self.rank < n else None
        return self._subgroups[n]

    def close(self) -> None:
        """Give the group back: collective, and safe to call twice. A joined process group is left to its maker."""
        if self.closed:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # destroying NCCL under queued work can hang
        for sub in self._subgroups.values():
            if sub is not None:
                sub.close()
        if self.owns_process_group:
            self.barrier()
            dist.destroy_process_group(self.process_group)
        self.closed, self.process_group, self.control_group, self.store = True, None, None, None

    @property
    def operations(self) -> int:
        """How many times this process has communicated through this group, its subgroups included."""
        return self._operations[0]

    def _make_subgroup(self, n: int) -> "EPGroup":
        common = {"check_exchanges": self.check_exchanges, "_operations": self._operations}
        if n == 1:
            return EPGroup(0, 1, self.device, "single", **common)
        made = _new_group(self.process_group, n)
        shared = self.control_group is self.process_group
        control = made if shared else _new_group(self.control_group, n)
        return EPGroup(
            self.rank,
            n,
            self.device,
            self.transport,
            made,
            control,
            owns_process_group=True,
            **common,
        )

    # ---- helpers

    def _record(self, name: str, x: torch.Tensor, wire_bytes: int) -> None:
        self._operations[0] += 1
        ledger.record_collective(name, buffer_bytes=x.nbytes, wire_bytes=wire_bytes)

    def _gather_control(self, mine: torch.Tensor) -> torch.Tensor:
        """[n] on the host -> [size, n] on the host."""
        self._refuse_closed("control plane")
        self._operations[0] += 1
        if self.control_group is None:
            return mine[None]
        # A joined NCCL-only group has no host side: then, and only then, the values travel over the device.
        mine = mine if "cpu:gloo" in _backends(self.control_group) else mine.to(self.device)
        rows = mine.new_empty(self.size * mine.numel())
        _all_gather(rows, mine, group=self.control_group)
        return rows.cpu().view(self.size, -1)

    def _refuse_closed(self, op: str) -> None:
        if self.closed:
            raise InputError(f"{op}: this group was closed; make a new one")

    def _agree(
        self,
        op: str,
        x: torch.Tensor,
        problem: str | None,
        rows: Any,
        recv: Counts = None,
        send: Counts = None,
    ) -> None:
        """Raise `problem`; with check_exchanges on every rank, and also what differs between the ranks."""
        self._refuse_closed(op)
        if self.check_exchanges and self.size > 1:
            call = (op, str(x.dtype), tuple(x.shape[1:]), rows)
            problems, calls, recvs, sends = zip(
                *self.all_gather_objects((problem, call, recv, send)), strict=True
            )
            problem = next((f"rank {r}: {p}" for r, p in enumerate(problems) if p), None)
            difference = checks.first_difference(calls) or checks.not_transposed(sends, recvs)
            if difference and not problem:
                raise DisagreementError(difference)
        if problem:
            raise InputError(problem)


def single(device: torch.device | str = "cpu") -> EPGroup:
    """A group of one rank, without torch.distributed; data-plane calls are local copies, still in the ledger."""
    return EPGroup(0, 1, _resolve(device), "single")


def init(
    rank: int,
    size: int,
    device: torch.device | str,
    rendezvous: str | os.PathLike,
    timeout: float = 1800.0,
) -> EPGroup:
    """Join `size` ranks into torch.distributed's default group; collective. gloo on cpu, NCCL with a gloo side on cuda.

    rendezvous: a file that all ranks reach (one host), or a url ("tcp://host:port", "env://"). timeout in seconds.
    """
    if not 0 <= rank < size:
        raise InputError(f"rank {rank} of {size}: give 0 to {size - 1}")
    if size == 1:
        return single(device)
    if dist.is_initialized():
        raise InputError(
            "torch.distributed is initialised already: use groups.join(process_group, device)"
        )
    device = _resolve(device)
    if device.type == "cuda":
        # No device_id: it would make NCCL split the parent for every subgroup, which needs ranks outside of it.
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout)
    store = _rendezvous(os.fspath(rendezvous), rank, size, limit)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    name, world = ("gloo" if device.type == "cpu" else "nccl"), dist.group.WORLD
    return EPGroup(rank, size, device, name, world, world, owns_process_group=True, store=store)


def from_torchrun(device: str = "auto", timeout: float = 1800.0) -> EPGroup:
    """The group of a program that torchrun (or a Slurm script that sets the same variables) started; collective."""
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    if missing:
        raise InputError(
            f"not under torchrun, {' and '.join(missing)} not set: use torchrun or epmoe.core.launch"
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, local_size = (
        int(os.environ.get("LOCAL_RANK", rank)),
        int(os.environ.get("LOCAL_WORLD_SIZE", size)),
    )
    choice = transport.choose_here(local_size, device, world=size)
    os.environ.update(
        {k: v for k, v in transport.environment(choice).items() if k not in os.environ}
    )
    if local_size == size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", transport.LOOPBACK_INTERFACE)
    return init(rank, size, choice.device_of(local_rank), "env://", timeout)


def join(process_group: Any, device: torch.device | str, control_group: Any = None) -> EPGroup:
    """Wrap a process group that the host program made and will destroy, such as vLLM's expert-parallel group.

    control_group: a gloo group over the same ranks, for host values, where `process_group` is NCCL alone.
    """
    device, size = _resolve(device), dist.get_world_size(process_group)
    if size == 1:
        return single(device)
    control = control_group if control_group is not None else process_group
    name = "gloo" if device.type == "cpu" else "nccl"
    if f"{device.type}:{name}" not in _backends(process_group):
        raise UnsupportedError(
            f"the joined group has {_backends(process_group)}, {device} needs {device.type}:{name}"
        )
    return EPGroup(dist.get_rank(process_group), size, device, name, process_group, control)


@contextmanager
def _off_the_books() -> Iterator[None]:
    """Hide torch operators from the ledger's modes: host values cost no launch and no device read."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def _copy(out: torch.Tensor, x: torch.Tensor) -> None:
    with _off_the_books():  # stands for a transfer, which is in the ledger already
        out.copy_(x)


def _movable(x: torch.Tensor) -> torch.Tensor:
    """Bytes for dtypes that transports do not know (float8, bool): moving rows needs no arithmetic."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _resolve(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device {device}: cpu and cuda are supported")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            f"device {device}: no CUDA device is visible to this process; use device='cpu'"
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _backends(process_group: Any) -> list[str]:
    return dist.get_backend_config(process_group).split(",")


def _new_group(parent: Any, n: int) -> Any:
    # Local synchronisation: only the n members take part, so the parent need not be the whole world.
    ranks = dist.get_process_group_ranks(parent)[:n]
    return dist.new_group(
        ranks, backend=dist.get_backend_config(parent), use_local_synchronization=True
    )


def _rendezvous(where: str, rank: int, size: int, limit: timedelta) -> Any:
    if "://" not in where:
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", transport.LOOPBACK_INTERFACE
        )  # a file means one host
        return dist.FileStore(where, size)
    store, _, _ = next(iter(dist.rendezvous(where, rank, size, timeout=limit)))
    return store
