"""What must hold before ranks exchange rows: seen from one rank, and compared between ranks.

Every function returns the problem as a sentence, or None. Nothing here communicates.
"""

from collections.abc import Sequence

import torch

Counts = Sequence[int] | None


def misfit(op: str, big: torch.Tensor, small: torch.Tensor, device: torch.device) -> str | None:
    """The two tensors of one exchange: contiguous rows of one dtype and shape, both on the group's device."""
    for t in (big, small):
        if t.dim() == 0 or not t.is_contiguous():
            shape, strides = tuple(t.shape), t.stride()
            return f"{op} needs contiguous tensors of rows, got shape {shape} strides {strides}"
        if t.device != device:
            return f"{op} got a tensor on {t.device}, this group works on {device}: move it there"
    if big.dtype != small.dtype or big.shape[1:] != small.shape[1:]:
        sides = f"{big.dtype} {tuple(big.shape)} against {small.dtype} {tuple(small.shape)}"
        return f"{op} got {sides}: dtype and row shape must be equal"
    return None


def blocks(op: str, big: torch.Tensor, small: torch.Tensor, size: int) -> str | None:
    """The long side holds one block of the short side's rows for each of `size` ranks."""
    if big.shape[0] != size * small.shape[0]:
        rows = f"{big.shape[0]} rows against {small.shape[0]}"
        return f"{op} over {size} ranks got {rows}: the long side needs {size * small.shape[0]}"
    return None


def miscount(
    out: torch.Tensor, x: torch.Tensor, recv: Counts, send: Counts, size: int
) -> str | None:
    """The row counts of an all-to-all against its two tensors."""
    if (recv is None) != (send is None):
        return "all_to_all needs both recv_counts and send_counts, or neither"
    if send is None or recv is None:
        if x.shape[0] % size or out.shape[0] != x.shape[0]:
            rows = f"{x.shape[0]} rows in and {out.shape[0]} out"
            return f"all_to_all without counts got {rows}: equal, and a multiple of {size} ranks"
        return None
    for name, counts, rows in (("send", send, x.shape[0]), ("recv", recv, out.shape[0])):
        if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
            need = f"{size} counts >= 0 that sum to its {rows} rows"
            return f"all_to_all got {name}_counts {list(counts)}: give {need}"
    return None


def unsummable(x: torch.Tensor) -> str | None:
    """One-byte floats move, but no transport adds them."""
    if x.dtype.is_floating_point and x.dtype.itemsize == 1:
        return f"reduce_scatter cannot sum {x.dtype}: convert to bfloat16 or float32 first"
    return None


def first_difference(calls: Sequence[tuple]) -> str | None:
    """From (op, dtype, row shape, rows or None) of every rank: who calls something else than rank 0."""
    for rank, call in enumerate(calls):
        if call != calls[0]:
            return f"rank {rank} calls (op, dtype, row shape, rows) {call}, rank 0 {calls[0]}"
    return None


def not_transposed(sends: Sequence[Counts], recvs: Sequence[Counts]) -> str | None:
    """What rank s sends to rank d must be what d expects from s, for every pair; None counts are not compared."""
    for source, send in enumerate(sends):
        for target, recv in enumerate(recvs):
            if send is not None and recv is not None and send[target] != recv[source]:
                have = f"rank {source} sends {send[target]} rows to rank {target}"
                return f"{have}, which expects {recv[source]}"
    return None
