"""Launchers of the grouped GEMMs: check, prepare tensor descriptors, launch. The kernels are in `gemm_kernels`."""

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from epmoe.core.split import Rows
from epmoe.fused_triton.kernels._checks import need, need_contiguous, need_dtype, need_shape
from epmoe.fused_triton.kernels._launch import launch, multiprocessors
from epmoe.fused_triton.kernels.config import GemmConfig
from epmoe.fused_triton.kernels.dispatch import gather_rows
from epmoe.fused_triton.kernels.gemm_kernels import down_kernel, gate_up_kernel
from epmoe.fused_triton.kernels.metadata import ExpertTiles, max_tiles
from epmoe.fused_triton.weight_layout import as_rows

_WIDTH_MESSAGE = "block_r={} needs rows of a multiple of 16 bytes: use block_r=0 for width {}"


def _programs(
    tiles: ExpertTiles, local_experts: int, columns: int, ranks: int, config: GemmConfig
) -> int:
    """Programs to start: for every tile that a fair share of the rows can need; the kernel's loop takes the rest."""
    slots = tiles.sorted_slots.shape[0]
    share = -(-slots // max(1, ranks))
    likely = max_tiles(share + share // 4, local_experts, tiles.tile_rows)
    items = min(max_tiles(slots, local_experts, tiles.tile_rows), max(1, likely)) * columns
    if config.waves == 0:
        return items
    return min(items, config.waves * multiprocessors(tiles.offsets.device))


def _matrix(flat: Tensor, block: int, config: GemmConfig, tma: bool) -> Tensor | TensorDescriptor:
    """[rows, width], dense; through a tensor descriptor where the config asks for one and the shape allows it."""
    aligned = flat.stride(0) * flat.itemsize % 16 == 0 and flat.data_ptr() % 16 == 0
    if not (tma and aligned):
        return flat
    return TensorDescriptor.from_tensor(flat, [block, config.block_k])


def _row_arguments(
    rows: Tensor, config: GemmConfig
) -> tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor]:
    """Expert-major rows for the first BLOCK_M and the last BLOCK_R rows of a tile."""
    main = _matrix(rows, config.block_m, config, config.tma_rows)
    if config.block_r == 0:
        return main, main
    need(isinstance(main, TensorDescriptor), _WIDTH_MESSAGE.format(config.block_r, rows.shape[-1]))
    return main, _matrix(rows, config.block_r, config, True)


def gate_up(
    rows: Rows, w13_E2IH: Tensor, tiles: ExpertTiles, h_NI: Tensor, config: GemmConfig,
    *, ranks: int = 1, scratch: Tensor | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """Write h_NI [N, I], the SwiGLU activations of all local assignments, at their expert-major positions.

    Args:
        rows: received rows, read in place.
        w13_E2IH: [E_local, 2I, H], gate rows first, the dtype of the rows; any layout of `weight_layout`.
        tiles: from `group_slots`.
        h_NI: [N, I] of the same dtype; positions at and after offsets[-1] stay unwritten.
        ranks: EP; sizes the grid for this rank's fair share (any share is computed).
        scratch: contiguous, at least N * H values of the rows' dtype, any dtype (the buffer that `down` will write
            will do). With tma_rows the rows are first copied there in expert-major order; None allocates.
    """
    experts, double, hidden = w13_E2IH.shape
    slots = tiles.sorted_slots.shape[0]
    _check_gemm(tiles, config, experts, h=h_NI)
    need_dtype("w13", w13_E2IH, rows.x_RH.dtype)
    need_dtype("h", h_NI, rows.x_RH.dtype)
    need_shape("x", rows.x_RH, (len(rows.slots_RJ), hidden))
    need_shape("h", h_NI, (slots, double // 2))
    if experts == 0 or slots == 0:
        return
    flat, apart = as_rows("w13", w13_E2IH)
    w = _matrix(flat, config.block_n, config, config.tma)
    columns = -(-double // 2 // config.block_n)
    x = rest = rows.x_RH
    if config.tma_rows and hidden * x.itemsize % 16 == 0:
        x, rest = _row_arguments(gather_rows(rows, tiles, scratch, pdl=pdl), config)
    else:
        need(config.block_r == 0, _WIDTH_MESSAGE.format(config.block_r, hidden))
    launch(
        gate_up_kernel, (_programs(tiles, experts, columns, ranks, config),),
        x, rest, w, h_NI, tiles.sorted_slots, tiles.tiles,
        H=hidden, I=double // 2, K=rows.slots_RJ.shape[1], ITEMS=rows.x_RH.stride(0), EXPERT_ROWS=apart,
        TMA_ROWS=isinstance(x, TensorDescriptor), **compile_time(config, isinstance(w, TensorDescriptor)), pdl=pdl,
    )  # fmt: skip


def down(
    rows: Rows, h_NI: Tensor, w2_EHI: Tensor, tiles: ExpertTiles, out_NH: Tensor, config: GemmConfig,
    *, ranks: int = 1, pdl: bool = False,
) -> None:  # fmt: skip
    """Write out_NH [N, H]: weight times expert output, at the slot of every local assignment; other rows untouched.

    Args:
        rows: received rows, for the routing weights.
        h_NI: from `gate_up`.
        w2_EHI: [E_local, H, I]; any layout of `weight_layout`.
        out_NH: float32, or the dtype of h (rounded after the weight).
        ranks, pdl: as in `gate_up`. With pdl the kernel before this one must be `gate_up` on the same tiles.
    """
    experts, hidden, inner = w2_EHI.shape
    slots = tiles.sorted_slots.shape[0]
    _check_gemm(tiles, config, experts, h=h_NI, out=out_NH)
    need_dtype("w2", w2_EHI, h_NI.dtype)
    need_dtype("out", out_NH, torch.float32, h_NI.dtype)
    need_shape("h", h_NI, (slots, inner))
    need_shape("out", out_NH, (slots, hidden))
    need_shape("weights", rows.weights_RJ, tuple(rows.slots_RJ.shape))
    if experts == 0 or slots == 0:
        return
    flat, apart = as_rows("w2", w2_EHI)
    w = _matrix(flat, config.block_n, config, config.tma)
    h, rest = _row_arguments(h_NI, config)
    columns = -(-hidden // config.block_n)
    launch(
        down_kernel, (_programs(tiles, experts, columns, ranks, config),),
        h, rest, w, rows.weights_RJ, out_NH, tiles.sorted_slots, tiles.tiles,
        H=hidden, I=inner, K=rows.slots_RJ.shape[1], WORDS=rows.weights_RJ.stride(0), EXPERT_ROWS=apart,
        TMA_ROWS=isinstance(h, TensorDescriptor), **compile_time(config, isinstance(w, TensorDescriptor)), pdl=pdl,
    )  # fmt: skip


def _check_gemm(tiles: ExpertTiles, config: GemmConfig, experts: int, **tensors: Tensor) -> None:
    need_contiguous(**tensors)
    need(
        tiles.tile_rows == config.tile_rows,
        f"the tile list has tile_rows={tiles.tile_rows}, the config {config.tile_rows}: use one value",
    )
    need(
        tiles.offsets.shape[0] == experts + 1,
        f"the tile list is for {tiles.offsets.shape[0] - 1} experts, the weights hold {experts}",
    )


def compile_time(config: GemmConfig, tma: bool) -> dict:
    """Compile-time arguments and launch options of a config; `tma` says whether the weights have a descriptor."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_R": config.block_r,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "SWAP": config.swap_ab,
        "TMA": tma,
        "num_stages": config.num_stages,
        "num_warps": config.num_warps,
    }
