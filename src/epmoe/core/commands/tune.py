"""Leads `epmoe tune`: one number of tokens after the other, with progress; every result is kept at once."""

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from epmoe.core import own_file, tune
from epmoe.core.commands.terminal import check_file, whole_numbers
from epmoe.core.errors import InputError
from epmoe.core.groups import EPGroup
from epmoe.core.ranks.torchrun import speaks, world_size
from epmoe.core.shape import named_shape
from epmoe.core.values import named_dtype


def guide(
    console: Console,
    stage: str,
    shape: str,
    ep: int,
    tokens: str,
    loopback: bool,
    device: str,
    dtype: str,
    candidates: int,
    out: Path | None,
    timeout: float,
) -> tuple[dict[str, Any], Table]:
    """Tune, and return the file's content and a table of this run's entries. Arguments as the command's options."""
    tuner, path = tune.tuner_of(stage), out or own_file.default_file()
    check_file(path, makes_folders=True)  # $EPMOE_TUNING may name it too
    data, sizes, counts = own_file.load(path), named_shape(shape), whole_numbers("tokens", tokens)
    if 0 in counts:
        raise InputError(f"tokens={tokens!r}: give numbers from 1, without tokens nothing is timed")
    ranks = ep if loopback else world_size(ep)
    table = Table("T", "", *tuner.columns, "tried", "failed", box=box.SIMPLE_HEAD)
    with (
        tune.runner(ranks, loopback, device, timeout) as (run, where),
        Progress(console=console) as bar,
    ):
        step = bar.add_task(f"tuning {stage} on {where}", total=len(counts))
        for count in counts:
            bar.update(step, description=f"tuning T={count} on {where}")
            request = tune.Request(
                shape=sizes,
                ranks=ranks,
                rank=0 if loopback else None,
                tokens=count,
                dtype=named_dtype(dtype, where),
                candidates=candidates,
            )
            found = run(_kept(data, tuner), request)
            entry = found or run(_tuned(tuner), request)
            if found is None:
                _keep(data, entry, path)
            table.add_row(
                str(count),
                "kept" if found else "new",
                *tuner.cells(entry),
                *(str(entry.get(how_many, "-")) for how_many in ("tried", "failed")),
            )
            bar.advance(step)
    console.print(f"entries in {path}: {len(data[own_file.TILES])}", style="dim", highlight=False)
    return data, table


def _kept(data: dict[str, Any], tuner: tune.Tuner) -> tune.Program:
    """Gives the entry that is there already, or None. Rank 0's file counts: other hosts may have none."""
    entries = data[own_file.TILES]

    def find(group: EPGroup, request: tune.Request) -> dict[str, Any] | None:
        key = tuner.situation(group, request)
        return next((one for one in entries if tune.matches(one, key)), None)

    return find


def _tuned(tuner: tune.Tuner) -> tune.Program:
    """Measures an entry, where there is room for the weights."""

    def measure(group: EPGroup, request: tune.Request) -> dict[str, Any]:
        tune.check_memory(group, request)
        return tuner.tune(group, request)

    return measure


def _keep(data: dict[str, Any], entry: dict[str, Any], path: Path) -> None:
    """Into the file, at once. Under torchrun every rank has the entry, and rank 0 writes it."""
    device = entry.pop("device")
    own_file.check_device(data, device, path)
    if speaks():
        own_file.add(data, own_file.TILES, device, entry, path)
    else:
        data[own_file.TILES].append(entry)
