"""Tile sizes by pure lookup: what was measured exactly here, else the nearest that was measured, else a rule.

Measured entries are JSON files in `configs/`, one per GPU, made by `epmoe tune`. Nothing is timed at run time.

Legend: T tokens per rank (the capacity of a call), H hidden, I intermediate, E_local experts here, K experts per token.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from epmoe.core import own_file
from epmoe.core.layer_spec import LayerSpec
from epmoe.core.own_file import device_name
from epmoe.core.values import dtype_name
from epmoe.fused_triton import kernels

# Shared memory of a block that a kernel may ask for, by compute capability, in bytes (CUDA C++ Programming Guide,
# technical specifications per compute capability).
SHARED_MEMORY = {
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (10, 3): 232448,
}
SHARED_MEMORY_ELSEWHERE = 101376  # also (12, 0)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What an entry was measured for, and what a layer asks for."""

    device: str
    dtype: str
    hidden: int
    intermediate: int
    experts: int
    ranks: int
    topk: int
    tokens: int

    @property
    def rows_per_expert(self) -> float:
        """Assignments of a local expert under uniform routing."""
        return self.tokens * self.topk / max(1, self.experts)

    def distance(self, other: "Situation") -> float:
        """How far apart two situations are for the choice of tiles; infinite where nothing can be learnt."""
        if (self.device, self.dtype) != (other.device, other.dtype):
            return math.inf
        pairs = (
            (self.rows_per_expert, other.rows_per_expert, 1.0),
            (self.hidden, other.hidden, 1.0),
            (self.intermediate, other.intermediate, 1.0),
            (self.experts, other.experts, 0.25),
        )
        return sum(weight * abs(math.log2(max(a, 1e-3) / max(b, 1e-3))) for a, b, weight in pairs)


@dataclass(frozen=True)
class Choice:
    """A configuration and where it comes from: "exact", "nearest" or "rule"."""

    config: kernels.LayerConfig
    source: str


FAR = 2.0  # octaves: beyond this, the rule is the better guess


@dataclass
class Tuning:
    """Looks configurations up for one layer; `pinned` gives one for every number of tokens.

    Tiles decide in which order products are added, so a token's bits can change with the batch it is in, unless they
    are pinned.
    """

    situation: Situation
    limits: kernels.DeviceLimits
    itemsize: int
    pinned: bool = False
    _found: dict[int, Choice] = field(default_factory=dict)

    @staticmethod
    def of(spec: LayerSpec, pinned: bool) -> "Tuning":
        """For this rank's experts on this device."""
        device = device_name(spec.device)
        situation = Situation(
            device=device,
            dtype=dtype_name(spec.dtype),
            hidden=spec.shape.hidden,
            intermediate=spec.shape.intermediate,
            experts=spec.weights.experts,
            ranks=spec.group.size,
            topk=spec.shape.topk,
            tokens=spec.max_tokens_per_rank,
        )
        return Tuning(situation, limits_of(spec.device), spec.dtype.itemsize, pinned)

    def choice(self, tokens: int) -> Choice:
        """For calls with a capacity of `tokens` per rank."""
        if self.pinned:
            tokens = self.situation.tokens
        if tokens not in self._found:
            self._found[tokens] = self._look_up(tokens)
        return self._found[tokens]

    def warmup_capacities(self) -> tuple[int, ...]:
        """Capacities from 1 to C whose calls use every kernel that is compiled for a layer; none for the interpreter.

        One for each configuration; and the powers of two, since all other sizes that a kernel is compiled for are
        powers of two as well, or change at one.
        """
        if self.situation.device == "cpu":
            return ()
        most = self.situation.tokens
        every = set() if self.pinned else one_of_each(self.situation, self.limits, self.itemsize)
        return tuple(sorted(every.union(_powers_of_two(most))))

    # --8<-- [start:look_up]
    def _look_up(self, tokens: int) -> Choice:
        wanted = Situation(**{**asdict(self.situation), "tokens": tokens})
        known = entries(wanted.device)
        best = min(known, key=wanted.distance, default=None)
        if best is not None and best == wanted:
            return Choice(known[best], "exact")
        if best is not None and wanted.distance(best) <= FAR:
            return Choice(known[best], "nearest")
        return Choice(self.by_rule(wanted), "rule")

    # --8<-- [end:look_up]

    def by_rule(self, wanted: Situation) -> kernels.LayerConfig:
        """What to take where nothing near was measured."""
        if wanted.device == "cpu":
            return _for_the_interpreter(wanted)
        return kernels.choose(
            self.limits,
            hidden=wanted.hidden,
            intermediate=wanted.intermediate,
            local_experts=wanted.experts,
            itemsize=self.itemsize,
            rows=wanted.tokens * wanted.topk,
        )


def _for_the_interpreter(wanted: Situation) -> kernels.LayerConfig:
    """Wide tiles: an interpreted kernel costs by the operation, not by the number."""

    def cover(size: int, most: int) -> int:
        return min(most, max(16, 1 << (size - 1).bit_length()))

    hidden, inner = cover(wanted.hidden, 256), cover(wanted.intermediate, 256)
    return kernels.LayerConfig(
        kernels.GemmConfig(16, inner, hidden, num_stages=1, num_warps=4),
        kernels.GemmConfig(16, hidden, inner, num_stages=1, num_warps=4),
    )


@cache
def one_of_each(
    situation: Situation, limits: kernels.DeviceLimits, itemsize: int
) -> frozenset[int]:
    """A number of tokens, from 1 to the situation's, for each configuration; asked once for all layers of a model."""
    tuning, first = Tuning(situation, limits, itemsize), {}
    for tokens in (*_powers_of_two(situation.tokens), *range(1, situation.tokens + 1)):
        first.setdefault(tuning._look_up(tokens).config, tokens)
    return frozenset(first.values())


def _powers_of_two(most: int) -> list[int]:
    return [1 << bit for bit in range(most.bit_length())]


def limits_of(device: torch.device) -> kernels.DeviceLimits:
    """Shared memory and features of a device; a CPU gets a small GPU's, so that interpreted tiles stay small."""
    if device.type != "cuda":
        return kernels.DeviceLimits(shared_memory=65536)
    arch = torch.cuda.get_device_capability(device)
    return kernels.DeviceLimits(
        SHARED_MEMORY.get(arch, SHARED_MEMORY_ELSEWHERE), tma=arch >= (9, 0)
    )


@cache
def entries(device: str) -> dict[Situation, kernels.LayerConfig]:
    """Everything that was measured on `device`: what ships with the package, and before it what the user tuned."""
    found: dict[Situation, kernels.LayerConfig] = {}
    for file in files("epmoe.fused_triton").joinpath("configs").iterdir():
        if file.name.endswith(".json"):
            found |= read_entries(json.loads(file.read_text()), device)
    return found | read_entries(own_file.load(own_file.default_file()), device)


def read_entries(data: dict[str, Any], device: str) -> dict[Situation, kernels.LayerConfig]:
    """The entries of one file for `device`: {"device": ..., "entries": [{"for": ..., "gate_up": ..., "down": ...}]}."""
    if data["device"] != device:
        return {}
    return {
        Situation(device=device, **entry["for"]): kernels.LayerConfig(
            kernels.GemmConfig(**entry["gate_up"]), kernels.GemmConfig(**entry["down"])
        )
        for entry in data["entries"]
    }
