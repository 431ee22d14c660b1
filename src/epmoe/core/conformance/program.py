"""What runs on the ranks, beyond `verify.run_case`: plain functions of a group and a case, that return plain values.

Legend: T tokens, H hidden, K experts per token, E experts.
"""

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from epmoe.core import ambient
from epmoe.core.block import MoEBlock, shared_expert
from epmoe.core.cases import Case
from epmoe.core.errors import EpmoeError
from epmoe.core.groups import EPGroup
from epmoe.core.layer import MoELayer, build
from epmoe.core.routing import Router, RouterConfig, route
from epmoe.core.verify import (
    Row,
    bring,
    build_case,
    call_once,
    chosen_rows,
    differ,
    relative_error,
    worst_row,
)
from epmoe.core.weights import ExpertWeights, random_weights
from epmoe.reference.oracle import oracle


def caught(action: Callable[[], object]) -> str:
    """ "Type: message" of what `action` raises on purpose, "" when it does not."""
    try:
        action()
    except EpmoeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def judge(case: Case, call: int, group: EPGroup, y_TH: Tensor) -> Row | None:
    """The worst row of one result."""
    everything = case.weights_of(range(case.shape.experts)).to(torch.float64)
    return worst_row(case, call, group.rank, y_TH, everything)


# ---- numerics


def repeats(group: EPGroup, case: Case, times: int) -> dict[str, bool]:
    """Call 0 of the case again and again: are the bits the same? And in another order, and in two halves?"""
    layer = build_case(group, case)
    x_TH, ids_TK, weights_TK = bring(group, case, 0)
    first_TH = layer(x_TH, ids_TK, weights_TK)
    again = all(not differ(first_TH, layer(x_TH, ids_TK, weights_TK)) for _ in range(times))
    order_T = torch.randperm(len(x_TH), generator=torch.Generator().manual_seed(5)).to(group.device)
    other_TH = layer(x_TH[order_T], ids_TK[order_T], weights_TK[order_T])
    half = len(x_TH) // 2
    parts = [layer(x_TH[s], ids_TK[s], weights_TK[s]) for s in (slice(half), slice(half, None))]
    layer.close()
    fresh = build_case(group, case)
    rebuilt_TH = fresh(x_TH, ids_TK, weights_TK)
    fresh.close()
    return {
        "repeated": again,
        "rebuilt": not differ(first_TH, rebuilt_TH),
        "permuted": not differ(first_TH[order_T], other_TH),
        "halved": not differ(first_TH, torch.cat(parts)),
    }


def neighbours(group: EPGroup, case: Case, other: str) -> float:
    """Call 0 of the case by its stage and by `other`: the largest difference of a row, relative to its terms."""
    ids_TK, weights_TK = case.routing(0, group.rank)
    chosen = chosen_rows(len(ids_TK), case.rows)

    def output(stage: str) -> Tensor:
        layer = build_case(group, replace(case, stage=stage))
        y_TH = layer(*bring(group, case, 0)).cpu().double()
        layer.close()
        return y_TH[chosen]

    own_TH, other_TH = output(case.stage), output(other)
    everything = case.weights_of(range(case.shape.experts)).to(torch.float64)
    x_TH = case.tokens_of(0, group.rank)[chosen]
    terms_T = oracle(x_TH, ids_TK[chosen], weights_TK[chosen], everything, torch.float64).terms_T
    return max(relative_error(own_TH, other_TH, terms_T).tolist(), default=0.0)


def alternating_sum(group: EPGroup, case: Case) -> float:
    """Every token names all experts; expert e answers +100 or -100 exactly, with weight 1/K + e/1000.

    Returns the largest error in units of one rounding of the result to the case's dtype.
    """
    K = case.shape.topk
    signs_E = 1 - 2 * (torch.arange(case.shape.experts) % 2)
    layer = _loud_layer(group, case, 100.0 * signs_E)
    gates_K = 1 / K + torch.arange(K) / 1000
    y_TH = _call_loud(group, layer, case, gates_K)
    wanted = float((gates_K.double() * 100 * signs_E).sum())
    rounding = abs(wanted) * torch.finfo(case.dtype).eps / 2
    return float((y_TH.double() - wanted).abs().max()) / rounding


