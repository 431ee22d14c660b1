"""Routing draws for tests and measurements: who names which experts, without a model.

Every draw is [T, K] int32 ids and float32 weights that sum to 1 in each token. Kinds:

    uniform       K different experts, all alike
    zipf          expert e is chosen in proportion to 1 / (e + 1) ** skew (experts shuffled by the seed)
    hot_expert    expert 0 of the shuffle is in every token, the rest uniform
    one_rank      all experts of a token live on the last rank that holds any (as far as it has K)
    masked        uniform, then about half of the ids are -1
    duplicates    uniform, then the second id repeats the first
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from epmoe.core.errors import InputError
from epmoe.core.placement import Placement

DrawKind = Literal["uniform", "zipf", "hot_expert", "one_rank", "masked", "duplicates"]
KINDS: tuple[str, ...] = get_args(DrawKind)


def draw(
    kind: str,
    tokens: int,
    topk: int,
    placement: Placement,
    seed: int,
    skew: float = 1.0,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """One routing draw, equal for equal arguments on every machine.

    Args:
        kind: one of `KINDS`.
        tokens, topk: T and K.
        placement: gives E, and the ranks for `one_rank`.
        seed: of this draw; use another one per rank and per call.
        skew: the exponent of `zipf`.
        device: where the result goes; it is drawn on the CPU.

    Returns:
        topk_ids_TK [T, K] int32 and topk_weights_TK [T, K] float32.
    """
    if kind not in KINDS:
        raise InputError(f"no routing draw is called {kind!r}: choose one of {', '.join(KINDS)}")
    like: dict[str, Any] = {
        "generator": torch.Generator().manual_seed(seed),
        "dtype": torch.float32,
        "device": "cpu",
    }
    favour_E = _favour(kind, placement, skew)
    # sampling without replacement: the K largest of log(favour) + Gumbel noise
    noise_TE = -torch.log(-torch.log(torch.rand(tokens, placement.experts, **like)))
    ids_TK = (favour_E.log() + noise_TE).topk(topk, dim=1).indices.to(torch.int32)
    weights_TK = torch.rand(tokens, topk, **like) + 0.1
    if kind == "masked":
        ids_TK[torch.rand(tokens, topk, **like) < 0.5] = -1
    if kind == "duplicates" and topk > 1:
        ids_TK[:, 1] = ids_TK[:, 0]
    return ids_TK.to(device), (weights_TK / weights_TK.sum(dim=1, keepdim=True)).to(device)


def _favour(kind: str, placement: Placement, skew: float) -> Tensor:
    """How likely each expert is, up to a factor; the shuffle is the same for every seed of a placement."""
    experts = placement.experts
    shuffle_E = torch.randperm(experts, generator=torch.Generator().manual_seed(experts))
    favour_E = torch.ones(experts, dtype=torch.float32, device="cpu")
    if kind == "zipf":
        favour_E[shuffle_E] = 1 / torch.arange(1, experts + 1) ** skew
    if kind == "hot_expert":
        favour_E[shuffle_E[0]] = 1e30
    if kind == "one_rank":
        target = max(rank for homes in placement.homes for rank in homes)
        favour_E[torch.tensor(placement.experts_of(target))] = 1e30
    return favour_E
