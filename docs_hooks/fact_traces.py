"""What the page on observing shows: committed reports of `epmoe trace`, as the command prints them."""

import json
from io import StringIO

from docs_hooks.fact_tables import ROOT, fact
from rich.console import Console

from epmoe.core.phase_times import PhaseTime
from epmoe.core.timeline import Report
from epmoe.core.timeline.cli import render


def _report(name: str) -> Report:
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return Report.from_dict(json.loads(path.read_text()))


@fact
def trace_output(name: str) -> str:
    """The command and what it printed."""
    report = _report(name)
    console = Console(file=StringIO(), width=110)
    console.print(render(report))
    assert isinstance(console.file, StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    shown = "\n".join(line for line in lines if line)
    return f"```text\n$ {report.command}\n{shown}\n```"


@fact
def trace_us(name: str, path: str, what: str = "slowest") -> str:
    """One number of that report: of the phase call/dispatch/..., on its slowest or fastest rank, or waiting there."""
    time = _find(_report(name), path)
    seconds = {
        "slowest": max(time.by_rank),
        "fastest": min(time.by_rank),
        "waiting": time.waiting[time.slowest],
    }[what]
    return f"{seconds * 1e6:,.0f} µs"


def _find(report: Report, path: str) -> PhaseTime:
    return next(time for time in report.times if time.path == tuple(path.split("/")))


@fact
def trace_where(name: str) -> str:
    """The machine, in words."""
    report = _report(name)
    return f"{report.machine['device']}, {report.where}, torch {report.machine['torch']}"
