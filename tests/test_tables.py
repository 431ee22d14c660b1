"""Tables of the commands at 60 and 80 columns: names wrap, numbers stay whole, nothing ends in an ellipsis."""

from io import StringIO

import pytest
import torch
from rich.console import Console

from epmoe.core import phase_times, registry, routing_stats
from epmoe.core.balance import balance
from epmoe.core.cases import Case
from epmoe.core.commands import balance as balancing
from epmoe.core.commands import check, doctor, stages, terminal
from epmoe.core.phase_times import PhaseTime
from epmoe.core.placement import contiguous
from epmoe.core.plan import plan
from epmoe.core.plan.render import render, render_sweep
from epmoe.core.shape import named_shape
from epmoe.core.tables import WholeTable
from epmoe.core.tour import StageRow, TourReport, view
from epmoe.core.verify import CaseReport

GLM = named_shape("glm-5.3-flash")


def tour(ranks: int) -> TourReport:
    book = {"collectives": ["all_gather"] * 3, "wire_bytes": 123_456_789, "host_syncs": 12}
    book |= {"launches": 1234, "rows_computed": 123_456}
    rows = [
        StageRow(stage=name, rank=rank, tokens=9, error=5.5e-07, tolerance=1e-5, ledger=book, rows_needed=99,
                 seconds=1.2345, graph_capturable=True)
        for name in registry.names() for rank in range(ranks)
    ]  # fmt: skip
    visits, owners = [[777] * 16] * ranks, [e * ranks // 16 for e in range(16)]
    return TourReport(
        where="", device="cpu", dtype="float32", layer="", rows=rows, visits=visits, owners=owners
    )


def phases() -> WholeTable:
    paths = [("call",), ("call", "dispatch"), ("call", "dispatch", "exchange")]
    seconds = (0.017623, 0.0009)
    return phase_times.render([PhaseTime(path=p, by_rank=seconds, waiting=seconds) for p in paths])


def routing():
    ids = [torch.randint(0, GLM.experts, (512, GLM.topk)) for _ in range(4)]
    stats = routing_stats.count_draw(ids, contiguous(GLM.experts, 4))
    return routing_stats.render(stats.with_delivered([1_234_567] * 4), [12.5] * 4)


def checked() -> WholeTable:
    case = Case(stage="01", shape=named_shape("toy"), tokens=((1, 1),), seed=1234567)
    return check.render([check.Outcome(case, [CaseReport(rank=0, layer={}, calls=[])])])


TABLES = {
    "tour": lambda: view.render(tour(4)),
    "tour of eight": lambda: view.render(tour(8)),
    "plan": lambda: render(plan(GLM, 4, 4096)),
    "sweep": lambda: render_sweep([plan(GLM, 4, tokens) for tokens in (1, 128, 65536)]),
    "stages": lambda: stages.listing()[1],
    "why": lambda: stages.why(stages.situation(device="cuda", arch="7.5", ranks=4))[1],
    "doctor": lambda: doctor.render(doctor.diagnose()),
    "phases": phases,
    "routing": routing,
    "balance": lambda: balancing.render({0: balance([1234567, *range(1, 64)], 4, 0)}),
    "check": checked,
}


def printed(monkeypatch, renderable, width: int) -> str:
    """What `deliver` prints on a terminal so wide."""
    page = StringIO()
    monkeypatch.setattr(terminal, "answers", Console(width=width, file=page))
    terminal.deliver({}, None, renderable)
    return page.getvalue()


def ink(text: str) -> str:
    """Everything but the white space and the frames."""
    return "".join(sorted(text.replace("\n", "").replace(" ", "").replace("─", "")))


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("name", TABLES)
def test_nothing_is_cut_off(name, width, monkeypatch):
    torch.manual_seed(0)
    text = printed(monkeypatch, TABLES[name](), width)
    torch.manual_seed(0)
    assert "…" not in text
    assert ink(text) == ink(printed(monkeypatch, TABLES[name](), 400))


@pytest.mark.parametrize("name", ["phases", "routing"])
def test_what_programs_print_themselves_fits_into_sixty_columns(name):
    """`rich.print` crops, so with usual numbers these tables may not be wider."""
    pages = []
    for width in (60, 400):
        torch.manual_seed(0)
        pages.append(StringIO())
        Console(width=width, file=pages[-1]).print(TABLES[name]())
    assert ink(pages[0].getvalue()) == ink(pages[1].getvalue())
