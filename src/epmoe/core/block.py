"""The whole MoE block of a model: router, routed experts over all ranks, and the shared expert here.

    y_TH = routed(x_TH) + shared(x_TH)

The shared expert is replicated: every rank applies it to its own tokens, after the exchange, so it counts once for any
number of ranks. The router's scaling factor sits in the routing weights, so it counts once too, and never touches the
shared expert.

Legend: T tokens, H hidden, E experts, K experts per token.
"""

from torch import Tensor

from epmoe.core.ambient import calling, no_autocast
from epmoe.core.errors import InputError
from epmoe.core.layer import MoELayer
from epmoe.core.numerics import matmul_float32, swiglu
from epmoe.core.routing import Router
from epmoe.core.weights import ExpertWeights


class MoEBlock:
    """Router + routed experts + shared expert, on this rank's tokens."""

    def __init__(self, router: Router, layer: MoELayer, shared: ExpertWeights | None = None):
        if shared is not None and shared.experts != 1:
            raise InputError(
                f"shared holds {shared.experts} experts: expected one (widen it instead)"
            )
        self.router, self.layer, self.shared = router, layer, shared

    def __call__(self, x_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H] in x's dtype. Collective. For inference, as a layer is: without gradients."""
        with calling(x_TH.device):
            routed_TH = self.layer(x_TH, *self.router(x_TH))
            if self.shared is None:
                return routed_TH
            return (routed_TH.float() + shared_expert(x_TH, self.shared)).to(x_TH.dtype)


def shared_expert(x_TH: Tensor, shared: ExpertWeights) -> Tensor:
    """The shared expert on every token: [T, H] float32."""
    with no_autocast(x_TH.device):
        h_TI = swiglu(matmul_float32(x_TH, shared.w13_E2IH[0].T)).to(x_TH.dtype)
        return matmul_float32(h_TI, shared.w2_EHI[0].T)
