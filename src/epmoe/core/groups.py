"""The group of ranks that share one set of experts, and the only place that communicates.

Two planes, so that what a layer costs can be told apart from what its set-up costs:

* data plane: `all_gather`, `reduce_scatter`, `all_to_all` on tensors of `group.device`; every call is in the ledger
  and a phase (`phases`);
* control plane: `barrier`, `all_gather_ints`, `all_gather_objects` on host values; never in the ledger, and never
  on the CUDA stream where the group has a gloo side.
"""

import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from epmoe.core import exchange_checks as checks
from epmoe.core import ledger, phases
from epmoe.core import process_groups as pgs
from epmoe.core.errors import DisagreementError, InputError, UnsupportedError
from epmoe.core.exchange_checks import Counts
from epmoe.core.ranks import gpu_sharing
from epmoe.core.ranks.transport import choose_here


@dataclass(eq=False)
class EPGroup:
    """`size` ranks, of which this process is `rank`; made by `single`, `init`, `from_torchrun` or `join`.

    transport is "single" (one rank, no torch.distributed), "gloo" (cpu) or "nccl" (cuda). With `check_exchanges` every
    data-plane call first compares dtype, row shape and counts over the control plane, so that ranks which do not fit
    raise the same `DisagreementError` everywhere instead of waiting for each other.

    `graphs` are the captured calls (`graphs.GraphedCall`) that hold exchanges of this group, and end before it: NCCL
    waits for every CUDA graph that holds one of a communicator's collectives. Graphs of your own are yours to end.
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
    graphs: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet, repr=False)
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
        with self._exchange("all_gather", x, (self.size - 1) * x.nbytes):
            pgs.all_gather(out, x, self.process_group)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [n, ...] = the sum over ranks of their block `rank` of x [size*n, ...], taken in x's dtype."""
        problem = checks.misfit("reduce_scatter", x, out, self.device) or checks.unsummable(x)
        problem = problem or checks.blocks("reduce_scatter", x, out, self.size)
        self._agree("reduce_scatter", x, problem, rows=tuple(x.shape[:1]))
        with self._exchange("reduce_scatter", x, x.nbytes - x.nbytes // self.size):
            pgs.reduce_scatter(out, x, self.process_group)

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
        sent = x.nbytes - kept * (x.nbytes // max(1, x.shape[0]))
        with self._exchange("all_to_all", x, sent):
            pgs.all_to_all(out, x, recv, send, self.process_group)

    # ---- control plane

    def barrier(self) -> None:
        """Return when every rank has called it. Says nothing about work queued on a CUDA stream."""
        self.all_gather_ints([0])

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """The `values` of every rank, by rank; the same number of them on every rank."""
        with ledger.paused():  # host values cost no launch and no device read
            return self._gather_control(torch.tensor(list(values), dtype=torch.int64)).tolist()

    def all_gather_objects(self, obj: Any) -> list[Any]:
        """The `obj` of every rank, by rank; anything that pickles. For ranks that trust each other."""
        with ledger.paused():
            mine = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
            lengths = [row[0] for row in self.all_gather_ints([len(mine)])]
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: len(mine)] = mine
            rows = self._gather_control(padded).numpy()
        return [pickle.loads(row[:n].tobytes()) for row, n in zip(rows, lengths, strict=True)]

    # ---- life

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
        for call in self.graphs:
            call.end()
        for sub in self._subgroups.values():
            if sub is not None:
                sub.close()
        if self.owns_process_group:
            self.barrier()
            for made in {self.process_group, self.control_group}:
                dist.destroy_process_group(made)
        self.closed, self.process_group, self.control_group, self.store = True, None, None, None

    def abandon(self) -> None:
        """Give the group back without a word to the others, some of whom have died. A joined one is left to its maker.

        Exchanges that wait for the dead are broken off; what they would have written is undefined.
        """
        groups = [self, *filter(None, self._subgroups.values())]
        for call in (call for group in groups for call in group.graphs):
            call.end()
        if not self.closed and self.owns_process_group:
            pgs.abort(self.process_group)
        for group in groups:
            group.closed, group.process_group, group.control_group = True, None, None

    @property
    def operations(self) -> int:
        """How many times this process has communicated through this group, its subgroups included."""
        return self._operations[0]

    def _make_subgroup(self, n: int) -> "EPGroup":
        common = {"check_exchanges": self.check_exchanges, "_operations": self._operations}
        if n == 1:
            return EPGroup(0, 1, self.device, "single", **common)
        made = pgs.first_ranks(self.process_group, n)
        shared = self.control_group is self.process_group
        control = made if shared else pgs.first_ranks(self.control_group, n)
        members = (self.rank, n, self.device, self.transport, made, control)
        return EPGroup(*members, owns_process_group=True, **common)

    # ---- helpers

    def _exchange(
        self, name: str, x: torch.Tensor, wire_bytes: int
    ) -> AbstractContextManager[None]:
        """Around every data-plane exchange: it is in the ledger, and a phase."""
        self._operations[0] += 1
        ledger.record_collective(name, buffer_bytes=x.nbytes, wire_bytes=wire_bytes)
        return phases.phase("exchange", op=name, wire_bytes=wire_bytes)

    def _gather_control(self, mine: torch.Tensor) -> torch.Tensor:
        """[n] on the host -> [size, n] on the host."""
        self._refuse_closed("control plane")
        self._operations[0] += 1
        if self.control_group is None:
            return mine[None]
        # A joined NCCL-only group has no host side: then, and only then, the values travel over the device.
        mine = mine if "cpu:gloo" in pgs.backends(self.control_group) else mine.to(self.device)
        rows = mine.new_empty(self.size * mine.numel())
        pgs.all_gather(rows, mine, self.control_group)
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
    return EPGroup(0, 1, pgs.resolve_device(device), "single")


def init(
    rank: int,
    size: int,
    device: torch.device | str,
    rendezvous: str | os.PathLike,
    timeout: float = 1800.0,
    first: Callable[[Any], None] = lambda store: None,
) -> EPGroup:
    """Join `size` ranks into torch.distributed's default group; collective. gloo on cpu, NCCL with a gloo side on cuda.

    rendezvous: a file that all ranks reach (one host), or a url ("tcp://host:port", "env://"). timeout in seconds.
    first: is given the store where several ranks meet, before torch is; what it raises ends the attempt.
    """
    if not 0 <= rank < size:
        raise InputError(f"rank {rank} of {size}: give 0 to {size - 1}")
    where = pgs.resolve_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if size == 1:
        return single(where)
    if dist.is_initialized():
        raise InputError(
            "torch.distributed is initialised already: use groups.join(process_group, device)"
        )
    limit = timedelta(seconds=timeout)
    store = pgs.rendezvous(os.fspath(rendezvous), rank, size, limit)
    first(store)
    backend = "gloo" if where.type == "cpu" else "cpu:gloo,cuda:nccl"
    # No device_id: it would make NCCL split the parent for every subgroup, which needs ranks outside of it.
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    name = "gloo" if where.type == "cpu" else "nccl"
    members = (rank, size, where, name, dist.group.WORLD, dist.group.WORLD)
    return pgs.abandon_at_exit(EPGroup(*members, owns_process_group=True, store=store))


def from_torchrun(device: str = "auto", timeout: float = 1800.0) -> EPGroup:
    """The group of a program that torchrun (or a Slurm script that sets the same variables) started; collective."""
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in os.environ]
    if missing:
        raise InputError(
            f"not under torchrun, {' and '.join(missing)} not set: use torchrun or epmoe.core.launch"
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    choice = choose_here(local_size, device, world=size)
    for name, value in gpu_sharing.ENVIRONMENT.items() if choice.shared else ():
        os.environ.setdefault(name, value)
    if local_size == size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", pgs.LOOPBACK_INTERFACE)
    return init(rank, size, choice.device_of(local_rank), "env://", timeout)


def join(process_group: Any, device: torch.device | str, control_group: Any = None) -> EPGroup:
    """Wrap a process group that the host program made and will destroy, such as vLLM's expert-parallel group.

    control_group: a gloo group over the same ranks, for host values, where `process_group` is NCCL alone.
    """
    where, size = pgs.resolve_device(device), dist.get_world_size(process_group)
    if size == 1:
        return single(where)
    control = control_group if control_group is not None else process_group
    name = "gloo" if where.type == "cpu" else "nccl"
    have, needed = pgs.backends(process_group), f"{where.type}:{name}"
    if needed not in have:
        raise UnsupportedError(f"the joined group has {have}, {where} needs {needed}")
    members = (dist.get_rank(process_group), size, where, name, process_group, control)
    return pgs.abandon_at_exit(EPGroup(*members))
