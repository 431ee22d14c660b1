"""One measurement, as every rank runs it: weights, ceiling, then point after point; each is saved as it is made."""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from epmoe.core.bench import floors, progress, provenance
from epmoe.core.bench import point as points
from epmoe.core.bench.method import Clock, blocks_for, clock_for
from epmoe.core.bench.results import Result
from epmoe.core.bench.routers import make_router
from epmoe.core.bench.streaming import ceiling, rate_words
from epmoe.core.bench.subjects import Setting, resolve_names
from epmoe.core.bench.workload import Routing, layer_weights, make_draw
from epmoe.core.errors import InputError
from epmoe.core.groups import EPGroup
from epmoe.core.placement import parse_placement
from epmoe.core.plan.gpus import named_gpu
from epmoe.core.room import check_room, rank_weight_bytes
from epmoe.core.shape import named_shape
from epmoe.core.values import dtype_name, named_dtype

_MEMORY_SHARE = 0.6  # of the device for weights: the rest is for buffers, graphs and libraries


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to measure.

    Attributes:
        shape: a named shape.
        ep: expert-parallel ranks.
        placement: as `parse_placement` reads it.
        loopback: one process plays `rank` of them.
        tokens: T sizes.
        subjects: names, or ("auto",).
        draws, blocks, replays, layers: how much; blocks are rounded up to whole rounds of draws.
        routing, seed: of the draws.
        dtype, router, gpu: names; the gpu is the one whose bandwidth floors are quoted at.
        rows: rows per layer and draw that the oracle checks.
        sweep: vLLM configurations to try per T, 0 for none; `configs`: chosen ones from a file instead.
        profile: record kernel times of every subject as well, apart from the timed runs.
        seconds: start no new T after so long; None for no limit.
        path: where rank 0 saves after each point.
        command: as it was typed, for the record.
        progress: a file of `progress.followed`, where rank 0's standard error is not the user's.
    """

    shape: str = "glm-5.3-flash"
    ep: int = 4
    placement: str = "contiguous"
    loopback: bool = False
    rank: int = 0
    tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    subjects: tuple[str, ...] = ("auto",)
    draws: int = 5
    blocks: int = 20
    replays: int = 50
    layers: int = 4
    routing: Routing = field(default_factory=Routing)
    seed: int = 0
    dtype: str = "auto"
    router: str = "auto"
    gpu: str = "h200"
    rows: int = 4
    sweep: int = 8
    configs: dict[int, dict[str, int]] | None = None
    profile: bool = False
    seconds: float | None = None
    path: Path | None = None
    command: str = ""
    progress: Path | None = None

    def __post_init__(self):
        least = {"ep": 1, "draws": 1, "blocks": 1, "replays": 1, "layers": 1, "rows": 1, "sweep": 0}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise InputError(f"{name}={getattr(self, name)}: must be at least {limit}")
        if not self.tokens or min(self.tokens) < 1:
            raise InputError(f"tokens={self.tokens}: give at least one T, each at least 1")
        if not 0 <= self.rank < self.ep:
            raise InputError(f"rank={self.rank}: must be between 0 and {self.ep - 1}")
        if self.rank and not self.loopback:
            raise InputError(f"rank={self.rank}: only loopback plays one rank, add --loopback")
        self._check_names()

    def _check_names(self) -> None:
        """Before ranks start and weights are drawn: both take long."""
        parse_placement(self.placement, named_shape(self.shape).experts, self.ep)
        named_dtype(self.dtype, "cpu")
        named_gpu(self.gpu)
        resolve_names(self.subjects, 1 if self.loopback else self.ep)


def run(group: EPGroup, config: Config) -> Result:
    """Measure. Collective; a rank program for `launch`. Every rank returns the same result but for its own clocks."""
    began = time.monotonic()
    if config.loopback != (group.size < config.ep) or group.size > config.ep:
        raise InputError(
            f"{group.size} rank(s) here, ep={config.ep}: loopback takes one process for several ranks, else one each"
        )
    base = _base(group, config)
    clock = clock_for(group)
    names = resolve_names(config.subjects, group.size)
    result = Result(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=config.command or " ".join(sys.argv),
        machine=provenance.machine(group.device),
        setting=setting_record(base, config, clock),
    )
    result.ceiling = _ceiling(group, clock, base)
    result.clocks["before"] = provenance.clocks(group.device)
    _say(group, config, f"reads at {rate_words(result.ceiling['read_bytes_per_second'])}")
    if config.profile and group.device.type != "cuda":
        _say(group, config, "no profile: kernel times are those of a GPU, and this is a CPU")
    for place, tokens in enumerate(config.tokens):
        spent = max(row[0] for row in group.all_gather_ints([int(time.monotonic() - began)]))
        if config.seconds is not None and spent > config.seconds:
            late = f"{spent} s were over, the limit is {config.seconds:g} s"
            result.skipped |= {str(t): late for t in config.tokens[place:]}
            break
        _measure_point(group, config, clock, base, names, tokens, result)
        result.clocks["after"] = provenance.clocks(group.device)
        if group.rank == 0 and config.path is not None:
            result.save(config.path)
        _say(
            group,
            config,
            f"T={tokens}: {points.headline(result.points[-1])} [{time.monotonic() - began:.0f} s]",
        )
    return result


def _measure_point(
    group: EPGroup,
    config: Config,
    clock: Clock,
    base: Setting,
    names: Sequence[str],
    tokens: int,
    result: Result,
) -> None:
    setting = with_draws(base, config, tokens, config.seed * 1000, config.draws)
    plan = points.Plan(
        names=tuple(names),
        blocks=blocks_for(config.blocks, config.draws),
        replays=config.replays,
        rows=config.rows,
        weight_seed=config.seed,
        sweep=config.sweep,
        configs=config.configs,
        profile=config.profile,
        tuning=lambda: with_draws(base, config, tokens, points.tuning_seed(config.seed), 1),
    )
    point, tuned = points.measure_point(clock, setting, plan, result)
    result.points.append(point)
    if tuned:
        result.tuning[str(tokens)] = tuned
    if group.device.type == "cuda":
        torch.cuda.empty_cache()


def _base(group: EPGroup, config: Config) -> Setting:
    """Everything but the draws."""
    shape = named_shape(config.shape)
    placement = parse_placement(config.placement, shape.experts, config.ep)
    dtype = named_dtype(config.dtype, group.device.type)
    rank = config.rank if config.loopback else group.rank
    layer_bytes = rank_weight_bytes(shape, placement, dtype)
    layers = _layers_that_fit(group, config.layers, layer_bytes)
    check_room(group, shape.name, layers, layer_bytes, option="--layers")
    mine = placement.experts_of(rank)
    _say(group, config, f"drawing {layers} layers of {len(mine)} experts")
    router, router_name = make_router(config.router, shape, group.device)
    return Setting(
        group=group,
        rank=rank,
        loopback=config.loopback,
        shape=shape,
        placement=placement,
        dtype=dtype,
        weights=[
            layer_weights(shape, mine, config.seed, layer, dtype, group.device)
            for layer in range(layers)
        ],
        draws=(),
        tokens=0,
        router=router,
        router_name=router_name,
    )


def _layers_that_fit(group: EPGroup, wanted: int, layer_bytes: int) -> int:
    """As many as asked for, or as fit this device's share; the same on all ranks."""
    most = wanted
    if group.device.type == "cuda":
        devices = {str(d) for d in group.all_gather_objects(str(group.device))}
        sharing = math.ceil(group.size / len(devices))
        total = torch.cuda.get_device_properties(group.device).total_memory
        most = int(total / sharing * _MEMORY_SHARE // layer_bytes)
    return max(1, min(row[0] for row in group.all_gather_ints([min(wanted, most)])))


def with_draws(base: Setting, config: Config, tokens: int, seed: int, draws: int) -> Setting:
    """The setting of one T, with draws `seed`, `seed` + 1, ..."""
    made = [
        make_draw(
            base.shape, base.placement, tokens, config.routing, seed + d, base.dtype, base.device
        )
        for d in range(draws)
    ]
    return Setting(**{**vars(base), "draws": made, "tokens": tokens})


def _ceiling(group: EPGroup, clock: Clock, base: Setting) -> dict:
    """The slowest rank's: ranks that share a GPU share its memory too."""
    mine = ceiling(clock, [weights.w13_E2IH for weights in base.weights])
    return min(group.all_gather_objects(mine), key=lambda one: one["read_bytes_per_second"])


def setting_record(base: Setting, config: Config, clock: Clock) -> dict:
    """What was measured, as plain data."""
    sizes = ("name", "hidden", "intermediate", "experts", "topk")
    return {
        "shape": {name: getattr(base.shape, name) for name in sizes},
        "ep": config.ep,
        "placement": base.placement.kind,
        "loopback": config.loopback,
        "rank": base.rank if config.loopback else None,
        "transport": "loopback" if config.loopback else base.group.transport,
        "ranks_here": base.group.size,
        "dtype": dtype_name(base.dtype),
        "seed": config.seed,
        "routing": config.routing.kind,
        "skew": config.routing.skew if config.routing.kind == "zipf" else None,
        "layers": len(base.weights),
        "layer_bytes": base.weights[0].w13_E2IH.nbytes + base.weights[0].w2_EHI.nbytes,
        "draws": config.draws,
        "blocks": blocks_for(config.blocks, config.draws),
        "replays": config.replays,
        "rows_checked": config.rows,
        "router": base.router_name,
        "clock": clock.kind,
        "floor_gpu": config.gpu,
        **floors.limits(config.gpu, dtype_name(base.dtype)),
    }


def estimate_seconds(config: Config, subjects: int) -> float:
    """About how long the timed part takes on `config.gpu`: every subject at 1.2 times its floor, and 5 us a layer."""
    from epmoe.core.plan import plan

    shape, blocks = named_shape(config.shape), blocks_for(config.blocks, config.draws)
    layer_s = sum(
        1.2 * plan(shape, config.ep, t, config.gpu).floor_seconds + 5e-6 for t in config.tokens
    )
    return layer_s * config.layers * blocks * config.replays * subjects


def _say(group: EPGroup, config: Config, words: str) -> None:
    if group.rank == 0:
        progress.say(words, config.progress)
