"""Canonical weights, in one order everywhere: w13 holds gate first, then up.

w13_E2IH [E_local, 2I, H], w2_EHI [E_local, H, I]; an expert computes

    f(x) = w2 @ (silu(gate @ x) * (up @ x)),   gate = w13[:I], up = w13[I:]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epmoe.core.errors import InputError
from epmoe.core.shape import MoEShape


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of some experts of one layer, in slot order.

    Attributes:
        w13_E2IH: [E_local, 2I, H], gate rows first, then up rows.
        w2_EHI: [E_local, H, I], the down projection.
    """

    w13_E2IH: Tensor
    w2_EHI: Tensor

    def __post_init__(self):
        w13, w2 = self.w13_E2IH, self.w2_EHI
        if w13.dim() != 3 or w2.dim() != 3:
            raise InputError(
                f"w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)}: expected [E_local, 2I, H] and [E_local, H, I]"
            )
        experts, hidden, intermediate = w2.shape
        if tuple(w13.shape) != (experts, 2 * intermediate, hidden):
            raise InputError(
                f"w13 {tuple(w13.shape)} does not fit w2 {tuple(w2.shape)}: "
                f"expected {(experts, 2 * intermediate, hidden)}"
            )
        if w13.dtype != w2.dtype or w13.device != w2.device:
            raise InputError(
                f"w13 is {w13.dtype} on {w13.device}, w2 is {w2.dtype} on {w2.device}: both must be alike"
            )

    @property
    def experts(self) -> int:
        """E_local."""
        return self.w2_EHI.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.w2_EHI.shape[1]

    @property
    def intermediate(self) -> int:
        """I."""
        return self.w2_EHI.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.w2_EHI.dtype

    @property
    def device(self) -> torch.device:
        return self.w2_EHI.device

    def to(self, *args, **kwargs) -> "ExpertWeights":
        """As Tensor.to: another device or dtype."""
        return ExpertWeights(self.w13_E2IH.to(*args, **kwargs), self.w2_EHI.to(*args, **kwargs))


def random_weights(
    shape: MoEShape,
    experts: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    distinct: bool = True,
) -> ExpertWeights:
    """Random weights of the named global experts; any rank draws the same weights for the same expert.

    With `distinct`, expert e's down projection is scaled by e + 1, so that a row which went to a wrong expert is
    wrong by a visible factor (an identity round trip cannot see that).
    """
    pairs = [_draw_expert(shape, e, seed, distinct) for e in experts]
    empty13 = torch.empty(0, 2 * shape.intermediate, shape.hidden, dtype=torch.float32)
    empty2 = torch.empty(0, shape.hidden, shape.intermediate, dtype=torch.float32)
    w13 = torch.stack([p[0] for p in pairs]) if pairs else empty13
    w2 = torch.stack([p[1] for p in pairs]) if pairs else empty2
    return ExpertWeights(w13.to(device, dtype), w2.to(device, dtype))


def _draw_expert(shape: MoEShape, expert: int, seed: int, distinct: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + expert)
    like: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    w13 = torch.randn(2 * shape.intermediate, shape.hidden, **like)
    w2 = torch.randn(shape.hidden, shape.intermediate, **like)
    factor = expert + 1 if distinct else 1
    return w13 / shape.hidden**0.5, w2 * (factor / shape.intermediate**0.5)
