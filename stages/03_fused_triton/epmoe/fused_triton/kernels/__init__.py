"""The Triton kernels of the fused stage: pure functions on tensors, each with a launcher that checks, then launches.

The chain of one layer call, in order; every arrow is a buffer of fixed size, no host value is read anywhere:

    logits, x --route_and_pack--> send ==all_to_all==> recv --group_slots--> tiles
    recv, tiles --gate_up--> h --down--> rows --reduce_slots--> ret ==all_to_all==> back --merge_ranks--> y

The toy routing that all docstrings here work through (2 ranks, 4 experts, 4 tokens, K = 2; rank 0 owns experts 0 and 1,
rank 1 owns 2 and 3; every token weighs its first expert 0.75 and its second 0.25):

    rank 0: token 0 names (0, 1), token 1 names (1, 2)
    rank 1: token 2 names (2, 3), token 3 names (0, 3)

    rank 0 sends to itself ids (0, 1), (1, -1) and to rank 1 ids (-1, -1), (-1, 0)
    rank 0 receives 4 rows with ids (0, 1), (1, -1), (-1, -1), (0, -1): slots 0 to 7, of which 0 1 2 6 hold work
    expert-major, stable: expert 0 has slots 0 6, expert 1 has slots 1 2; offsets 0 2 4

Legend: T tokens of this rank, C capacity in tokens, H hidden, I intermediate, E experts, K experts per token, EP ranks,
R = EP * C received rows, N = R * K slots (slot = row * K + k), S tile of BLOCK_M expert-major positions.
"""

from epmoe.fused_triton.kernels._launch import pdl_supported
from epmoe.fused_triton.kernels.config import (
    DeviceLimits,
    GemmConfig,
    LayerConfig,
    choose,
    config_space,
)
from epmoe.fused_triton.kernels.dispatch import gather_rows, prepare_rows, route_and_pack
from epmoe.fused_triton.kernels.gemm import down, gate_up
from epmoe.fused_triton.kernels.metadata import ExpertTiles, group_slots, make_tiles, max_tiles
from epmoe.fused_triton.kernels.reduce import merge_ranks, reduce_slots
from epmoe.fused_triton.kernels.router import route_tokens

__all__ = [
    "DeviceLimits",
    "ExpertTiles",
    "GemmConfig",
    "LayerConfig",
    "choose",
    "config_space",
    "down",
    "gate_up",
    "gather_rows",
    "group_slots",
    "make_tiles",
    "max_tiles",
    "merge_ranks",
    "pdl_supported",
    "prepare_rows",
    "reduce_slots",
    "route_and_pack",
    "route_tokens",
]
