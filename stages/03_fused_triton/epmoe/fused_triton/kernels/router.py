"""Router: logits of a token become K expert ids and K float32 weights, in the registers of one program.

K rounds of two 32-bit reductions each (a warp reduces int32 in one instruction): the maximum of an order-preserving
integer of the score, then the lowest id that has it. Weights are recomputed from the K chosen logits at the end, which
needs no reduction over experts. Softmax compares logits: the order of the probabilities, without their rounding. NaN
sorts above everything, as in torch, so the first round sees whether a token has one: its weights are all NaN then.

Worked on the toy: token 1 has logits (-9, 1.0986, 0, -9). The keys order the experts 1, 2, 0, 3 (0 before 3: a tie);
ids (1, 2); softmax over the two is (0.75, 0.25).

Sources: the rules of Mixtral (arXiv:2401.04088) and DeepSeek-V3 (arXiv:2412.19437, 2.1.2), as `epmoe.core.routing`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from epmoe.core.routing import RouterConfig
from epmoe.fused_triton.kernels._checks import (
    FLOATS,
    need,
    need_dense_rows,
    need_dtype,
    need_shape,
    power_of_two,
)
from epmoe.fused_triton.kernels._launch import launch, pdl_start_next, pdl_wait

MAX_TOPK = 32
MAX_EXPERTS = 4096


def check_router(config: RouterConfig, experts: int, topk: int) -> None:
    """Raise InputError where the kernel cannot serve these sizes."""
    config.check(experts, topk)
    need(topk <= MAX_TOPK, f"topk={topk}: this router chooses at most {MAX_TOPK} experts")
    need(experts <= MAX_EXPERTS, f"experts={experts}: this router reads at most {MAX_EXPERTS}")


def compile_time_rule(config: RouterConfig, experts: int, topk: int, has_bias: bool) -> dict:
    """Compile-time arguments of `select_experts`."""
    return {
        "E": experts,
        "K": topk,
        "GROUPS": config.groups,
        "TOPK_GROUPS": config.topk_groups,
        "SIGMOID": config.scoring == "sigmoid",
        "HAS_BIAS": has_bias,
        "RENORM": config.renormalize,
        "SCALE": float(config.scale),
        "BLOCK_G": power_of_two(config.groups),
        "BLOCK_P": power_of_two(experts // config.groups),
        "BLOCK_K": power_of_two(topk),
    }


LOWEST = tl.constexpr(-2147483648)
NAN_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def order_key(score):
    """An int32 that orders like the score, and above LOWEST: NaN > inf > 1.0 > 0.5 > 0.0 = -0.0 > -1.0 > -inf."""
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 equals 0.0
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(score == score, ordered, NAN_KEY)


@triton.jit
def score_of_key(key):
    """The score again: -1.0 of -1065353217, its key. The bits of NAN_KEY are themselves a NaN."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def open_groups(
    choice, mask, GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr
):
    """[BLOCK_G] true for the best TOPK_GROUPS groups. Groups (3, 1), (2, 2.5): sums 4 and 4.5.

    A group with a NaN sums to NaN, so it is opened and its NaN is found.
    """
    lanes = tl.broadcast_to(tl.arange(0, choice.shape[1])[None, :], choice.shape)
    scored = tl.where(mask, order_key(choice), LOWEST)
    first = tl.max(scored, axis=1)
    first_lane = tl.min(tl.where(scored == first[:, None], lanes, choice.shape[1]), axis=1)
    second = tl.max(tl.where(lanes == first_lane[:, None], LOWEST, scored), axis=1)
    # a group of one expert scores that expert alone
    total = score_of_key(first) + tl.where(second == LOWEST, 0.0, score_of_key(second))
    offs_g = tl.arange(0, BLOCK_G)
    key = tl.where(offs_g < GROUPS, order_key(total), LOWEST)
    opened = offs_g < 0
    for _ in tl.static_range(TOPK_GROUPS):
        best = tl.min(tl.where(key == tl.max(key, axis=0), offs_g, BLOCK_G), axis=0)
        opened = opened | (offs_g == best)
        key = tl.where(offs_g == best, LOWEST, key)
    return opened


