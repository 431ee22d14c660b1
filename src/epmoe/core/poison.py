"""Fresh memory that cannot pass for a result: inside `poisoned()`, every new uninitialised tensor is filled.

    with poisoned():
        y_TH = layer(x_TH, topk_ids_TK, topk_weights_TK)

Floats become NaN, integers their largest value, so that a row which was received but never written, or a count that was
read too early, shows at once instead of being zero by luck. Source of the idea: flash-linear-attention's tests.
"""

import torch
from torch import Tensor

from epmoe.core.dispatch_mode import DispatchMode

_FRESH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class poisoned(DispatchMode):
    """Context manager. Open it OUTSIDE `ledger.record()`: then its own writes are not counted."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") in _FRESH:
            fill(out)
        return out


def fill(x: Tensor) -> None:
    """Overwrite `x`: NaN where the dtype has it, the largest value elsewhere."""
    if x.dtype.is_floating_point:
        x.fill_(float("nan"))
    elif x.dtype is torch.bool:
        x.fill_(True)
    elif not x.dtype.is_complex:
        x.fill_(torch.iinfo(x.dtype).max)
