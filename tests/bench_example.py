"""A made-up benchmark result that the tests of pages and tables share."""

import dataclasses

from epmoe.core.bench.floors import floor_us
from epmoe.core.bench.results import (
    DrawRecord,
    Measured,
    Point,
    Result,
    ratios_of,
    summarise,
    timed_subjects,
)

GATES = {"oracle_error": 1e-3, "oracle_limit": 1e-2}


def example(
    device="NVIDIA H200", created="2026-01-02T00:00:00+00:00", speed=1.0, tokens=(1, 8, 128)
):
    """A result with two draws and made-up times: the stage at 1.2, the opponent at 1.3 of the floor."""
    result = Result(
        created=created,
        command="epmoe bench --loopback",
        machine={
            "git_sha": "0123456789abcdef",
            "git_dirty": False,
            "device": device,
            "driver": "1",
            "torch": "2.13",
            "triton": "3.7",
            "nccl": None,
            "vllm": None,
        },
        setting={
            "shape": {
                "name": "glm-5.3-flash",
                "hidden": 4096,
                "intermediate": 2048,
                "experts": 288,
                "topk": 8,
            },
            "ep": 4,
            "loopback": True,
            "rank": 0,
            "transport": "loopback",
            "dtype": "bfloat16",
            "seed": 0,
            "routing": "uniform",
            "layers": 4,
            "draws": 2,
            "blocks": 4,
            "replays": 50,
            "router": "torch",
            "clock": "CUDA events",
            "floor_bytes_per_second": 4.4e12,
            "floor_operations_per_second": 989e12,
        },
        ceiling={"read_bytes_per_second": 4.18e12, "copy_bytes_per_second": 4.27e12},
        clocks={"before": {"sm_mhz": "1980", "power_w": "100"}, "after": {}},
    )
    for t in tokens:
        draws = []
        for d in range(2):
            active, assignments = [5 + d, 7], [8 * t, 9]
            floor = floor_us(result.setting, active, assignments)
            draws.append(DrawRecord(seed=d, active=active, assignments=assignments, floor_us=floor))
        floors = [draw.floor_us for draw in draws]
        subjects = {}
        for name, factor in (("02_fixed_capacity", 1.2 * speed), ("grouped_mm", 1.3)):
            samples = [factor * floors[b % 2] * (1 + 0.001 * b) for b in range(4)]
            subjects[name] = Measured(
                mode="graph",
                replays=50,
                samples_us=samples,
                gates=GATES,
                **summarise(samples, draws, result),
            )
        subjects["broken"] = Measured(mode="none", error="GateError: wrong")
        point = Point(
            tokens=t, draws=draws, subjects=subjects, ratios=[], refused={"vllm-tuned": "no vLLM"}
        )
        point.ratios.extend(ratios_of(timed_subjects(point)))
        result.points.append(point)
    return result


def changed(point: Point, **changes) -> Point:
    return dataclasses.replace(point, **changes)


def with_subject(result, **changes):
    point = result.points[0]
    one = dataclasses.replace(point.subjects["02_fixed_capacity"], **changes)
    result.points[0] = changed(point, subjects={**point.subjects, "02_fixed_capacity": one})
