"""Calls that make a layer ready: whatever compiles or allocates at a first call has done so afterwards.

Legend: T tokens on this rank, H hidden, K experts per token, E experts.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from epmoe.core.layer import MoELayer


def warm_up(layer: "MoELayer") -> None:
    """What `MoELayer.warmup` does. Ranks may name different capacities, their experts differ: all run all of them."""
    group, counter = layer.spec.group, layer.counter
    named = group.all_gather_objects(layer.warmup_capacities())
    layer.counter = None  # nobody's tokens
    try:
        for capacity in sorted(set().union(*named)):
            _call(layer, capacity)
    finally:
        layer.counter = counter
    group.barrier()


def _call(layer: "MoELayer", tokens: int) -> None:
    """`tokens` tokens on every rank, with ids and, where the layer fuses its router, from logits."""
    spec = layer.spec
    shape, device = spec.shape, spec.device
    x_TH = torch.zeros(tokens, shape.hidden, dtype=spec.dtype, device=device)
    ids_TK = torch.arange(shape.topk, device=device, dtype=torch.int32).repeat(tokens, 1)
    weights_TK = torch.ones(tokens, shape.topk, dtype=torch.float32, device=device)
    layer(x_TH, ids_TK, weights_TK, max_tokens=tokens)
    if layer.fuses_router:
        logits_TE = torch.zeros(tokens, shape.experts, dtype=torch.float32, device=device)
        for bias_E in (None, torch.zeros_like(logits_TE[0])):  # kernels differ in it
            layer.from_logits(x_TH, logits_TE, bias_E, max_tokens=tokens)