@triton.jit
def select_experts(
    logits_ptr,
    bias_ptr,
    live,
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """ids [BLOCK_K] int32 and weights [BLOCK_K] float32 of one token's logits; (1, 2) and (0.75, 0.25) for token 1.

    Lanes at and after K hold id -1 and nothing of worth. Nothing is read when `live` is false.
    """
    offs_g = tl.arange(0, BLOCK_G)[:, None]
    offs_p = tl.arange(0, BLOCK_P)[None, :]
    PER_GROUP: tl.constexpr = E // GROUPS
    expert = offs_g * PER_GROUP + offs_p
    mask = (offs_g < GROUPS) & (offs_p < PER_GROUP)
    logits = tl.load(logits_ptr + expert, mask=mask & live, other=float("-inf")).to(tl.float32)
    top_logit = tl.max(tl.max(logits, axis=1), axis=0)
    total = 1.0
    choice = logits
    if SIGMOID:
        choice = tl.sigmoid(logits)
    elif (not RENORM) or HAS_BIAS or GROUPS > 1:
        exps = tl.where(mask, tl.exp(logits - top_logit), 0.0)
        total = tl.sum(tl.sum(exps, axis=1), axis=0)
        if HAS_BIAS or GROUPS > 1:
            choice = exps / total
    if HAS_BIAS:
        choice += tl.load(bias_ptr + expert, mask=mask & live, other=0.0).to(tl.float32)
    if GROUPS > 1:
        # experts of closed groups leave the race, they do not merely score low
        mask = mask & open_groups(choice, mask, GROUPS, TOPK_GROUPS, BLOCK_G)[:, None]
    rank = choice if SIGMOID or HAS_BIAS else logits
    key = tl.where(mask, order_key(rank), LOWEST)
    offs_k = tl.arange(0, BLOCK_K)
    ids = tl.full([BLOCK_K], -1, tl.int32)
    for k in tl.static_range(K):
        best = tl.max(tl.max(key, axis=1), axis=0)
        if k == 0:
            broken = best == NAN_KEY
        best_id = tl.min(tl.min(tl.where(key == best, expert, E), axis=1), axis=0)
        ids = tl.where(offs_k == k, best_id, ids)
        key = tl.where(expert == best_id, LOWEST, key)
    chosen = tl.load(logits_ptr + ids, mask=(offs_k < K) & live, other=float("-inf")).to(tl.float32)
    weights = tl.sigmoid(chosen) if SIGMOID else tl.exp(chosen - top_logit) / total
    weights = tl.where(offs_k < K, weights, 0.0)
    if RENORM:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    return ids, tl.where(broken, float("nan"), weights * SCALE)


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    stride_lt,
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORM: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token. Token 1 of the toy: ids (1, 2), weights (0.75, 0.25)."""
    t = tl.program_id(0).to(tl.int64)
    pdl_wait(PDL)
    pdl_start_next(PDL)
    ids, weights = select_experts(
        logits_ptr + t * stride_lt, bias_ptr, t >= 0, E, K, GROUPS, TOPK_GROUPS, SIGMOID, HAS_BIAS, RENORM, SCALE,
        BLOCK_G, BLOCK_P, BLOCK_K,
    )  # fmt: skip
    offs_k = tl.arange(0, BLOCK_K)
    tl.store(ids_ptr + t * K + offs_k, ids, mask=offs_k < K)
    tl.store(weights_ptr + t * K + offs_k, weights, mask=offs_k < K)


def check_logits(logits_TE: Tensor, bias_E: Tensor | None) -> None:
    """Raise InputError unless logits are [T, E] floats with dense rows and the bias, if any, is [E] float32."""
    need(logits_TE.dim() == 2, f"logits have shape {tuple(logits_TE.shape)}: expected [T, E]")
    need_dtype("logits", logits_TE, *FLOATS)
    need_dense_rows("logits", logits_TE)
    if bias_E is not None:
        need_shape("bias", bias_E, (logits_TE.shape[1],))
        need_dtype("bias", bias_E, torch.float32)
        need(bias_E.is_contiguous(), "bias is strided: pass bias.contiguous()")


def route_tokens(
    logits_TE: Tensor,
    topk: int,
    config: RouterConfig,
    bias_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of every token, by the rules of `epmoe.core.routing.route`.

    Args:
        logits_TE: [T, E] float32, bfloat16 or float16; computed in float32. Rows may be strided.
        topk: K, at most 32.
        config: softmax or sigmoid, groups, renormalisation, scale.
        bias_E: [E] float32, steers the choice only.

    Returns:
        topk_ids_TK int32, best first (lowest id first among equals), and topk_weights_TK float32.

    Raises:
        InputError: sizes, shapes, dtypes or strides that the kernel does not take.
    """
    check_logits(logits_TE, bias_E)
    tokens, experts = logits_TE.shape
    check_router(config, experts, topk)
    ids_TK = torch.empty((tokens, topk), dtype=torch.int32, device=logits_TE.device)
    weights_TK = torch.empty_like(ids_TK, dtype=torch.float32)
    bias = logits_TE if bias_E is None else bias_E
    launch(
        _route_kernel, (tokens,), logits_TE, bias, ids_TK, weights_TK, logits_TE.stride(0),
        **compile_time_rule(config, experts, topk, bias_E is not None), num_warps=1,
    )  # fmt: skip
    return ids_TK, weights_TK