def loud_expert(group: EPGroup, case: Case, loudness: float, gate: float) -> list[float]:
    """Every token names K experts that answer `loudness`, with weight `gate`: smallest and largest result."""
    layer = _loud_layer(group, case, torch.full((case.shape.experts,), loudness))
    y_TH = _call_loud(group, layer, case, torch.full((case.shape.topk,), gate))
    return [float(y_TH.min()), float(y_TH.max())]


def loud_up(group: EPGroup, case: Case) -> list[float]:
    """Every token meets an up of 131072 and a gate of 1/4, whose product is weighed 1/16: smallest, largest result."""
    twos_E = torch.full((case.shape.experts,), 2.0)
    layer = _loud_layer(group, case, twos_E, gate=2**-10, up=512.0)
    y_TH = _call_loud(group, layer, case, torch.ones(case.shape.topk), x=256.0)
    return [float(y_TH.min()), float(y_TH.max())]


def _loud_layer(
    group: EPGroup, case: Case, loudness_E: Tensor, gate: float = 32.0, up: float = 1.0
) -> MoELayer:
    """Experts that answer a constant to x = (1, 0, 0, ...): silu(gate) * up, here 32, times loudness / 32."""
    H, I = case.shape.hidden, case.shape.intermediate
    placement = case.placed()
    mine = list(placement.experts_of(group.rank))
    w13_E2IH = torch.zeros(len(mine), 2 * I, H)
    w13_E2IH[:, 0, 0], w13_E2IH[:, I, 0] = gate, up
    w2_EHI = torch.zeros(len(mine), H, I)
    w2_EHI[:, :, 0] = loudness_E[mine, None].float() / 32
    weights = ExpertWeights(w13_E2IH.to(case.dtype), w2_EHI.to(case.dtype)).to(group.device)
    C = case.max_tokens_per_rank
    options = dict[str, Any](case.options)
    return build(case.stage, case.shape, weights, placement, group, C, **options)


def _call_loud(
    group: EPGroup, layer: MoELayer, case: Case, gates_K: Tensor, x: float = 1.0
) -> Tensor:
    T, K = case.tokens[0][group.rank], case.shape.topk
    x_TH = torch.zeros(T, case.shape.hidden, dtype=case.dtype, device=group.device)
    x_TH[:, 0] = x
    ids_TK = torch.arange(K, dtype=torch.int32, device=group.device).repeat(T, 1)
    y_TH = layer(x_TH, ids_TK, gates_K.float().to(group.device).repeat(T, 1))
    layer.close()
    return y_TH.cpu()


def block(group: EPGroup, case: Case) -> dict[str, float]:
    """The whole block: the scaling factor and the shared expert, each counted once.

    Returns errors relative to the result: `scaled`: routed part at factor 2.5 against 2.5 times factor 1;
    `shared_alone`: with an all-zero routed part against the shared expert; `both` against routed plus shared.
    """
    shape = case.shape
    layer = build_case(group, case)
    x_TH = bring(group, case, 0)[0]
    shared = random_weights(shape, [0], case.dtype, group.device, seed=99, distinct=False)
    weight_EH = torch.randn(shape.experts, shape.hidden, generator=torch.Generator().manual_seed(3))

    def out(scale: float, with_shared: bool) -> Tensor:
        config = RouterConfig(scoring="sigmoid", renormalize=True, scale=scale)
        router = Router(weight_EH=weight_EH.to(group.device), config=config, topk=shape.topk)
        return MoEBlock(router, layer, shared if with_shared else None)(x_TH).double()

    only_shared = shared_expert(x_TH, shared).double()
    results = {
        "scaled": _apart(out(2.5, False), 2.5 * out(1.0, False)),
        "scaled_beside_shared": _apart(out(2.5, True) - only_shared, 2.5 * out(1.0, False)),
        "both": _apart(out(1.0, True), out(1.0, False) + only_shared),
        "shared_alone": _apart(out(0.0, True), only_shared),
    }
    layer.close()
    return results


