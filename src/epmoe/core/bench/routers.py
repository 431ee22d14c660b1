"""The router that subjects share: from logits to ids and weights, inside their timed region.

The same kernel for everybody is what makes subjects comparable. A stage's kernels are reached through the registry, as
the stage itself is.
"""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from epmoe.core import registry
from epmoe.core.errors import EpmoeError, InputError
from epmoe.core.routing import route
from epmoe.core.shape import MoEShape

Router = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]


def make_router(name: str, shape: MoEShape, device: torch.device) -> tuple[Router, str]:
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
        try:
            return _stage_router(stage, shape)
        except EpmoeError:
            continue  # has no router of its own
    return make_router("torch", shape, device)


def _stage_router(stage: str, shape: MoEShape) -> tuple[Router, str]:
    factory = registry.load(stage).factory
    package = factory.__module__.rsplit(".", 1)[0]
    try:
        kernels = import_module(f"{package}.kernels")
        config = shape.router
        rule = kernels.RouterRule(
            sigmoid=config.scoring == "sigmoid",
            renormalize=config.renormalize,
            groups=config.groups,
            topk_groups=config.topk_groups,
            scale=config.scale,
        )
        kernel = kernels.route_tokens
    except (ImportError, AttributeError) as error:
        raise InputError(f"router={stage!r}: this stage offers no router kernel: {error}") from None
    return (
        lambda logits_TE, bias_E: kernel(logits_TE, shape.topk, rule, bias_E)
    ), f"{stage} kernel"
