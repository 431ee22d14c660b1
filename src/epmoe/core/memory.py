"""Bytes of buffers: what a layer takes on a rank besides its weights, its tokens and its result.

A stage says it before it is built, from sizes alone, for the worst routing: `Stage.memory`. The suite holds what it
says against what a layer keeps and what its calls hold at once.

Legend: C capacity, EP ranks, K experts per token, N assignments, R received rows.
"""

import re
from dataclasses import dataclass

import torch

from epmoe.core.errors import InputError
from epmoe.core.shape import MoEShape

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """What buffers depend on.

    Attributes:
        shape: of the layer.
        ranks: EP.
        capacity: C, the tokens of a rank that the layer holds at once.
        dtype: of activations and weights.
        device: "cpu" or "cuda".
        local_experts: the most experts that a rank holds.
    """

    shape: MoEShape
    ranks: int
    capacity: int
    dtype: torch.dtype
    device: str
    local_experts: int

    @property
    def assignments(self) -> int:
        """N = EP * C * K: the most assignments that a rank can receive, whatever the routing."""
        return self.ranks * self.capacity * self.shape.topk

    def rows(self, places: str) -> int:
        """R: rows of N assignments, with K of them in a row ("topk") or one."""
        return self.assignments // (self.shape.topk if places == "topk" else 1)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. kept: as long as the layer lives; call: at most, while a call runs, beside those."""

    kept: int
    call: int

    @property
    def total(self) -> int:
        return self.kept + self.call

    def __add__(self, other: "Memory") -> "Memory":
        return Memory(self.kept + other.kept, self.call + other.call)


def parse_bytes(text: str) -> int:
    """ "300MiB", "1.5 GiB", "4096": bytes. Raises InputError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])iB|B)?\s*", text)
    if found is None:
        raise InputError(f"memory={text!r}: give bytes, or a number of KiB, MiB, GiB or TiB")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def in_words(count: float) -> str:
    """Bytes with a unit: 1536 is 1.5 KiB."""
    for unit in ("T", "G", "M", "K"):
        if count >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:,.1f} {unit}iB"
    return f"{count:,.0f} B"
