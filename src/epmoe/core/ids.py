"""Expert ids as callers bring them: int32 or int64, and only those in [0, E) name an expert.

Fixed shapes and no host read, so that all of it can be captured in a CUDA graph.
"""

import torch
from torch import Tensor


def named(ids: Tensor, experts: int) -> Tensor:
    """Whether each id, of any shape, names an expert: bool."""
    return (ids >= 0) & (ids < experts)


def look_up(table_E: Tensor, ids: Tensor, nobody: int) -> Tensor:
    """table_E[id] for ids of any shape, in the table's dtype; `nobody` where an id names no expert."""
    real = named(ids, len(table_E))
    return torch.where(real, table_E[torch.where(real, ids, 0).long()], nobody)


def clamped(ids: Tensor, experts: int) -> Tensor:
    """Ids that mean the same and fit int32: in int64, 2**32 names no expert, and cut off it would name expert 0."""
    return ids.clamp(-1, experts) if ids.dtype is torch.int64 else ids
