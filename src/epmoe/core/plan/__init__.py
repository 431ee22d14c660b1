"""The limit calculator: how fast can this layer be at all, on this GPU, for this many tokens, and what has to travel?

`plan` joins three parts: what the routing asks of every rank (`plan.load`), the least time of its experts
(`plan.floor`), and the bytes of each way to exchange tokens (`plan.wire`). `plan.render` prints it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from epmoe.core.errors import InputError
from epmoe.core.placement import Placement
from epmoe.core.plan.floor import Floor, expert_bytes, floor
from epmoe.core.plan.gpus import GPUS, Gpu, custom_gpu, named_gpu
from epmoe.core.plan.load import (
    Load,
    drawn_load,
    expected_active,
    expected_load,
    hit_probability,
    resolve_placement,
    resolve_tokens,
)
from epmoe.core.plan.wire import SCHEMES, Wire, wire_bytes
from epmoe.core.shape import MoEShape

__all__ = [
    "GPUS",
    "SCHEMES",
    "Floor",
    "Gpu",
    "Load",
    "Plan",
    "RankPlan",
    "Wire",
    "custom_gpu",
    "drawn_load",
    "expected_active",
    "expected_load",
    "expert_bytes",
    "floor",
    "hit_probability",
    "named_gpu",
    "plan",
    "wire_bytes",
]


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One rank's share: experts it holds, those that are active, assignments it computes, and its floor."""

    rank: int
    tokens: int
    local_experts: int
    resident_bytes: float
    active_experts: float
    assignments: float
    floor: Floor


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The limits of one layer call on EP ranks.

    Attributes:
        shape: the layer's sizes, by name: hidden, intermediate, experts, topk, and its `name`.
        ep: number of ranks.
        dtype: of weights and of rows on the way out; scale factors of float8 weights are not counted.
        placement: kind of expert map.
        exact: True where the routing was a draw, False for the expectation under uniform routing.
        gpu, bandwidth_source: whose figures, and where the streaming bandwidth comes from.
        ranks: every rank's share.
        wires: every scheme's bytes.
        link_bandwidth: bytes/s per direction between two GPUs.
    """

    shape: dict[str, Any]
    ep: int
    dtype: str
    placement: str
    exact: bool
    gpu: str
    bandwidth_source: str
    link_bandwidth: float
    ranks: tuple[RankPlan, ...]
    wires: tuple[Wire, ...]

    @property
    def slowest(self) -> RankPlan:
        """The rank with the highest floor; the layer cannot end before it."""
        return max(self.ranks, key=lambda rank: rank.floor.seconds)

    @property
    def floor_seconds(self) -> float:
        """The floor of the slowest rank, in seconds."""
        return self.slowest.floor.seconds

    def wire(self, scheme: str) -> Wire:
        """The entry of that scheme. Raises InputError for an unknown one."""
        for wire in self.wires:
            if wire.scheme == scheme:
                return wire
        raise InputError(f"no scheme is called {scheme!r}: choose one of {', '.join(SCHEMES)}")

    def to_json(self, indent: int | None = 2) -> str:
        """All stored numbers as JSON; units as in the attributes' descriptions."""
        return json.dumps(asdict(self), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The inverse of `to_json`. Raises InputError for a text that is no plan."""
        try:
            data = json.loads(text)
            ranks = tuple(RankPlan(**{**r, "floor": Floor(**r["floor"])}) for r in data["ranks"])
            wires = tuple(_wire_from(w) for w in data["wires"])
            return cls(**{**data, "ranks": ranks, "wires": wires})
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"this text is no plan as Plan.to_json writes it: {error}") from error


def plan(
    shape: MoEShape,
    ep: int,
    tokens: int | Sequence[int],
    gpu: Gpu | str = "h200",
    topk_ids: Tensor | Sequence[Tensor] | None = None,
    *,
    placement: Placement | None = None,
    dtype: str = "bfloat16",
    combine_dtype: str = "float32",
    capacity: int | None = None,
) -> Plan:
    """The limits of one layer call.

    Args:
        shape: the layer.
        ep: ranks of the expert group.
        tokens: T of every rank: one number for all, or one per rank.
        gpu: a `Gpu` or the name of one.
        topk_ids: a draw to count exactly: one [T, K] tensor per source rank, or one [sum of T, K] tensor in rank
            order; None for the expectation under uniform routing.
        placement: expert map; None for contiguous.
        dtype: of weights and of rows on the way out: bfloat16, float16 or float8.
        combine_dtype, capacity: as in `wire_bytes`.

    Raises InputError for anything that does not fit together.
    """
    gpu = named_gpu(gpu) if isinstance(gpu, str) else gpu
    placement = resolve_placement(shape, ep, placement)
    per_rank = resolve_tokens(ep, tokens)
    if topk_ids is None:
        load = expected_load(shape, ep, per_rank, placement)
    else:
        load = drawn_load(shape, _split_draw(topk_ids, per_rank), placement)
    ranks = tuple(_rank_plan(shape, gpu, load, placement, r, dtype) for r in range(ep))
    row_options = {"dtype": dtype, "combine_dtype": combine_dtype, "capacity": capacity}
    return Plan(
        shape={n: getattr(shape, n) for n in ("name", "hidden", "intermediate", "experts", "topk")},
        ep=ep,
        dtype=dtype,
        placement=placement.kind,
        exact=load.exact,
        gpu=gpu.name,
        bandwidth_source=gpu.streaming_source,
        link_bandwidth=gpu.nvlink_bandwidth,
        ranks=ranks,
        wires=tuple(wire_bytes(scheme, shape, load, **row_options) for scheme in SCHEMES),
    )


def _rank_plan(
    shape: MoEShape, gpu: Gpu, load: Load, placement: Placement, rank: int, dtype: str
) -> RankPlan:
    local = placement.counts()[rank]
    return RankPlan(
        rank=rank,
        tokens=load.tokens[rank],
        local_experts=local,
        resident_bytes=local * expert_bytes(shape, dtype),
        active_experts=load.active[rank],
        assignments=load.assignments[rank],
        floor=floor(
            shape,
            gpu,
            active_experts=load.active[rank],
            assignments=load.assignments[rank],
            hit_tokens=load.hit_tokens[rank],
            dtype=dtype,
        ),
    )


def _split_draw(
    topk_ids: Tensor | Sequence[Tensor], per_rank: tuple[int, ...]
) -> tuple[Tensor, ...]:
    if isinstance(topk_ids, Tensor):
        if topk_ids.dim() != 2 or topk_ids.shape[0] != sum(per_rank):
            raise InputError(
                f"topk_ids of shape {tuple(topk_ids.shape)} do not hold the {sum(per_rank)} tokens of all ranks"
            )
        return tuple(topk_ids.split(list(per_rank)))
    lengths = tuple(ids_TK.shape[0] for ids_TK in topk_ids)
    if lengths != per_rank:
        raise InputError(f"topk_ids hold {list(lengths)} tokens per rank: tokens={list(per_rank)}")
    return tuple(topk_ids)


def _wire_from(data: dict[str, Any]) -> Wire:
    lists = {n: tuple(data[n]) for n in ("dispatch_bytes", "combine_bytes")}
    return Wire(**{**data, **lists})
