"""What a page needs beside pictures: a counted run, an aligned table, a test's real output, committed measurements."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from epmoe.core.cases import Case
from epmoe.core.errors import InputError
from epmoe.core.launch import RankPool
from epmoe.core.shape import SHAPES
from epmoe.core.verify import CaseReport, report, run_case

NOT_MEASURED = "not measured yet"


def counted(
    pool: RankPool, stage: str, tokens: Sequence[int], kind: str = "uniform", shape: str = "tiny"
) -> tuple[dict[str, float], str]:
    """One call of `stage` that declares its largest T, held against the oracle on every rank.

    Args:
        pool: as many ranks as `tokens` names, at least.
        stage, kind, shape: names, see `registry`, `draws` and `shape`.
        tokens: T of every rank.

    Returns:
        what it cost (collectives, host syncs and launches of the busiest rank; KiB sent and rows of all ranks), and
        the verdict in words.
    """
    calls_of_one = (tuple(tokens),)
    case = Case(
        stage=stage,
        shape=SHAPES[shape],
        tokens=calls_of_one,
        kind=kind,
        poison=False,
        declared=True,
    )
    reports: list[CaseReport] = pool.run(run_case, case, ranks=len(tokens))
    calls = [r.calls[0] for r in reports]
    counts: dict[str, float] = {
        "collectives": max(len(c.ledger["collectives"]) for c in calls),
        "host syncs": max(c.ledger["host_syncs"] for c in calls),
        "launches": max(c.ledger["launches"] for c in calls),
        "KiB sent": sum(c.ledger["wire_bytes"] for c in calls) / 1024,
        "rows done": sum(c.ledger["rows_computed"] for c in calls),
        "needed": sum(c.rows_needed for c in calls),
    }
    return counts, report(reports)


def table(rows: Mapping[str, Mapping[str, object]], corner: str = "") -> str:
    """Rows of named columns as aligned text; numbers to the right, floats with one place."""
    if not rows:
        raise InputError("no row to show: give at least one")
    names = list(next(iter(rows.values())))
    lines = [[corner, *names], *([k, *(_cell(row[n]) for n in names)] for k, row in rows.items())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names) + 1)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cell(value: object) -> str:
    if isinstance(value, float) and not value.is_integer():
        return f"{value:,.1f}"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def prove(*arguments: str) -> None:
    """Run pytest from the repository's root and print its verdict, without times, which differ from run to run.

    Raises:
        AssertionError: a test failed; the message is pytest's output.
    """
    command = [sys.executable, "-m", "pytest", "-v", "--no-header", "--color=no"]
    command += ["-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *arguments], cwd=root(), capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise AssertionError(f"pytest {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    print(f"$ pytest -v {' '.join(arguments)}")
    for line in done.stdout.splitlines():
        match = re.match(r"\S+::(\S+) PASSED", line)
        if match:
            print(f"  {match.group(1)} PASSED")
    print(re.sub(r"=+ (.*?) in .*", r"\1", done.stdout.strip().splitlines()[-1]))


def root() -> Path:
    """The repository that this is run in. Raises InputError outside of one."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "pyproject.toml").is_file() and (folder / "stages").is_dir():
            return folder
    raise InputError(f"{Path.cwd()} is not inside a clone of the repository: run it in one")


def layer_results(folder: Path | None = None) -> list[dict[str, Any]]:
    """Committed runs of `epmoe bench` (JSON of kind "layer"), by file name; an empty list when there is none.

    Raises:
        InputError: a file is no JSON object.
    """
    folder = folder or root() / "benchmarks" / "results"
    found = []
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        data = json.loads(file.read_text())
        if not isinstance(data, dict):
            raise InputError(f"{file} holds a {type(data).__name__}: a result is a JSON object")
        if data.get("kind") == "layer":
            found.append(data)
    return found


def measured(stage: str, folder: Path | None = None) -> str:
    """The times of `stage` (its registered name) in all committed runs as a table, or the words "not measured yet".

    Of several runs in one setting the one with most sizes counts, then the newest.
    """
    found: dict[tuple[str, int], dict[str, object]] = {}
    for result in sorted(
        layer_results(folder), key=lambda one: (len(one["points"]), one["created"])
    ):
        setting = result["setting"]
        ranks = f"EP={setting['ep']}{' loopback' if setting['loopback'] else ''}"
        for point in result["points"]:
            times = point["subjects"].get(stage)
            if times is None or times["median_us"] is None:
                continue
            where = f"{result['machine']['device']}, {ranks}, {times['mode']}"
            floors = times["over_floor"]
            found[where, point["tokens"]] = {
                "microseconds": times["median_us"],
                "time / floor": f"{floors[0]:.2f}" if floors else "-",
            }
    rows = {f"{where}, T={tokens}": found[where, tokens] for where, tokens in sorted(found)}
    return table(rows, "whole layer") if rows else NOT_MEASURED


def times(stage: str, runs: Mapping[str, str], folder: Path | None = None) -> str:
    """Microseconds of `stage` by size, a row for each of `runs`: words -> name of a committed result."""
    folder, rows = folder or root() / "benchmarks" / "results", {}
    for words, name in runs.items():
        run = json.loads((folder / f"{name}.json").read_text())
        rows[words] = {
            f"T={point['tokens']}": round(point["subjects"][stage]["median_us"])
            for point in _by_size(run)
        }
    return table(rows, "")


def ablations(stage: str, folder: Path | None = None) -> str:
    """Microseconds that `stage` loses without one of its fusions, in every committed run that switched one off."""
    shown = []
    for run in layer_results(folder):
        without: dict[str, dict[str, str]] = {}
        for point in _by_size(run):
            whole = point["subjects"].get(stage, {}).get("median_us")
            for name, one in point["subjects"].items():
                if name.startswith(f"{stage}:-") and one["median_us"] and whole:
                    cells = without.setdefault(name.split(":-")[1], {})
                    cells[f"T={point['tokens']}"] = f"{one['median_us'] - whole:+.1f}"
        if without:
            setting = run["setting"]
            place = "one GPU's share of" if setting["loopback"] else "real ranks,"
            shown.append(table(without, f"{place} EP={setting['ep']}, without"))
    return "\n\n".join(shown) or NOT_MEASURED


def _by_size(run: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(run["points"], key=lambda point: point["tokens"])
