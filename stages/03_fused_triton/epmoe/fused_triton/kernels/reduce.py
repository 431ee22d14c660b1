"""Combine: the owner adds its K slots of a row, the source adds its EP rows of a token. Fixed order, no atomics.

The rows already carry their routing weight (float32, applied once, by `down`), so both steps are plain sums: slots in
ascending order inside an owner rank, ranks in ascending order at the source. The same input gives the same bits.

Worked on the toy: token 1 names experts 1 and 2. Rank 0 returns ret[row 1] = 0.75 * expert1(token 1), rank 1 returns
0.25 * expert2(token 1); rank 0 adds them in this order. A rank that holds no expert of a token returns zeros.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from epmoe.fused_triton.kernels._checks import (
    FLOATS,
    need,
    need_contiguous,
    need_dense_rows,
    need_dtype,
    need_shape,
    power_of_two,
)
from epmoe.fused_triton.kernels._launch import launch, pdl_start_next, pdl_wait


# --8<-- [start:reduce]
@triton.jit
def _reduce_kernel(
    rows_ptr, slots_ptr, ret_ptr, E_LOCAL,
    H: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (r, j): columns j of received row r. Toy, row 0 on rank 0: slots 0 and 1; row 3: slot 6 alone."""
    r = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    acc = tl.zeros([BLOCK_H], tl.float32)
    pdl_wait(PDL)
    pdl_start_next(PDL)
    for k in tl.static_range(K):
        expert = tl.load(slots_ptr + r * WORDS + k)
        known = (expert >= 0) & (expert < E_LOCAL)
        # a slot without a local expert was never written: it is not read
        row = tl.load(rows_ptr + (r * K + k) * H + offs_h, mask=mask_h & known, other=0.0)
        acc += row.to(tl.float32)
    tl.store(ret_ptr + r * H + offs_h, acc.to(ret_ptr.dtype.element_ty), mask=mask_h)


# --8<-- [end:reduce]


def reduce_slots(
    slots_RJ: Tensor, rows_NH: Tensor, local_experts: int, ret: Tensor, *, pdl: bool = False
) -> None:
    """Owner side: ret [R, H] = the sum of each received row's local slots, in slot order, in float32.

    Args:
        slots_RJ: [R, J] int32 local experts, rows any stride apart.
        rows_NH: [N, H] from `down`.
        local_experts: E_local; slots with other ids count as zero.
        ret: [R, H] float32 (default of the layer) or the hidden dtype; every row is written.
    """
    (rows, places), hidden = slots_RJ.shape, rows_NH.shape[1]
    need_contiguous(rows=rows_NH, ret=ret)
    need_dtype("slots", slots_RJ, torch.int32)
    need_shape("rows", rows_NH, (rows * places, hidden))
    need_shape("ret", ret, (rows, hidden))
    need_dtype("ret", ret, *FLOATS)
    block_h, blocks = _columns(hidden, rows)
    launch(
        _reduce_kernel, (rows, blocks), rows_NH, slots_RJ, ret, local_experts,
        H=hidden, K=places, WORDS=slots_RJ.stride(0), BLOCK_H=block_h,
        num_warps=4, pdl=pdl,
    )  # fmt: skip


# --8<-- [start:merge]
@triton.jit(do_not_specialize=["capacity"])
def _merge_kernel(
    back_ptr, y_ptr, capacity, stride_yt,
    EP: tl.constexpr, H: tl.constexpr, RING: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, j): columns j of token t, ranks ascending. Toy, token 1: the row of rank 0, plus that of rank 1."""
    t = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    acc = tl.zeros([BLOCK_H], tl.float32)
    pdl_wait(PDL)
    pdl_start_next(PDL)
    for d in tl.static_range(EP):
        row = tl.load(back_ptr + (d * capacity + t) * H + offs_h, mask=mask_h, other=0.0)
        acc += row.to(tl.float32)
        if RING:
            acc = acc.to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + t * stride_yt + offs_h, acc.to(y_ptr.dtype.element_ty), mask=mask_h)


# --8<-- [end:merge]


def merge_ranks(back: Tensor, y_TH: Tensor, *, ring: bool = False, pdl: bool = False) -> None:
    """Source side: y_TH = the sum of the EP rows that came back for each token, ranks ascending, in float32.

    Args:
        back: [EP, C, H] float32 or the hidden dtype, after the second exchange.
        y_TH: [T, H] with dense rows, T <= C.
        ring: round to y's dtype after every rank, as a ring that passes partial sums on does. Less exact: an error of
            up to EP - 1 roundings instead of one; only for comparison with such systems.
    """
    need(back.dim() == 3, f"back has shape {tuple(back.shape)}: expected [EP, C, H]")
    need_contiguous(back=back)
    need_dtype("back", back, *FLOATS)
    need_dtype("y", y_TH, *FLOATS)
    ranks, capacity, hidden = back.shape
    need(
        y_TH.dim() == 2 and y_TH.shape[0] <= capacity and y_TH.shape[1] == hidden,
        f"y has shape {tuple(y_TH.shape)}: expected [T <= {capacity}, {hidden}]",
    )
    need_dense_rows("y", y_TH)
    block_h, blocks = _columns(hidden, y_TH.shape[0])
    launch(
        _merge_kernel, (y_TH.shape[0], blocks), back, y_TH, capacity, y_TH.stride(0),
        EP=ranks, H=hidden, RING=ring, BLOCK_H=block_h, num_warps=4, pdl=pdl,
    )  # fmt: skip


def _columns(hidden: int, rows: int) -> tuple[int, int]:
    """(columns of a program, programs per row): few rows are cut finer, so that the GPU is not left idle."""
    block = min(power_of_two(hidden, 16), 512 if rows <= 256 else 2048)
    return block, -(-hidden // block)
