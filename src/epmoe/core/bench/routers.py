"""The router that subjects share: from logits to ids and weights, inside their timed region.

The same kernel for everybody is what makes subjects comparable. A stage's kernels are reached through the registry, as
the stage itself is.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from epmoe.core import registry
from epmoe.core.errors import InputError
from epmoe.core.routing import route
from epmoe.core.shape import MoEShape

Route = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]

# What a result says of a subject that is given logits, not ids. The second could fuse its router, and an ablation has
# switched that off. Before they were told apart, results called both by the first.
FUSED = "the layer's own"
UNFUSED = "torch operators of its own"


def make_router(name: str, shape: MoEShape, device: torch.device) -> tuple[Route, str]:
    """The router of subjects that need ids, and its full name.

    Args:
        name: "torch" for `epmoe.core.routing.route`; a stage whose kernels offer `route_tokens`; or "auto": on a GPU
            the last such stage, else torch. The same kernel for everybody is what makes subjects comparable.
        shape: gives the rule and K.
        device: of the logits.
    """
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return (lambda logits_TE, bias_E: route(logits_TE, shape.router, shape.topk, bias_E)), (
            "torch"
        )
    if device.type != "cuda":
        raise InputError(f"router={name!r}: stages' router kernels are for GPUs, here use 'torch'")
    if name != "auto":
        return _stage_router(name, shape)
    for stage in reversed(registry.names()):
        if _kernel_of(stage) is not None:
            return _stage_router(stage, shape)
    return make_router("torch", shape, device)


def _stage_router(stage: str, shape: MoEShape) -> tuple[Route, str]:
    kernel = _kernel_of(stage)
    if kernel is None:
        raise InputError(
            f"router={stage!r}: this stage offers no router kernel, no kernels.route_tokens"
        )
    return (
        lambda logits_TE, bias_E: kernel(logits_TE, shape.topk, shape.router, bias_E)
    ), f"{registry.resolve(stage)} kernel"


def _kernel_of(stage: str) -> Callable | None:
    """`kernels.route_tokens` of the stage's package, None where there is none."""
    found = registry.load(stage)
    maker = found.parts[0].factory if found.parts else found.factory
    package = maker.__module__.rsplit(".", 1)[0]
    if find_spec(f"{package}.kernels") is None:
        return None
    return getattr(import_module(f"{package}.kernels"), "route_tokens", None)
