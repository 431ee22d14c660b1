"""Small pieces of arithmetic whose rounding is part of the contract."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a [..., 2I] tensor whose first half is gate; computed in float32, returned in its dtype."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def matmul_float32(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a @ b with a float32 result [M, N]: a half-precision product is not rounded before it is weighed and summed.

    Both may be batches, [B, M, K] and [B, K, N].

    On a GPU the matrix unit accumulates in float32 anyway and only the store differs; on a CPU operands are widened.
    """
    if a_MK.device.type == "cuda" and a_MK.dtype != torch.float32:
        multiply = torch.mm if a_MK.dim() == 2 else torch.bmm
        return multiply(a_MK, b_KN, out_dtype=torch.float32)
    return a_MK.float() @ b_KN.float()


def sum_in_order(terms: Sequence[Tensor]) -> Tensor:
    """Add tensors one after the other, first to last: float addition is not associative, so the order is part of the
    result. (Tensor.sum may regroup.)"""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total
