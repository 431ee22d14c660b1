"""The limit calculator's tables for the terminal, and the command that prints them."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Annotated

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.text import Text
from torch import Tensor

from epmoe.core.commands.terminal import Json, Seed, deliver, whole_numbers
from epmoe.core.draws import draw as drawing
from epmoe.core.errors import InputError
from epmoe.core.placement import Placement, parse_placement
from epmoe.core.plan import Plan, RankPlan, Wire, plan
from epmoe.core.shape import MoEShape, named_shape
from epmoe.core.tables import WholeTable


def render(plan: Plan) -> RenderableType:
    """One plan: a headline, every rank's floor, and every scheme's bytes."""
    slowest = plan.slowest
    return Group(
        Text(headline(plan), style="bold"),
        Text(
            f"{_routing(plan)}; memory at {_rate(slowest.floor.bandwidth)} ({plan.bandwidth_source})"
        ),
        _rank_table(plan),
        _wire_table(plan),
    )


def headline(plan: Plan) -> str:
    """One sentence: what binds the slowest rank, and the floor in microseconds."""
    slowest, sizes = plan.slowest, plan.shape
    return (
        f"{sizes['name']} (H {sizes['hidden']}, I {sizes['intermediate']}, E {sizes['experts']}, K {sizes['topk']}), "
        f"EP {plan.ep}, T {_tokens(plan)}, {plan.dtype} on {plan.gpu}: at least "
        f"{plan.floor_seconds * 1e6:,.1f} us, {slowest.floor.bound}-bound"
    )


def render_sweep(plans: Sequence[Plan]) -> RenderableType:
    """Several plans of one layer, one row each: the floor and its terms on the slowest rank, rows and wire time."""
    if not plans:
        raise InputError("there is no plan to show: give at least one number of tokens")
    first = plans[0]
    table = _table(f"{first.shape['name']}, EP {first.ep}, {first.dtype} on {first.gpu}")
    table.numbers("T", "active", "weights", "compute", "floor", "bound", *_short_names(first))
    for one in plans:
        table.add_row(*_sweep_cells(one))
    note = (
        "Microseconds on the slowest rank; the last columns are the wire time, out and back, of each exchange.\n"
        f"{_routing(first)}; memory at {_rate(first.slowest.floor.bandwidth)} ({first.bandwidth_source})"
    )
    return Group(table, Text(note))


def plan_command(
    shape: Annotated[str, typer.Option(help="A named shape.")] = "glm-5.3-flash",
    ep: Annotated[int, typer.Option(min=1, help="Ranks of the expert group.")] = 4,
    tokens: Annotated[
        str, typer.Option(help="Tokens per rank; several, with commas, make a table.")
    ] = "1,2,4,8,16,32,64,128",
    gpu: Annotated[
        str,
        typer.Option(help="h100, h200, b200, or custom:TB/s,TFLOP/s,GB/s (memory, bf16, link)."),
    ] = "h200",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float8.")] = "bfloat16",
    placement: Annotated[
        str, typer.Option(help="contiguous, round_robin or a file.")
    ] = "contiguous",
    capacity: Annotated[
        int | None,
        typer.Option(help="Capacity in tokens per rank; as many as there are if left out."),
    ] = None,
    draw: Annotated[
        str | None,
        typer.Option(help="Count one exact draw of this kind (see check) instead of expecting."),
    ] = None,
    seed: Seed = 0,
    json_to: Json = None,
) -> None:
    """How fast can this layer be at all, and what has to travel? In expectation, or for one exact draw."""
    sizes = named_shape(shape)
    placed = parse_placement(placement, sizes.experts, ep)
    options = {"placement": placed, "dtype": dtype, "capacity": capacity}
    plans = [
        plan(sizes, ep, count, gpu, _draws(draw, count, sizes, placed, seed), **options)
        for count in whole_numbers("tokens", tokens)
    ]
    table = render(plans[0]) if len(plans) == 1 else render_sweep(plans)
    deliver([asdict(one) for one in plans], json_to, table)


def _draws(
    kind: str | None, tokens: int, sizes: MoEShape, placement: Placement, seed: int
) -> list[Tensor] | None:
    """topk_ids of every rank, or None for the expectation."""
    if kind is None:
        return None
    seeds = range(seed * placement.ranks, (seed + 1) * placement.ranks)
    return [drawing(kind, tokens, sizes.topk, placement, one)[0] for one in seeds]


def _table(title: str) -> WholeTable:
    return WholeTable(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )


def _short_names(plan: Plan) -> list[str]:
    return [wire.scheme.replace("_capacity", "").replace("_", "\n") for wire in plan.wires]


def _sweep_cells(plan: Plan) -> tuple[str, ...]:
    least = plan.slowest.floor
    times = (least.weight_seconds, least.compute_seconds, least.seconds)
    wires = (wire.seconds(plan.link_bandwidth) for wire in plan.wires)
    return (
        _tokens(plan),
        f"{plan.slowest.active_experts:.1f}",
        *(f"{seconds * 1e6:,.1f}" for seconds in times),
        least.bound,
        *(f"{seconds * 1e6:,.2f}" for seconds in wires),
    )


def _rank_table(plan: Plan) -> WholeTable:
    table = _table("The floor of every rank, in microseconds")
    columns = ("rank", "T", "active", "of", "pairs", "bytes", "weights", "rows", "compute", "floor")
    table.numbers(*columns, "bound")
    for _, equal in groupby(plan.ranks, key=_all_but_rank):
        ranks = list(equal)
        name = str(ranks[0].rank) if len(ranks) == 1 else f"{ranks[0].rank}-{ranks[-1].rank}"
        table.add_row(name, *_rank_cells(ranks[0]))
    return table


def _rank_cells(rank: RankPlan) -> tuple[str, ...]:
    least = rank.floor
    times = (least.weight_seconds, least.activation_seconds, least.compute_seconds, least.seconds)
    return (
        str(rank.tokens),
        f"{rank.active_experts:.1f}",
        str(rank.local_experts),
        f"{rank.assignments:,.1f}",
        _bytes(least.weight_bytes),
        *(f"{seconds * 1e6:,.2f}" for seconds in times),
        least.bound,
    )


def _wire_table(plan: Plan) -> Group:
    table = _table(f"Bytes that leave the busiest rank; {_rate(plan.link_bandwidth)} per direction")
    table.words("scheme")
    table.numbers("out", "back", "wire us", "rows / needed")
    for wire in plan.wires:
        table.add_row(*_wire_cells(wire, plan.link_bandwidth))
    return Group(table, *(Text(_row_format(wire)) for wire in plan.wires))


def _wire_cells(wire: Wire, link_bandwidth: float) -> tuple[str, ...]:
    return (
        wire.scheme,
        _bytes(max(wire.dispatch_bytes)),
        _bytes(max(wire.combine_bytes)),
        f"{wire.seconds(link_bandwidth) * 1e6:,.2f}",
        f"{wire.rows_per_needed:.2f}",
    )


def _row_format(wire: Wire) -> str:
    out = f"{wire.dispatch_row} ({wire.dispatch_row_bytes:,} B)"
    return f"  {wire.scheme}: a row is {out}; it returns as {wire.combine_row} ({wire.combine_row_bytes:,} B)"


def _all_but_rank(rank: RankPlan) -> tuple:
    return (rank.tokens, rank.local_experts, rank.active_experts, rank.assignments, rank.floor)


def _tokens(plan: Plan) -> str:
    counts = [rank.tokens for rank in plan.ranks]
    return str(counts[0]) if len(set(counts)) == 1 else "/".join(map(str, counts))


def _routing(plan: Plan) -> str:
    kind = "one draw, counted" if plan.exact else "uniform routing, in expectation"
    return f"{kind}; {plan.placement} placement"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} B"


def _rate(bytes_per_second: float) -> str:
    return (
        f"{bytes_per_second / 1e12:.2f} TB/s"
        if bytes_per_second >= 1e12
        else f"{bytes_per_second / 1e9:,.0f} GB/s"
    )
