"""Grouped GEMMs over the tile list: gate_up with SwiGLU, then down with the routing weight.

A program takes work items (tile, column block) from a list whose length stands on the device. Fewer programs
than items is a persistent grid, more is early exit; both are the same loop, so nothing depends on a host value.

    gate_up   h[p] = silu(x[row of p] @ gate^T) * (x[row of p] @ up^T)     p: expert-major position
    down      rows[slot of p] = weight[slot of p] * (h[p] @ w2^T)

With few rows A is read where it was received (row = slot // K), without a copy. With many, `gather_rows` has copied it
into expert-major order, so that it comes by TMA (TMA_ROWS). Accumulation is float32; the routing weight multiplies the
float32 sum, so a float16 row that would overflow without its weight does not. Rows past the end of a tile cost no
traffic (or, by TMA, are the next expert's) and are never stored: no row of a product depends on another.

Worked on the toy, rank 0: tile 0 is expert 0, positions 0 to 2, slots 0 and 6, rows 0 and 3. It writes h[0], h[1], then
rows[0] = 0.75 * expert0(token 0) and rows[6] = 0.75 * expert0(token 3).
"""

import triton
import triton.language as tl
from triton import knobs

from epmoe.fused_triton.kernels._launch import pdl_start_next, pdl_wait


