"""Metadata: from the received ids to an expert-major list of slots and a bounded list of GEMM tiles, on the device.

Everything is counted, nothing is raced for: a slot's place is the number of slots that must stand before it, so the
result is stable (ascending slots inside an expert) and the same on every run. An id outside [0, E_local) is "no
expert": its slots come last and no tile covers them.

Worked on the toy, rank 0, BLOCK_M = 16: ids by slot (0 1 | 1 -1 | -1 -1 | 0 -1). Slot 6 (expert 0) has one slot before
it, slot 0; slot 1 (expert 1) has two, slots 0 and 6. sorted_slots = 0 6 1 2 (then 3 4 5 7), offsets = 0 2 4,
tiles = (expert 0, from 0, to 2), (expert 1, from 2, to 4), num_tiles = 2.

Up to SMALL_SLOTS one launch does it: every program compares its slots with all slots (N^2 comparisons, but no exchange
between programs). Above, two launches: counts per block of slots, then places.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from epmoe.fused_triton.kernels._checks import need, need_dtype, power_of_two
from epmoe.fused_triton.kernels._launch import launch, pdl_start_next, pdl_wait

SMALL_SLOTS = 8192
_BLOCK = 256  # slots of a program on the large path, up to _BLOCKS of them; then four times as many
_BLOCKS = 256
_LANES = 16384  # (slot, expert) or (block, expert) pairs looked at at once there
_INT32_MAX = 2**31 - 1
MAX_EXPERTS = _INT32_MAX // SMALL_SLOTS - 1  # (expert, slot) is one int32 there


@dataclass(frozen=True)
class ExpertTiles:
    """Device-side work list of the grouped GEMMs.

    Attributes:
        offsets: [E_local + 1] int32; expert e has the sorted positions offsets[e] to offsets[e + 1].
        sorted_slots: [N] int32, slots in expert-major order; slots without a local expert come last.
        tiles: [max_tiles, 4] int32 (expert, first position, end of the expert's positions, num_tiles).
        num_tiles: [1] int32; from there on only the last number of an entry is defined.
        tile_rows: rows of a tile.
        counts: [blocks, bins] int32 scratch of the large path.
    """

    offsets: Tensor
    sorted_slots: Tensor
    tiles: Tensor
    num_tiles: Tensor
    tile_rows: int
    counts: Tensor


def max_tiles(slots: int, local_experts: int, tile_rows: int) -> int:
    """The most tiles that `slots` assignments can need, each active expert rounding up once.

    17 slots on 9 experts, tiles of 16 rows: 9 (eight experts with one slot, one with nine).
    """
    active = min(slots, local_experts)
    return min(slots, (slots + active * (tile_rows - 1)) // tile_rows)


def _block(slots: int) -> int:
    """Slots of a program on the large path: each reads the counts of all blocks, so there must not be many."""
    return _BLOCK if slots <= _BLOCK * _BLOCKS else 4 * _BLOCK


def _bins(local_experts: int) -> int:
    return power_of_two(local_experts + 1, 64)


def make_tiles(
    slots: int,
    local_experts: int,
    tile_rows: int,
    device: torch.device | str,
    empty: Callable[..., Tensor] = torch.empty,
) -> ExpertTiles:
    """The work list for `slots` = R * K received slots, allocated by `empty`, with the arguments of `torch.empty`."""
    need(
        slots <= _INT32_MAX,
        f"{slots} slots do not fit int32: lower the capacity below {_INT32_MAX} / K / EP",
    )
    need(local_experts >= 0, f"local_experts={local_experts}: must not be negative")

    def ints(*shape: int) -> Tensor:
        return empty(shape, dtype=torch.int32, device=device)

    blocks = -(-slots // _block(slots)) if slots > SMALL_SLOTS else 0
    return ExpertTiles(
        offsets=ints(local_experts + 1),
        sorted_slots=ints(slots),
        tiles=ints(max(1, max_tiles(slots, local_experts, tile_rows)), 4),
        num_tiles=ints(1),
        tile_rows=tile_rows,
        counts=ints(blocks, _bins(local_experts)),
    )


@triton.jit
def slot_experts(
    ids_ptr,
    slots,
    N,
    E_LOCAL: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Local expert of each slot, E_LOCAL for none. Slots 0 1 2 3 of the toy on rank 0: 0 1 1 2."""
    row = (slots // K).to(tl.int64)
    ids = tl.load(ids_ptr + row * WORDS + slots % K, mask=slots < N, other=-1)
    return tl.where((ids >= 0) & (ids < E_LOCAL), ids, E_LOCAL)


# --8<-- [start:tiles]
@triton.jit
def write_tiles(
    counts, offsets_ptr, tiles_ptr, num_tiles_ptr, max_entries, E_LOCAL: tl.constexpr, BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Offsets and tiles from the counts per expert. Counts (2, 2): offsets 0 2 4, tiles (0, 0, 2) and (1, 2, 4)."""
    offs_e = tl.arange(0, BINS)
    counts = tl.where(offs_e < E_LOCAL, counts, 0)
    end = tl.cumsum(counts, axis=0)
    start = end - counts
    tl.store(offsets_ptr + offs_e, start, mask=offs_e <= E_LOCAL)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    total = tl.sum(tiles, axis=0)
    tl.store(num_tiles_ptr, total)
    entry = tiles_ptr + (tl.cumsum(tiles, axis=0) - tiles) * 4
    for j in range(tl.max(tiles, axis=0)):
        mask = j < tiles
        tl.store(entry + j * 4, offs_e, mask=mask)
        tl.store(entry + j * 4 + 1, start + j * BLOCK_M, mask=mask)
        tl.store(entry + j * 4 + 2, end, mask=mask)
    # the length goes into every entry: a GEMM program learns it from the entry it needs anyway
    for j in range(0, max_entries, BINS):
        tl.store(tiles_ptr + (j + offs_e) * 4 + 3, total, mask=j + offs_e < max_entries)


# --8<-- [end:tiles]


# --8<-- [start:group]
@triton.jit(do_not_specialize=["PROGRAMS", "max_entries"])
def _group_kernel(
    ids_ptr, offsets_ptr, sorted_ptr, tiles_ptr, num_tiles_ptr, N, PROGRAMS, max_entries,
    E_LOCAL: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, BINS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The last program counts experts and lists tiles; program p places slots p * BLOCK_S on. Slot 6: place 1."""
    pdl_wait(PDL)
    pdl_start_next(PDL)
    offs_n = tl.arange(0, BLOCK_N)
    if tl.program_id(0) == PROGRAMS:
        counts = tl.zeros([BINS], tl.int32)
        offs_c = tl.arange(0, BLOCK_C)
        for n in range(0, N, BLOCK_C):
            expert = slot_experts(ids_ptr, n + offs_c, N, E_LOCAL, K, WORDS)
            counts += tl.histogram(expert, BINS)
        write_tiles(
            counts, offsets_ptr, tiles_ptr, num_tiles_ptr, max_entries, E_LOCAL, BINS, BLOCK_M
        )
    else:
        # (expert, slot) as one number: one comparison says which of two slots stands first
        slots = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
        mine = slot_experts(ids_ptr, slots, N, E_LOCAL, K, WORDS) * MOST + slots
        place = tl.zeros([BLOCK_S], tl.int32)
        for n in range(0, N, BLOCK_N):
            others = n + offs_n
            expert = slot_experts(ids_ptr, others, N, E_LOCAL, K, WORDS)
            key = tl.where(others < N, expert * MOST + others, 0x7FFFFFFF)
            place += tl.sum((key[None, :] < mine[:, None]).to(tl.int32), axis=1)
        tl.store(sorted_ptr + place, slots, mask=slots < N)


# --8<-- [end:group]


@triton.jit
def _count_kernel(
    ids_ptr, counts_ptr, N, E_LOCAL: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr,
    BINS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Slots per expert of one block. Blocks of 4 slots, rank 0 of the toy: counts (1, 2, 1), then (1, 0, 3)."""
    pdl_wait(PDL)
    pdl_start_next(PDL)
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = slot_experts(ids_ptr, slots, N, E_LOCAL, K, WORDS)
    counts = tl.histogram(expert, BINS)
    # slots past the end fell into the bin of "no expert"
    past = tl.maximum(tl.program_id(0) * BLOCK + BLOCK - N, 0)
    offs_e = tl.arange(0, BINS)
    counts -= tl.where(offs_e == E_LOCAL, past, 0)
    tl.store(counts_ptr + tl.program_id(0) * BINS + offs_e, counts)


@triton.jit(do_not_specialize=["BLOCKS", "max_entries"])
def _place_kernel(
    ids_ptr, counts_ptr, offsets_ptr, sorted_ptr, tiles_ptr, num_tiles_ptr, N, BLOCKS, max_entries,
    E_LOCAL: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, BINS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Place the slots of one block: behind smaller experts, behind the same expert in earlier blocks, in slot order.

    Blocks of 4 slots: block 1 starts expert 0 at 0 + 1 and expert 1 at 2 + 2; slot 6 goes to place 1.
    """
    pdl_wait(PDL)
    pdl_start_next(PDL)
    offs_e = tl.arange(0, BINS)
    offs_b = tl.arange(0, ROWS)
    block = tl.program_id(0)
    total = tl.zeros([BINS], tl.int32)
    earlier = tl.zeros([BINS], tl.int32)
    for b in range(0, BLOCKS, ROWS):
        offs = (b + offs_b)[:, None] * BINS + offs_e[None, :]
        counts = tl.load(counts_ptr + offs, mask=(b + offs_b)[:, None] < BLOCKS, other=0)
        total += tl.sum(counts, axis=0)
        earlier += tl.sum(tl.where((b + offs_b)[:, None] < block, counts, 0), axis=0)
    if block == 0:
        write_tiles(
            total, offsets_ptr, tiles_ptr, num_tiles_ptr, max_entries, E_LOCAL, BINS, BLOCK_M
        )
    place_E = tl.cumsum(total, axis=0) - total + earlier
    lanes = tl.arange(0, SUB)
    for s in range(0, BLOCK, SUB):
        slots = block * BLOCK + s + lanes
        expert = slot_experts(ids_ptr, slots, N, E_LOCAL, K, WORDS)
        mine = expert[:, None] == offs_e[None, :]
        base = tl.sum(tl.where(mine, place_E[None, :], 0), axis=1)
        same = (expert[:, None] == expert[None, :]) & (lanes[None, :] < lanes[:, None])
        tl.store(sorted_ptr + base + tl.sum(same.to(tl.int32), axis=1), slots, mask=slots < N)
        place_E += tl.sum(mine.to(tl.int32), axis=0)


def group_slots(
    slots_RJ: Tensor, local_experts: int, out: ExpertTiles, *, pdl: bool = False
) -> ExpertTiles:
    """Fill `out` from the ids in received rows; every entry that a tile covers is written, on any input.

    Args:
        slots_RJ: [R, J] int32 local experts, rows any stride apart; ids outside [0, local_experts) count as -1.
        local_experts: E_local.
        out: from `make_tiles(R * J, local_experts, tile_rows, device)`.
    """
    need_dtype("slots", slots_RJ, torch.int32)
    slots = slots_RJ.numel()
    need(
        out.sorted_slots.shape[0] == slots and out.offsets.shape[0] == local_experts + 1,
        f"work list was made for {out.sorted_slots.shape[0]} slots: call make_tiles({slots}, {local_experts}, ...)",
    )
    need(
        local_experts <= MAX_EXPERTS,
        f"local_experts={local_experts}: at most {MAX_EXPERTS} fit the sort keys",
    )
    if out.counts.shape[0] == 0:
        _group_few(slots_RJ, local_experts, out, slots, pdl)
    else:
        _group_many(slots_RJ, local_experts, out, slots, pdl)
    return out


def _id_places(slots_RJ: Tensor, local_experts: int) -> dict:
    places = {"K": slots_RJ.shape[1], "WORDS": slots_RJ.stride(0)}
    return places | {"E_LOCAL": local_experts, "BINS": _bins(local_experts)}


def _group_few(
    slots_RJ: Tensor, local_experts: int, out: ExpertTiles, slots: int, pdl: bool
) -> None:
    """One launch: a program per 16 slots, and one that counts."""
    programs = -(-slots // 16)
    # ids lie far apart (a row each): many loads at once, since a loop would wait for each round
    launch(
        _group_kernel, (programs + 1,), slots_RJ, out.offsets, out.sorted_slots, out.tiles, out.num_tiles,
        slots, programs, out.tiles.shape[0], **_id_places(slots_RJ, local_experts), BLOCK_M=out.tile_rows, BLOCK_S=16,
        BLOCK_N=power_of_two(min(slots, 2048), 16), BLOCK_C=power_of_two(min(slots, 4096), 16), MOST=SMALL_SLOTS,
        num_warps=4 if slots <= 512 else 8, pdl=pdl,
    )  # fmt: skip


def _group_many(
    slots_RJ: Tensor, local_experts: int, out: ExpertTiles, slots: int, pdl: bool
) -> None:
    """Two launches: counts per block of slots, then places."""
    blocks, block, ids = out.counts.shape[0], _block(slots), _id_places(slots_RJ, local_experts)
    lanes = max(1, _LANES // ids["BINS"])
    launch(
        _count_kernel, (blocks,), slots_RJ, out.counts, slots, **ids, BLOCK=block, num_warps=4, pdl=pdl
    )  # fmt: skip
    launch(
        _place_kernel, (blocks,), slots_RJ, out.counts, out.offsets, out.sorted_slots, out.tiles, out.num_tiles,
        slots, blocks, out.tiles.shape[0], **ids, BLOCK_M=out.tile_rows, BLOCK=block,
        SUB=min(block, max(16, lanes)), ROWS=lanes, num_warps=8, pdl=pdl,
    )  # fmt: skip
