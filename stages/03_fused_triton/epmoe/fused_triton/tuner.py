"""Find tile sizes by measurement, on rows and routing as a rank receives them.

Candidates are those that fit the GPU's shared memory, nearest to the rule's choice first. Each is timed on every rank;
the slowest rank scores it, and one that fails anywhere is out. Then the fastest tiles try other schedules: TMA for
rows, a second tile of rows, a persistent grid, the order of tiles. The two products are tuned apart and must agree on
the rows of a tile, so the best pair with equal tiles wins.

Legend: R received rows, J places of a row, N = R * J assignments, H hidden, I intermediate, E_local experts here.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from epmoe.core.draws import draw
from epmoe.core.errors import UnsupportedError
from epmoe.core.groups import EPGroup
from epmoe.core.own_file import device_name
from epmoe.core.packed_rows import RowLayout
from epmoe.core.placement import contiguous
from epmoe.core.split import Rows
from epmoe.core.tune import Request, Tuner
from epmoe.core.values import dtype_name
from epmoe.core.weights import ExpertWeights
from epmoe.fused_triton import interpreter
from epmoe.fused_triton.tuning_table import COLUMNS, cells

if TYPE_CHECKING:  # kernels are defined when it is known how they will run
    from epmoe.fused_triton.kernels import DeviceLimits, GemmConfig


@dataclass
class Bench:
    """One rank's rows and weights, and the intermediate buffers."""

    rows: Rows
    weights: list[ExpertWeights]
    ranks: int
    h_NI: Tensor
    f_NH: Tensor


def key_of(group: EPGroup, request: Request) -> dict[str, dict]:
    """What an entry is found by: the situation, and the versions it was made with."""
    versions = {"torch": torch.__version__.partition("+")[0], "triton": version("triton")}
    return {"for": situation(group, request), "versions": versions}


def situation(group: EPGroup, request: Request) -> dict[str, Any]:
    """As `tuning.Situation`, without the device."""
    mine = contiguous(request.shape.experts, request.ranks).experts_of(_rank(group, request))
    return {
        "dtype": dtype_name(request.dtype),
        "hidden": request.shape.hidden,
        "intermediate": request.shape.intermediate,
        "experts": len(mine),
        "ranks": request.ranks,
        "topk": request.shape.topk,
        "tokens": request.tokens,
    }


def tune(group: EPGroup, request: Request) -> dict[str, Any]:
    """One entry for one number of tokens; a rank program, collective.

    Returns:
        {"device", "for", "versions", "gate_up", "down", "microseconds", "tried", "failed", "failures"};
        failures: what candidates failed with, and how many of them.

    Raises:
        UnsupportedError: no candidate of one product runs on every rank; on all ranks, with the reasons.
    """
    interpreter.prepare(group.device.type)
    from epmoe.fused_triton.tuning import limits_of

    bench = _prepare(group, request)
    best, tried, reasons = {}, 0, Counter[str]()
    for which in ("gate_up", "down"):
        search = Search(group, bench, which, request.repeats)
        for config in candidates(group, request, which):
            search.score(config)
        search.reschedule(limits_of(group.device), request.dtype.itemsize)
        best[which] = search.best
        tried, reasons = tried + search.tried, reasons + search.reasons
    both = set(best["gate_up"]) & set(best["down"])
    if not both:
        raise UnsupportedError(f"no pair of products runs on every rank: {dict(reasons)}")
    rows = min(both, key=lambda r: best["gate_up"][r][0] + best["down"][r][0])
    return {
        "device": device_name(group.device),
        **key_of(group, request),
        "gate_up": best["gate_up"][rows][1].to_dict(),
        "down": best["down"][rows][1].to_dict(),
        "microseconds": {which: round(best[which][rows][0] * 1e6, 2) for which in best},
        "tried": tried,
        "failed": reasons.total(),
        "failures": dict(reasons.most_common(5)),
    }


@dataclass
class Search:
    """The fastest configuration of one product by rows of a tile, as all ranks see it; collective.

    Attributes:
        group: the ranks that time together.
        bench: this rank's rows and weights.
        which: "gate_up" or "down".
        repeats: timed calls of each configuration.
        best: rows of a tile -> (seconds, configuration).
        tried: how many were timed.
        reasons: why some failed, and how often.
    """

    group: EPGroup
    bench: Bench
    which: str
    repeats: int
    best: dict[int, tuple[float, "GemmConfig"]] = field(default_factory=dict)
    tried: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def score(self, config: "GemmConfig") -> None:
        """Time one configuration and keep it if no other with its tile rows is faster."""
        own = _try(self.group, self.bench, self.which, config, self.repeats)
        seconds, reason = _vote(self.group, *own)
        self.tried += 1
        if reason:
            self.reasons[reason] += 1
        elif seconds < self.best.get(config.tile_rows, (math.inf,))[0]:
            self.best[config.tile_rows] = (seconds, config)

    def reschedule(self, limits: "DeviceLimits", itemsize: int) -> None:
        """Change the schedule of the two fastest, one thing after the other; what helps stays for the next."""
        products = 2 if self.which == "gate_up" else 1
        for rows in sorted(self.best, key=lambda rows: self.best[rows][0])[:2]:
            for change in schedules(limits):
                config = replace(self.best[rows][1], **change)
                known = config == self.best[rows][1]
                if not known and config.shared_bytes(products, itemsize) <= limits.shared_memory:
                    self.score(config)


def schedules(limits: "DeviceLimits") -> list[dict[str, int]]:
    """Changes of a configuration in all but block_m, block_n, block_k, pipeline depth and warps.

    None without TMA: so none in the interpreter, which runs programs one by one.
    """
    if not limits.tma:
        return []
    rows = [{"tma_rows": True}, {"tma_rows": True, "block_r": 64}]
    return [*rows, {"waves": 1}, {"waves": 0}, *({"group_m": group} for group in (1, 4, 8, 16))]


