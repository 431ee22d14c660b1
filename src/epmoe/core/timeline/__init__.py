"""`epmoe trace`: a few calls of one layer on real ranks, every phase of every rank on one clock.

Two passes over the same calls. The first counts, which a call may wait for: rows computed (`ledger`) and where tokens
go (`routing_stats`). The second is timed (`phases`): the ranks begin each call together, at a barrier.

Legend: T tokens on this rank, H hidden, E experts, EP ranks.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epmoe.core import ledger, phases
from epmoe.core.bench import provenance
from epmoe.core.bench.workload import Routing, layer_weights, make_draw
from epmoe.core.checkpoints import load_layer
from epmoe.core.errors import InputError
from epmoe.core.groups import EPGroup
from epmoe.core.layer import MoELayer, build
from epmoe.core.phase_times import PhaseTime, summarise
from epmoe.core.phases import Span
from epmoe.core.placement import Placement
from epmoe.core.routing_stats import RoutingCounter, RoutingStats
from epmoe.core.shape import MoEShape
from epmoe.core.weights import ExpertWeights

KIND = "trace"  # what a report's JSON says it is


@dataclass(frozen=True, kw_only=True)
class Text:
    """What a checkpoint's layer is given: x_TH are the activations that enter `layer` when the model reads a text."""

    model: Path
    layer: int
    x_TH: Tensor


