"""Leads `epmoe tune`: one number of tokens after the other, with progress; every result is kept at once."""

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from epmoe.core import own_file, tune
from epmoe.core.commands.terminal import check_files, whole_numbers
from epmoe.core.errors import InputError
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
    check_files(path, makes_folders=True)  # $EPMOE_TUNING may name it too
    data, sizes, counts = own_file.load(path), named_shape(shape), whole_numbers("tokens", tokens)
    if 0 in counts:
        raise InputError(f"tokens={tokens!r}: give numbers from 1, without tokens nothing is timed")
    table = Table("T", "", "gate_up", "us", "down", "us", "tried", "failed", box=box.SIMPLE_HEAD)
    with (
        tune.runner(ep, loopback, device, timeout) as (run, where),
        Progress(console=console) as bar,
    ):
        step = bar.add_task(f"tuning {stage} on {where}", total=len(counts))
        for count in counts:
            bar.update(step, description=f"tuning T={count} on {where}")
            request = tune.Request(
                shape=sizes,
                ranks=ep,
                rank=0 if loopback else None,
                tokens=count,
                dtype=named_dtype(dtype, where),
                candidates=candidates,
            )
            found = _find(data, run(tuner.situation, request)) if data["entries"] else None
            entry = found or run(tuner.tune, request)
            if found is None:
                own_file.add(data, own_file.TILES, entry.pop("device"), entry, path)
            table.add_row(str(count), "kept" if found else "new", *_cells(entry))
            bar.advance(step)
    console.print(f"{len(data['entries'])} entries in {path}", style="dim", highlight=False)
    return data, table


def _find(data: dict[str, Any], key: dict[str, Any]) -> dict[str, Any] | None:
    return next((one for one in data["entries"] if tune.matches(one, key)), None)


def _cells(entry: dict[str, Any]) -> list[str]:
    took = entry.get("microseconds", {})
    cells = []
    for which in ("gate_up", "down"):
        one = entry[which]
        flags = "".join(f" {flag}" for flag in ("swap_ab", "tma", "tma_rows") if one.get(flag))
        tile = f"{one['block_m']}x{one['block_n']}x{one['block_k']} s{one['num_stages']} w{one['num_warps']}"
        cells += [tile + flags, str(took.get(which, "-"))]
    return [*cells, str(entry.get("tried", "-")), str(entry.get("failed", "-"))]