def candidates(group: EPGroup, request: Request, which: str) -> Iterator:
    """At most `request.candidates` configurations that fit, the rule's own first, then by distance from it."""
    from epmoe.fused_triton import kernels
    from epmoe.fused_triton.tuning import Situation, Tuning, limits_of

    limits, itemsize = limits_of(group.device), request.dtype.itemsize
    key = Situation(device=device_name(group.device), **situation(group, request))
    rule = getattr(Tuning(key, limits, itemsize).by_rule(key), which)
    products = 2 if which == "gate_up" else 1
    blocks_m = [m for m in (16, 32, 64, 128) if rule.block_m / 2 <= m <= rule.block_m * 2]
    found = [rule]
    for block_m in blocks_m:
        for config in kernels.config_space(limits, block_m, products, itemsize):
            for swap in {False, rule.swap_ab}:
                like_rule = replace(
                    config, swap_ab=swap, tma=rule.tma, group_m=rule.group_m, waves=rule.waves
                )
                found.append(like_rule)
                if rule.tma_rows:
                    found.append(replace(like_rule, tma_rows=True, block_r=rule.block_r))
    found = [c for c in found if c.shared_bytes(products, itemsize) <= limits.shared_memory]
    found.sort(key=lambda config: _steps(config, rule))
    yield from list(dict.fromkeys(found))[: request.candidates]


def _steps(config, rule) -> float:
    """How many doublings, and switches, lie between two configurations."""
    sizes = ("block_m", "block_n", "block_k", "num_stages", "num_warps")
    doublings = sum(abs(math.log2(getattr(config, s) / getattr(rule, s))) for s in sizes)
    switched = (config.swap_ab != rule.swap_ab) + (config.tma_rows != rule.tma_rows)
    return doublings + switched


def _rank(group: EPGroup, request: Request) -> int:
    return group.rank if request.rank is None else request.rank


def _prepare(group: EPGroup, request: Request) -> Bench:
    """Rows of all sources with the slots of this rank, packed as an exchange delivers them.

    A packed row is longer than its hidden values, and where it begins decides how fast it is gathered.
    """
    shape, device = request.shape, group.device
    placement, rank = contiguous(shape.experts, request.ranks), _rank(group, request)
    owner_E, slot_E = placement.owner_table(), placement.slot_table()
    count = request.tokens * request.ranks
    ids_RJ, weights_RJ = draw(
        "uniform", count, shape.topk, placement, request.seed + request.tokens
    )
    slots_RJ = torch.where(owner_E[ids_RJ.long()] == rank, slot_E[ids_RJ.long()], -1)
    generator = torch.Generator(device).manual_seed(request.seed)

    def normal(*sizes: int) -> Tensor:
        drawn = torch.empty(sizes, dtype=request.dtype, device=device)
        return drawn.normal_(std=sizes[-1] ** -0.5, generator=generator)

    local, assignments = len(placement.experts_of(rank)), count * shape.topk
    hidden, inner = shape.hidden, shape.intermediate
    layout = RowLayout(hidden, shape.topk, request.dtype)
    rows = layout.unpack(torch.empty(count, layout.row_bytes, dtype=torch.uint8, device=device))
    rows.x_RH.copy_(normal(count, hidden))
    rows.slots_RJ.copy_(slots_RJ)
    rows.weights_RJ.copy_(weights_RJ)
    return Bench(
        rows=rows,
        weights=[
            ExpertWeights(normal(local, 2 * inner, hidden), normal(local, hidden, inner))
            for _ in range(request.layers)
        ],
        ranks=request.ranks,
        h_NI=normal(assignments, inner),
        f_NH=torch.empty(assignments, hidden, device=device),
    )


def _try(group: EPGroup, bench: Bench, which: str, config, repeats: int) -> tuple[float, str]:
    """Seconds of one product with this configuration; infinite, and why, where it cannot be compiled or launched."""
    from epmoe.fused_triton import kernels

    assignments, experts = bench.rows.slots_RJ.numel(), bench.weights[0].experts
    try:
        tiles = kernels.make_tiles(assignments, experts, config.tile_rows, group.device)
        kernels.group_slots(bench.rows.slots_RJ, experts, tiles)

        def run() -> None:
            for weights in bench.weights:
                if which == "gate_up":
                    kernels.gate_up(
                        bench.rows, weights.w13_E2IH, tiles, bench.h_NI, config,
                        ranks=bench.ranks, scratch=bench.f_NH,
                    )  # fmt: skip
                else:
                    kernels.down(
                        bench.rows,
                        bench.h_NI,
                        weights.w2_EHI,
                        tiles,
                        bench.f_NH,
                        config,
                        ranks=bench.ranks,
                    )

        return _seconds(group.device, run, repeats) / len(bench.weights), ""
    except Exception as error:  # a compiler's and a driver's have no common class: any is a veto
        return math.inf, f"{type(error).__name__}: {error}".splitlines()[0][:120]


def _seconds(device: torch.device, run: Callable[[], None], repeats: int) -> float:
    run()
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    graph, start, end = (
        torch.cuda.CUDAGraph(),
        *(torch.cuda.Event(enable_timing=True) for _ in "ab"),
    )
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    graph.replay()
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3 / repeats


def _vote(group: EPGroup, seconds: float, reason: str) -> tuple[float, str]:
    """The slowest rank's time; infinite, with its reason, when the candidate failed on any."""
    return max(group.all_gather_objects((seconds, reason)))


TUNER = Tuner(situation=key_of, tune=tune, columns=COLUMNS, cells=cells)