@dataclass(frozen=True, kw_only=True)
class Run:
    """What to trace; the same on all ranks.

    Attributes:
        stage: a registered stage or a pair.
        shape, placement: of the layer.
        tokens: T of every rank; of the fullest one where a text is shared out.
        calls: how many.
        routing: draws of call c have seed c.
        dtype: of weights and tokens.
        text: real tokens and weights in place of drawn ones; then every call brings the same.
    """

    stage: str
    shape: MoEShape
    placement: Placement
    tokens: int
    calls: int
    routing: Routing
    dtype: torch.dtype
    text: Text | None = None


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What one rank saw; plain data.

    Attributes:
        spans: of the timed pass.
        skipped, aligned_within: see `phases.Recording`.
        computed: rows that went through an expert here, of every call; padding included.
        routing: of all ranks, of every call.
        layer: what the layer says of itself.
        machine: what it ran on, see `bench.provenance`.
    """

    spans: list[Span]
    skipped: int
    aligned_within: float
    computed: list[int]
    routing: list[RoutingStats]
    layer: dict[str, Any]
    machine: dict[str, Any]

    @property
    def given(self) -> list[int] | None:
        """Rows that the experts were given here, of every call; None for a layer without such a phase."""
        rows = [(s.call, s.facts["rows"]) for s in self.spans if s.path[-1] == "experts"]
        if not rows:
            return None
        return [sum(n for c, n in rows if c == call) for call in range(len(self.computed))]


Brought = tuple[Tensor, Tensor, Tensor | None]  # x_TH, logits_TE, bias_E of one call


def record_rank(group: EPGroup, run: Run) -> RankRecord:
    """Count the calls, then time them; a rank program."""
    weights, calls = _drawn(group, run) if run.text is None else _read(group, run, run.text)
    layer = build(run.stage, run.shape, weights, run.placement, group, run.tokens)
    computed, routing = [], []
    for call in calls:
        layer.counter = RoutingCounter(layer.spec.tables)
        with ledger.record(operators=False) as book:
            _call(layer, call, run)
        computed.append(book.rows_computed)
        routing.append(layer.counter.read(group))
    layer.counter = None
    _call(layer, calls[0], run)  # once as it will be timed: what is made only once is made now
    with phases.recording(group) as record:
        for call in calls:
            _begin_together(group)
            _call(layer, call, run)
    description = layer.describe()
    spans = record.spans()
    layer.close()
    return RankRecord(
        spans=spans,
        skipped=record.skipped,
        aligned_within=record.aligned_within,
        computed=computed,
        routing=routing,
        layer=description,
        machine=provenance.machine(group.device),
    )


def _call(layer: MoELayer, call: Brought, run: Run) -> None:
    layer.from_logits(*call, max_tokens=run.tokens)


def _begin_together(group: EPGroup) -> None:
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    group.barrier()


def _drawn(group: EPGroup, run: Run) -> tuple[ExpertWeights, list[Brought]]:
    """Random weights and tokens, the same for the same run."""
    experts, device = run.placement.experts_of(group.rank), group.device
    weights = layer_weights(run.shape, experts, 0, 0, run.dtype, device)
    calls: list[Brought] = []
    for seed in range(run.calls):
        one = make_draw(run.shape, run.placement, run.tokens, run.routing, seed, run.dtype, device)
        mine = one.sources[group.rank]
        calls.append((mine.x_TH, mine.logits_TE, one.bias_E))
    return weights, calls


def _read(group: EPGroup, run: Run, text: Text) -> tuple[ExpertWeights, list[Brought]]:
    """The checkpoint's layer and this rank's share of the text."""
    experts, device = run.placement.experts_of(group.rank), group.device
    mine = load_layer(text.model, text.layer, experts, run.dtype, device)
    x_TH = text.x_TH.tensor_split(group.size)[group.rank].to(device, run.dtype)
    return mine.experts, [(x_TH, mine.router.logits(x_TH), mine.router.bias_E)] * run.calls


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a trace comes to.

    Attributes:
        what, where: one sentence each: the layer, and the ranks.
        command, created: how it was made, and when.
        machine: rank 0's, with the commit.
        setting: what was asked for, and what the layer says of itself.
        times: of every phase, per call.
        routing: of all calls together.
        active: experts of every rank that are named in one call, the mean of the calls.
        computed: rows that went through an expert, of all calls and ranks.
        skipped: phases that ran in a graph capture and were not timed.
        aligned_within: seconds; no two ranks' clocks started further apart.
    """

    what: str
    where: str
    command: str
    created: str
    machine: dict[str, Any]
    setting: dict[str, Any]
    times: list[PhaseTime]
    routing: RoutingStats
    active: list[float]
    computed: int
    skipped: int
    aligned_within: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` reads it."""
        return {"kind": KIND, **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Report":
        """The inverse of `as_dict`, after a way through JSON too. Raises InputError for something else."""
        try:
            times = [PhaseTime(**_tuples(time)) for time in data["times"]]
            routing = RoutingStats(**_tuples(data["routing"]))
            others = {name: value for name, value in data.items() if name != "kind"}
            return cls(**{**others, "times": times, "routing": routing})
        except (KeyError, TypeError) as error:
            raise InputError(
                f"this is no report as `epmoe trace --json` writes it: {error!r}"
            ) from error


def report_of(run: Run, what: str, where: str, records: Sequence[RankRecord]) -> Report:
    """Join what every rank saw."""
    routing = sum(records[0].routing[1:], records[0].routing[0])
    given = [record.given for record in records]
    if all(rows is not None for rows in given):
        routing = routing.with_delivered([sum(rows or ()) for rows in given])
    return Report(
        what=what,
        where=where,
        command=shlex.join(["epmoe", *sys.argv[1:]]),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=records[0].machine,
        setting={"calls": run.calls, "tokens": run.tokens, **records[0].layer},
        times=summarise([record.spans for record in records]),
        routing=routing,
        active=[
            sum(active) / run.calls
            for active in zip(*(one.active for one in records[0].routing), strict=True)
        ],
        computed=sum(sum(record.computed) for record in records),
        skipped=sum(record.skipped for record in records),
        aligned_within=max(record.aligned_within for record in records),
    )


def _tuples(data: dict[str, Any]) -> dict[str, Any]:
    """JSON's lists as the tuples that they were."""

    def one(value: Any) -> Any:
        return tuple(map(one, value)) if isinstance(value, list | tuple) else value

    return {name: one(value) for name, value in data.items()}
