"""What a layer call does, counted without a GPU: the same numbers on every machine.

    with ledger.record() as book:
        y_TH = layer(x_TH, topk_ids_TK, topk_weights_TK)
    book.collectives, book.host_syncs, book.launches, book.allocations, book.rows_computed

What is counted, on this rank:

- collectives: name, buffer bytes and the bytes that leave for OTHER ranks (reported by `EPGroup`);
- host syncs: places where the host must know a device value (`.item()`, `.tolist()`, `.cpu()`, boolean masks, `nonzero`
  and everything else whose output size depends on data). On a CPU they cost nothing and are counted all the same;
- launches: torch operators that do work (views and bare allocations do not), and Triton kernels;
- allocations: fresh storages and their bytes;
- rows computed: rows that went through an expert, padding included, as the experts report them.
  How many were needed, the routing knows.

Operators are seen through torch's dispatch mode, reads through its function mode: a stage cannot forget to report them.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from epmoe.core.dispatch_mode import DispatchMode


@dataclass(frozen=True)
class Collective:
    """One exchange: its name, the bytes of its input buffer, and those that leave this rank."""

    name: str
    buffer_bytes: int
    wire_bytes: int


@dataclass
class Ledger:
    """Counts of everything between `record()`'s entry and exit, on this rank."""

    collectives: list[Collective] = field(default_factory=list)
    host_syncs: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    allocations: int = 0
    allocated_bytes: int = 0
    rows_computed: int = 0

    def summary(self) -> dict:
        """Plain numbers for tables and JSON."""
        return {
            "collectives": [c.name for c in self.collectives],
            "buffer_bytes": sum(c.buffer_bytes for c in self.collectives),
            "wire_bytes": sum(c.wire_bytes for c in self.collectives),
            "host_syncs": self.host_syncs.total(),
            "launches": self.launches.total(),
            "allocations": self.allocations,
            "allocated_bytes": self.allocated_bytes,
            "rows_computed": self.rows_computed,
        }


_open_books: list[Ledger] = []


@contextmanager
def record(*, operators: bool = True) -> Iterator[Ledger]:
    """Count what happens inside the block. Blocks nest; each counts for itself.

    Without `operators` only what is reported is counted: collectives, rows, Triton kernels. That does not slow a call.
    """
    book = Ledger()
    _open_books.append(book)
    try:
        if not operators:
            yield book
            return
        with _Operators(book), _HostReads(book):
            yield book
    finally:
        _open_books.remove(book)


def record_collective(name: str, *, buffer_bytes: int, wire_bytes: int) -> None:
    """Called by `EPGroup` for every data exchange; free when nobody records."""
    for book in _open_books:
        book.collectives.append(Collective(name, buffer_bytes, wire_bytes))


def record_launch(name: str) -> None:
    """Called by Triton launchers, whose kernels torch does not see."""
    for book in _open_books:
        book.launches[name] += 1


def record_rows(computed: int | Callable[[], int]) -> None:
    """Called by experts: `computed` rows went through an expert, padding included.

    Where only the device knows, give a function that reads it: it is called when somebody records, off the books.
    """
    if not _open_books:
        return
    with paused():
        rows = computed if isinstance(computed, int) else computed()
    for book in _open_books:
        book.rows_computed += rows


@contextmanager
def paused() -> Iterator[None]:
    """Hide what happens inside from every open ledger: checks, and whatever else is not the layer's own work."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


# Methods that hand a device value to the host. On a CPU tensor most of them reach no operator at all.
_READS = {
    getattr(Tensor, name): name
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
}


class _HostReads(TorchFunctionMode):
    def __init__(self, book: Ledger):
        super().__init__()
        self._book = book

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = _READS.get(func)
        if name is None:
            return func(*args, **(kwargs or {}))
        self._book.host_syncs[name] += 1
        with torch._C._DisableTorchDispatch():  # the operators inside are this one read
            return func(*args, **(kwargs or {}))


# Operators whose output size depends on values, or that compare on the host: on a GPU each waits for the device.
_WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "bincount",
    "equal",
    "is_nonzero",
}


class _Operators(DispatchMode):
    def __init__(self, book: Ledger):
        super().__init__()
        self._book = book

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        before = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        fresh = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(out)}
        for storage, nbytes in fresh.items():
            if storage not in before:
                self._book.allocations += 1
                self._book.allocated_bytes += nbytes
        name = func._schema.name.removeprefix("aten::")
        if _waits(name, args, kwargs, out):
            self._book.host_syncs[name] += 1
        if not (func.is_view or name in _NO_WORK or name.startswith("c10d::")):
            self._book.launches[name] += 1
        return out


_NO_WORK = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach"}
_NO_WORK |= {"lift_fresh", "_unsafe_view", "resize_", "alias", "set_", "record_stream"}


def _waits(name: str, args, kwargs, out) -> bool:
    if name in _WAITING:
        return True
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in (
        "index",
        "index_put",
        "index_put_",
        "_index_put_impl_",
    ):  # a mask as index is a hidden nonzero
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name in ("_to_copy", "copy_"):
        source = args[1] if name == "copy_" else args[0]
        return source.device.type != "cpu" and out.device.type == "cpu"
    return False


def _tensors(tree) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)
