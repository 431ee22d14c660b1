"""Does vLLM put gate above up in w13, as every stage reads it? Asked from vLLM's loader, never guessed from shapes."""

from typing import Any

import torch

GATE, UP = 1.0, 3.0


def reasons_against_order(experts: Any) -> list[str]:
    """Load a toy gate and a toy up row through `experts`, and see where they end up; a list of at most one reason.

    Args:
        experts: vLLM's RoutedExperts; its `_load_w13` writes one expert's gate ("w1") or up ("w3") rows.
    """
    load = getattr(experts, "_load_w13", None)
    if load is None:
        return [
            "vLLM's loader of gate and up rows (RoutedExperts._load_w13) is gone: their order cannot be checked"
        ]
    ranks = experts.moe_config.moe_parallel_config.tp_size
    rows = torch.zeros(2, 1)
    for shard, value in (("w1", GATE), ("w3", UP)):
        load(rows, 0, shard, torch.full((ranks, 1), value), 0)
    found = rows.flatten().tolist()
    if found == [GATE, UP]:
        return []
    return [f"vLLM's loader puts gate and up rows in another order: {found}, expected {[GATE, UP]}"]
