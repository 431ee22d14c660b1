"""The floor: the least time in which one rank can compute its experts.

A rank has to read the weights of its active experts once and to do the arithmetic of its assignments, and at best one
hides behind the other, so

    floor = max(memory, compute)
    memory  = (active experts x expert bytes + token rows in and out) / streaming bandwidth
    compute = assignments x 6 H I / peak            (gate, up and down: 2 H I operations each)

Worked on glm-5.3-flash (H 4096, I 2048, bfloat16: an expert is 3 x 4096 x 2048 x 2 = 50,331,648 bytes) and an H200 at
4.4 TB/s: 6 active experts take 68.6 us to read, 72 take 823.6 us, and 16,384 assignments take 833.5 us to compute: the
layer turns compute-bound near T = 2048 on each of 4 ranks.

The idea is the roofline of Williams, Waterman and Patterson (CACM 52(4), 2009). Legend as in `plan.load`.
"""

from dataclasses import dataclass
from typing import Literal

from epmoe.core.errors import InputError
from epmoe.core.plan.gpus import Gpu
from epmoe.core.plan.wire import item_bytes
from epmoe.core.shape import MoEShape


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The least time of one rank's experts, term by term.

    Attributes:
        weight_bytes: weights of the active experts, each read once.
        activation_bytes: one row of H in and one out for every token that names an expert here; what lies between
            the two GEMMs is taken to stay in cache, and a row out to be as narrow as a row in (8-bit: bfloat16).
        flop: operations of the assignments (a multiply-add is two).
        bandwidth: bytes/s that the memory terms are divided by.
        peak: operations/s that `flop` is divided by.
    """

    weight_bytes: float
    activation_bytes: float
    flop: float
    bandwidth: float
    peak: float

    @property
    def weight_seconds(self) -> float:
        """Seconds to read the active experts: what benchmarks call the floor at decode."""
        return self.weight_bytes / self.bandwidth

    @property
    def activation_seconds(self) -> float:
        """Seconds to read and write the token rows."""
        return self.activation_bytes / self.bandwidth

    @property
    def memory_seconds(self) -> float:
        """Seconds of all memory traffic."""
        return self.weight_seconds + self.activation_seconds

    @property
    def compute_seconds(self) -> float:
        """Seconds of the arithmetic at the tensor cores' peak."""
        return self.flop / self.peak

    @property
    def seconds(self) -> float:
        """The floor: the larger of memory and compute."""
        return max(self.memory_seconds, self.compute_seconds)

    @property
    def bound(self) -> Literal["memory", "compute"]:
        """Which of the two binds."""
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"


def expert_bytes(shape: MoEShape, dtype: str = "bfloat16") -> int:
    """Bytes of one routed expert's weights (scale factors of 8-bit weights not counted)."""
    return shape.expert_parameters() * item_bytes(dtype)


def floor(
    shape: MoEShape,
    gpu: Gpu,
    *,
    active_experts: float,
    assignments: float,
    hit_tokens: float,
    dtype: str = "bfloat16",
) -> Floor:
    """The floor of one rank.

    Args:
        shape: gives H and I.
        gpu: gives the streaming bandwidth and the peak.
        active_experts: experts of this rank with at least one assignment.
        assignments: (token, expert) pairs that this rank computes.
        hit_tokens: tokens, of all ranks, that name at least one expert of this rank.
        dtype: bfloat16, float16 or float8.

    Raises InputError for a negative count, fewer assignments than active experts, or a dtype without a peak.
    """
    counts = {
        "active_experts": active_experts,
        "assignments": assignments,
        "hit_tokens": hit_tokens,
    }
    for name, value in counts.items():
        if not value >= 0:
            raise InputError(f"{name}={value!r}: must be at least 0")
    if assignments < active_experts * (1 - 1e-9):
        raise InputError(
            f"assignments={assignments} are fewer than active_experts={active_experts}: "
            "an active expert has at least one"
        )
    back = "bfloat16" if dtype == "float8" else dtype
    row_bytes = shape.hidden * (item_bytes(dtype) + item_bytes(back))
    return Floor(
        weight_bytes=active_experts * expert_bytes(shape, dtype),
        activation_bytes=hit_tokens * row_bytes,
        flop=2 * assignments * shape.expert_parameters(),
        bandwidth=gpu.streaming_bandwidth,
        peak=gpu.flops(dtype),
    )
