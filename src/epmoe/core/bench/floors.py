"""The floor of a measured layer: nothing that reads its weights and does its arithmetic is faster.

    floor = the longer of  bytes of the active experts / bandwidth  and  operations of the assignments / peak

of the slowest rank. At decode reading is the longer one; with thousands of tokens per rank it is the arithmetic.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from epmoe.core.errors import InputError
from epmoe.core.plan.gpus import named_gpu
from epmoe.core.plan.wire import item_bytes


def limits(gpu: str, dtype: str) -> dict[str, float | None]:
    """What floors are quoted at, for a result's setting: bytes/s and operations/s of the named GPU.

    The peak is None for a dtype without one (float32): then the floor is reading alone.
    """
    named = named_gpu(gpu)
    try:
        peak = named.flops(dtype)
    except InputError:
        peak = None
    return {
        "floor_bytes_per_second": named.streaming_bandwidth,
        "floor_operations_per_second": peak,
    }


def floor_us(
    setting: Mapping[str, Any],
    active: Sequence[int],
    assignments: Sequence[int],
    bytes_per_second: float | None = None,
) -> float:
    """Microseconds of the slowest rank that is measured here.

    Args:
        setting: of a result.
        active, assignments: per rank.
        bytes_per_second: of memory; None for the setting's.
    """
    bandwidth = bytes_per_second or setting["floor_bytes_per_second"]
    peak = setting["floor_operations_per_second"]
    parameters = 3 * setting["shape"]["hidden"] * setting["shape"]["intermediate"]
    reading = max(seen(active, setting)) * parameters * item_bytes(setting["dtype"])
    arithmetic = max(seen(assignments, setting)) * operations_per_assignment(setting)
    return 1e6 * max(reading / bandwidth, arithmetic / peak if peak else 0.0)


def operations_per_assignment(setting: Mapping[str, Any]) -> int:
    """6 H I: gate, up and down, a multiply-add counting as two."""
    return 6 * setting["shape"]["hidden"] * setting["shape"]["intermediate"]


def seen(per_rank: Sequence[int], setting: Mapping[str, Any]) -> Sequence[int]:
    """In loopback one rank alone is measured."""
    rank = setting.get("rank")
    return [per_rank[rank]] if setting["loopback"] and rank is not None else per_rank