def logits_of(group: EPGroup, case: Case) -> Tensor:
    """Router logits_TE of this rank for call 0 of the case, float32, on the group's device."""
    generator = torch.Generator().manual_seed(group.rank)
    size = (case.tokens[0][group.rank], case.shape.experts)
    return torch.randn(size, generator=generator, dtype=torch.float32).to(group.device)


def from_logits(group: EPGroup, case: Case) -> list[Row | None]:
    """The call that routes by itself, with and without a correction bias: the worst row of each.

    Judged against the oracle with the ids and weights of `route`, as far as the case's masked ranks leave them.
    """
    layer, shape = build_case(group, case), case.shape
    x_TH, logits_TE = bring(group, case, 0)[0], logits_of(group, case)
    bias_E = torch.linspace(-1, 1, shape.experts, device=group.device)
    everything = case.weights_of(range(shape.experts)).to(torch.float64)
    rows = []
    for bias in (None, bias_E):
        y_TH = layer.from_logits(x_TH, logits_TE, bias, max_tokens=case.max_tokens(0))
        on_cpu = None if bias is None else bias.cpu()
        routing = case.what_is_left(*route(logits_TE.cpu(), shape.router, shape.topk, on_cpu))
        rows.append(worst_row(case, 0, group.rank, y_TH, everything, routing))
    layer.close()
    return rows


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max()) if a.numel() else 0.0


# ---- life


def interleaved(group: EPGroup, *cases: Case) -> list[Row | None]:
    """Layers of different sizes alive together, called in turn; the worst row of every call."""
    layers = [build_case(group, case) for case in cases]
    rows = []
    for call in range(len(cases[0].tokens)):
        for case, layer in zip(cases, layers, strict=True):
            y_TH, _, problems = call_once(layer, bring(group, case, call))
            assert not problems, problems
            rows.append(judge(case, call, group, y_TH))
    for layer in layers:
        layer.close()
    return rows


def cycles(group: EPGroup, case: Case, times: int) -> list[tuple[int, int, int]]:
    """Build, call, close, again and again: open files, process groups and live tensors at a quarter and at the end."""
    counts = []
    for i in range(times):
        layer = build_case(group, case)
        layer(*bring(group, case, 0))
        layer.close()
        del layer
        if i in (times // 4, times - 1):
            gc.collect()
            counts.append((_open_files(), _process_groups(), _live_tensors()))
    return counts


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def _process_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0


def _live_tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def many_layers(group: EPGroup, case: Case, count: int) -> Row | None:
    """`count` layers on one group, all alive, as in a model; the worst row of all."""
    layers = [build_case(group, case) for _ in range(count)]
    rows = [judge(case, 0, group, layer(*bring(group, case, 0))) for layer in layers]
    for layer in layers:
        layer.close()
    return max((row for row in rows if row), key=lambda row: row.error, default=None)


def ends(group: EPGroup, case: Case) -> dict[str, object]:
    """Warm-up, describe, close twice, then a call."""
    layer = build_case(group, case)
    layer.warmup()
    description = layer.describe()
    y_TH = layer(*bring(group, case, 0))
    layer.close()
    layer.close()
    after = caught(lambda: layer(*bring(group, case, 0)))
    return {"describe": description, "row": judge(case, 0, group, y_TH), "after": after}


def refused_capture(group: EPGroup, case: Case) -> dict[str, object]:
    """What a stage that cannot be captured says during a capture, and whether it still works afterwards."""
    layer = build_case(group, case)
    truth = ambient.capturing
    ambient.capturing = lambda device: True
    try:
        said = caught(lambda: layer(*bring(group, case, 0)))
    finally:
        ambient.capturing = truth
    row = judge(case, 0, group, layer(*bring(group, case, 0)))
    layer.close()
    return {"said": said, "row": row}
