"""`epmoe check`: a stage against the oracle over a grid of draws and seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.progress import Progress

from epmoe.core.cases import Case
from epmoe.core.commands.terminal import whole_numbers
from epmoe.core.draws import KINDS
from epmoe.core.errors import InputError
from epmoe.core.launch import open_ranks
from epmoe.core.placement import parse_placement
from epmoe.core.shape import named_shape
from epmoe.core.tables import WholeTable
from epmoe.core.values import named_dtype
from epmoe.core.verify import CaseReport, run_case


@dataclass(frozen=True)
class Outcome:
    """One case and what every rank reported."""

    case: Case
    reports: list[CaseReport]

    @property
    def right(self) -> bool:
        return all(report.right for report in self.reports)

    def as_dict(self) -> dict:
        return {
            "draw": self.case.kind,
            "seed": self.case.seed,
            "right": self.right,
            "ranks": [report.as_dict() for report in self.reports],
        }


def cases(
    stage: str,
    shape: str,
    tokens: str,
    draw: str,
    ranks: int,
    seeds: int,
    placement: str = "contiguous",
) -> list[Case]:
    """Every draw with every seed; in call i rank r brings tokens[i] - r tokens, at least none."""
    if draw != "all" and draw not in KINDS:
        raise InputError(f"draw={draw!r}: choose all, {', '.join(KINDS)}")
    sizes = named_shape(shape)
    placed = parse_placement(placement, sizes.experts, ranks)
    calls = tuple(
        tuple(max(0, t - r) for r in range(ranks)) for t in whole_numbers("tokens", tokens)
    )
    return [
        Case(
            stage=stage,
            shape=sizes,
            tokens=calls,
            kind=kind,
            placement=placed,
            seed=seed,
            check=True,
        )
        for kind in (KINDS if draw == "all" else (draw,))
        for seed in range(seeds)
    ]


def run(
    console: Console, cases: Sequence[Case], ranks: int, device: str, dtype: str, timeout: float
) -> list[Outcome]:
    """Run the cases one after the other on one set of ranks."""
    outcomes = []
    with open_ranks(ranks, device) as pool, Progress(console=console, transient=True) as progress:
        console.print(pool.describe(), style="dim", highlight=False)
        for case in progress.track(cases, description=f"checking {cases[0].stage}"):
            case = replace(case, dtype=named_dtype(dtype, pool.choice.device_type))
            outcomes.append(Outcome(case, pool.run(run_case, case, timeout=timeout)))
    return outcomes


def render(outcomes: Sequence[Outcome]) -> WholeTable:
    """One row per case, with its worst row."""
    table = WholeTable(box=box.SIMPLE_HEAD)
    table.words("draw")
    table.numbers("seed", "", "error", "allowed")
    table.words("worst at")
    for outcome in outcomes:
        rows = [report.worst for report in outcome.reports if report.worst]
        worst = max(rows, key=lambda row: row.error, default=None)
        numbers = (f"{worst.error:.1e}", f"{worst.tolerance:.1e}") if worst else ("-", "-")
        place = (
            f"rank {worst.rank}, call {worst.call}, row {worst.row}, expert {worst.expert}"
            if worst
            else "no rows"
        )
        problems = [p for report in outcome.reports for p in report.problems]
        mark = "[green]right[/green]" if outcome.right else "[bold red]WRONG[/bold red]"
        table.add_row(
            outcome.case.kind, str(outcome.case.seed), mark, *numbers, "; ".join([place, *problems])
        )
    return table