@triton.jit
def work_item(work, tiles, NUM_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(tile, column block) of a work item: column blocks outside, GROUP_M tiles inside, so that they share weights.

    3 tiles, 2 column blocks, GROUP_M = 2: (0,0) (1,0) (0,1) (1,1) (2,0) (2,1).
    """
    width = GROUP_M * NUM_N
    first = work // width * GROUP_M
    size = tl.minimum(tiles - first, GROUP_M)
    inside = work % width
    return first + inside % size, inside // size


@triton.jit
def list_length(tiles_ptr, NUM_N: tl.constexpr):
    """Tiles in the list, read from the entry that this program starts with: entry and length arrive in one load."""
    return tl.load(tiles_ptr + tl.program_id(0) // NUM_N * 4 + 3)


@triton.jit
def row_tile(row_ptrs, live, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """[rows, BLOCK_K] of the rows at `row_ptrs` [rows] from column k; rows that are not `live` cost no traffic."""
    offs_k = k + tl.arange(0, BLOCK_K)
    ptrs = row_ptrs[:, None] + offs_k[None, :]
    mask = live[:, None]
    if WIDTH % BLOCK_K != 0:
        mask = mask & (offs_k[None, :] < WIDTH)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def weight_tile(
    w_ptr, row, k, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr, left,
):  # fmt: skip
    """[BLOCK_N, BLOCK_K] of a weight matrix from (row, k); of `left` rows the last stands for missing ones."""
    if TMA:
        tile = w_ptr.load([row.to(tl.int32), k])
    else:
        offs_n = tl.arange(0, BLOCK_N)
        if ROWS % BLOCK_N != 0:
            offs_n = tl.minimum(offs_n, left - 1)
        offs_k = k + tl.arange(0, BLOCK_K)
        ptrs = w_ptr + row * WIDTH + offs_n[:, None] * WIDTH + offs_k[None, :]
        if WIDTH % BLOCK_K == 0:
            tile = tl.load(ptrs)
        else:
            tile = tl.load(ptrs, mask=offs_k[None, :] < WIDTH, other=0.0)
    return tile


# The interpreter multiplies the raw bits of bfloat16; widened first, its product is exact. Compiled code never widens.
_WIDEN = tl.constexpr(knobs.runtime.interpret)


# --8<-- [start:multiply]
@triton.jit
def multiply(a, w, acc, SWAP: tl.constexpr):
    """acc + a @ w^T; with SWAP everything is transposed: acc [BLOCK_N, BLOCK_M] + w @ a^T."""
    if _WIDEN:
        a = a.to(tl.float32)
        w = w.to(tl.float32)
    if SWAP:
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    return acc


# --8<-- [end:multiply]


# --8<-- [start:swiglu]
@triton.jit
def store_activations(
    gate, up, h_ptr, offs_m, end, n, I: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr
):
    """h at positions offs_m below `end`, column block n: silu(gate) * up, in float32 until it is stored."""
    h = (gate * tl.sigmoid(gate) * up).to(h_ptr.dtype.element_ty)
    if SWAP:
        h = tl.trans(h)
    offs_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
    h_ptrs = h_ptr + offs_m.to(tl.int64)[:, None] * I + offs_n[None, :]
    tl.store(h_ptrs, h, mask=(offs_m < end)[:, None] & (offs_n < I)[None, :])


# --8<-- [end:swiglu]


@triton.jit
def accumulator(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr):
    """Zeros [BLOCK_M, BLOCK_N], or transposed with SWAP."""
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    return acc


# --8<-- [start:gate_up]
@triton.jit
def gate_up_kernel(
    x_ptr, rest_ptr, w_ptr, h_ptr, sorted_ptr, tiles_ptr,
    H: tl.constexpr, I: tl.constexpr, K: tl.constexpr, ITEMS: tl.constexpr, EXPERT_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, TMA_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h [N, I] at expert-major positions. Toy, tile 0 on rank 0: h[0] from row 0, h[1] from row 3, both expert 0."""
    NUM_N: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    pdl_wait(PDL)
    tiles = list_length(tiles_ptr, NUM_N)
    pdl_start_next(PDL)
    for work in tl.range(tl.program_id(0), tiles * NUM_N, tl.num_programs(0)):
        tile, n = work_item(work, tiles, NUM_N, GROUP_M)
        gate_row = tl.load(tiles_ptr + tile * 4).to(tl.int64) * EXPERT_ROWS + n * BLOCK_N
        end = tl.load(tiles_ptr + tile * 4 + 2)
        start = tl.load(tiles_ptr + tile * 4 + 1)
        offs_m = start + tl.arange(0, BLOCK_M)
        if not TMA_ROWS:
            slots = tl.load(sorted_ptr + tl.minimum(offs_m, end - 1))
            x_rows = x_ptr + (slots // K).to(tl.int64) * ITEMS
        gate = accumulator(BLOCK_M, BLOCK_N, SWAP)
        up = gate
        if BLOCK_R > 0:
            gate_r = accumulator(BLOCK_R, BLOCK_N, SWAP)
            up_r = gate_r
        for k in tl.range(0, H, BLOCK_K):
            # weights first: their address needs the tile alone, that of x waits for the slots
            w_gate = weight_tile(w_ptr, gate_row, k, I, H, BLOCK_N, BLOCK_K, TMA, I - n * BLOCK_N)
            w_up = weight_tile(w_ptr, gate_row + I, k, I, H, BLOCK_N, BLOCK_K, TMA, I - n * BLOCK_N)
            if TMA_ROWS:
                x = x_ptr.load([start, k])
            else:
                x = row_tile(x_rows, offs_m < end, k, H, BLOCK_K)
            gate = multiply(x, w_gate, gate, SWAP)
            up = multiply(x, w_up, up, SWAP)
            if BLOCK_R > 0:
                rest = rest_ptr.load([start + BLOCK_M, k])
                gate_r = multiply(rest, w_gate, gate_r, SWAP)
                up_r = multiply(rest, w_up, up_r, SWAP)
        store_activations(gate, up, h_ptr, offs_m, end, n, I, BLOCK_N, SWAP)
        if BLOCK_R > 0:
            offs_r = start + BLOCK_M + tl.arange(0, BLOCK_R)
            store_activations(gate_r, up_r, h_ptr, offs_r, end, n, I, BLOCK_N, SWAP)


# --8<-- [end:gate_up]


# --8<-- [start:weigh]
@triton.jit
def store_weighed(
    acc, weights_ptr, rows_ptr, sorted_ptr, offs_m, end, n, H: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """rows at the slots of positions offs_m below `end`, column block n: the routing weight times the float32 sum."""
    if SWAP:
        acc = tl.trans(acc)
    slots = tl.load(sorted_ptr + tl.minimum(offs_m, end - 1)).to(tl.int64)
    weight = tl.load(weights_ptr + slots // K * WORDS + slots % K)
    offs_n = n * BLOCK_N + tl.arange(0, BLOCK_N)
    out = (acc * weight[:, None]).to(rows_ptr.dtype.element_ty)
    row_ptrs = rows_ptr + slots[:, None] * H + offs_n[None, :]
    tl.store(row_ptrs, out, mask=(offs_m < end)[:, None] & (offs_n < H)[None, :])


# --8<-- [end:weigh]


@triton.jit
def down_kernel(
    h_ptr, rest_ptr, w_ptr, weights_ptr, rows_ptr, sorted_ptr, tiles_ptr,
    H: tl.constexpr, I: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, EXPERT_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, TMA_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """rows [N, H] by slot. Toy, tile 0 on rank 0: rows[0] and rows[6], each 0.75 * (h @ w2 of expert 0)."""
    NUM_N: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    # gate_up starts this kernel only after ITS wait, so the tile list is complete here; h is not
    tiles = list_length(tiles_ptr, NUM_N)
    pdl_wait(PDL)
    pdl_start_next(PDL)
    for work in tl.range(tl.program_id(0), tiles * NUM_N, tl.num_programs(0)):
        tile, n = work_item(work, tiles, NUM_N, GROUP_M)
        w_row = tl.load(tiles_ptr + tile * 4).to(tl.int64) * EXPERT_ROWS + n * BLOCK_N
        end = tl.load(tiles_ptr + tile * 4 + 2)
        start = tl.load(tiles_ptr + tile * 4 + 1)
        offs_m = start + tl.arange(0, BLOCK_M)
        acc = accumulator(BLOCK_M, BLOCK_N, SWAP)
        if BLOCK_R > 0:
            acc_r = accumulator(BLOCK_R, BLOCK_N, SWAP)
        for k in tl.range(0, I, BLOCK_K):
            w = weight_tile(w_ptr, w_row, k, H, I, BLOCK_N, BLOCK_K, TMA, H - n * BLOCK_N)
            if TMA_ROWS:
                h = h_ptr.load([start, k])
            else:
                h = row_tile(h_ptr + offs_m.to(tl.int64) * I, offs_m < end, k, I, BLOCK_K)
            acc = multiply(h, w, acc, SWAP)
            if BLOCK_R > 0:
                acc_r = multiply(rest_ptr.load([start + BLOCK_M, k]), w, acc_r, SWAP)
        store_weighed(
            acc, weights_ptr, rows_ptr, sorted_ptr, offs_m, end, n, H, K, WORDS, BLOCK_N, SWAP
        )  # fmt: skip
        if BLOCK_R > 0:
            offs_r = start + BLOCK_M + tl.arange(0, BLOCK_R)
            store_weighed(
                acc_r, weights_ptr, rows_ptr, sorted_ptr, offs_r, end, n, H, K, WORDS, BLOCK_N, SWAP
            )  # fmt: skip
