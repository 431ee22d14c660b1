"""`epmoe bench report`: the ladder table of README and the pages under docs/ladder, from committed JSON alone.

No number is typed: what is not in benchmarks/results says "not measured yet". `--check` compares and changes nothing.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from epmoe.core import registry
from epmoe.core.bench import headline, padding, pages, results
from epmoe.core.bench.plots import digest_of, with_digest
from epmoe.core.bench.results import Measured, Result
from epmoe.core.errors import InputError
from epmoe.core.figures.route import route_picture
from epmoe.core.toy import TOY

RESULTS, LEDGER, PAGES = "benchmarks/results", "ledger-cpu.json", "docs/ladder"
NOT_MEASURED = "not measured yet"
PICTURE = "docs/assets/route.svg"  # on README's first screen
LADDER_TOKENS = (1, 8, 128)
_HEADLINE = {"shape": "glm-5.3-flash", "dtype": "bfloat16", "routing": "uniform"}


def find_root(root: Path | None) -> Path:
    """The repository: `root`, or where this runs. Raises InputError elsewhere."""
    places = [root] if root else [Path.cwd(), *Path.cwd().parents]
    for place in places:
        if (place / "README.md").is_file() and (place / "stages").is_dir():
            return place
    raise InputError(f"no clone of the repository at {places[0]}: run inside one, or give --root")


def generate(root: Path, check: bool = False) -> list[str]:
    """Write what differs, or with `check` only name it. Returns the paths, and files that nobody makes any more."""
    wanted = everything(root)
    changed = []
    for name, text in wanted.items():
        path = root / name
        if path.is_file() and _same(path.read_text(), text, name):
            continue
        changed.append(name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    folder = root / PAGES
    for path in sorted(folder.glob("*")) if folder.is_dir() else []:
        name = str(path.relative_to(root))
        if name not in wanted:
            changed.append(name)
            if not check:
                path.unlink()
    return changed


def _same(held: str, wanted: str, name: str) -> bool:
    if name.endswith(".svg"):
        return digest_of(held) == digest_of(wanted)
    return held == wanted


def everything(root: Path) -> dict[str, str]:
    """path -> text of all that is generated."""
    measured, counted = read_results(root)
    stages = registry.names()
    tables = {"ladder": ladder(root, stages, measured), "against": against(stages, measured)}
    files = {"README.md": with_tables(root / "README.md", tables)}
    for name, result in measured.items():
        files |= pages.result_pages(name, result, PAGES)
    for name, (head, rows) in counted.items():
        files |= pages.padding_pages(name, head, rows, PAGES)
    files[PICTURE] = with_digest(route_picture(TOY, "variable_a2a"), TOY)
    files[f"{PAGES}/index.md"] = pages.index(measured, counted, NOT_MEASURED)
    return files


def read_results(
    root: Path,
) -> tuple[dict[str, Result], dict[str, tuple[dict, list[padding.PaddingRow]]]]:
    """Layer results and padding counts by file name, every one validated."""
    measured, counted = {}, {}
    for path in sorted((root / RESULTS).glob("*.json")):
        if path.name == LEDGER:
            continue
        kind = _kind(path)
        if kind == "layer":
            measured[path.stem] = results.load(path)
        elif kind == "padding":
            counted[path.stem] = padding.load(path)
    return measured, counted


def _kind(path: Path) -> str | None:
    """What a file says it is; results of other programs lie beside ours and are left alone."""
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    return data.get("kind") if isinstance(data, dict) else None


def ladder(root: Path, stages: Sequence[str], measured: Mapping[str, Result]) -> str:
    """The table, in Markdown."""
    return headline.markdown_table(*ladder_table(root, stages, measured, "stages/{}/README.md"), 2)


def ladder_table(
    root: Path, stages: Sequence[str], measured: Mapping[str, Result], link: str
) -> headline.Table:
    """Head and rows: what each stage does in one call, and its time over the floor; `link` makes links, of "{}"."""
    books, result = read_ledger(root / RESULTS / LEDGER), ladder_result(stages, measured)
    sizes = " / ".join(map(str, LADDER_TOKENS))
    place = f", {headline.where(result)}" if result else ""
    head = ["stage", "idea", "collectives", "host syncs", "launches"]
    rows = []
    for stage in stages:
        there = (root / f"stages/{stage}/README.md").is_file()
        rows.append(
            [
                f"[{stage}]({link.format(stage)})" if there else stage,
                registry.load(stage).summary,
                *books.get(stage, [NOT_MEASURED] * 3),
                over_floor_words(stage, result),
            ]
        )
    return [*head, f"time / floor at T = {sizes}{place}"], rows


def read_ledger(path: Path) -> dict[str, list[str]]:
    """stage -> collectives, host syncs and launches of one call on the busiest rank, from `epmoe tour --json`."""
    if not path.is_file():
        return {}
    try:
        rows = json.loads(path.read_text())["rows"]
        books: dict[str, list[tuple[int, int, int]]] = {}
        for row in rows:
            book = row["ledger"]
            one = (len(book["collectives"]), book["host_syncs"], book["launches"])
            books.setdefault(row["stage"], []).append(one)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not what `epmoe tour --json` writes: {error!r}") from error
    return {
        stage: [str(max(column)) for column in zip(*counts, strict=True)]
        for stage, counts in books.items()
    }


def over_floor_words(stage: str, result: Result | None) -> str:
    """time / floor of the stage at the ladder's sizes."""
    points = result.points if result else []
    found = {p.tokens: p.subjects[stage] for p in points if stage in p.subjects}
    if not any(found[t].over_floor for t in LADDER_TOKENS if t in found):
        return NOT_MEASURED
    eager = any(one.mode == "eager" for one in found.values())
    cells = " / ".join(_cell(found.get(tokens)) for tokens in LADDER_TOKENS)
    return cells + ", without a CUDA graph" * eager


def _cell(one: Measured | None) -> str:
    return f"{one.over_floor[0]:.2f}" if one and one.over_floor else "-"


def ladder_result(stages: Sequence[str], measured: Mapping[str, Result]) -> Result | None:
    """The one result that the ladder's times come from, so that rungs can be compared with each other.

    Of those of the shape of record on H200s, the one in which most stages ran, then most sizes, then the newest.
    """

    def worth(result: Result) -> tuple[int, int, str]:
        found = sum(over_floor_words(stage, result) != NOT_MEASURED for stage in stages)
        return found, len(result.points), result.created

    fitting = [
        result
        for result in measured.values()
        if "H200" in result.machine["device"]
        and {
            "shape": result.setting["shape"]["name"],
            **{k: result.setting[k] for k in ("dtype", "routing")},
        }
        == _HEADLINE
    ]
    best = max(fitting, key=worth, default=None)
    return best if best and worth(best)[0] else None


def against(stages: Sequence[str], measured: Mapping[str, Result]) -> str:
    """The last stage against vLLM, in Markdown."""
    head, rows = headline.against_vllm(measured, stages[-1])
    if not rows:
        return f"Against vLLM: {NOT_MEASURED}."
    return headline.markdown_table(head, rows, 2)


def with_tables(readme: Path, tables: Mapping[str, str]) -> str:
    """README's text with each table between its markers. Raises InputError where they are missing."""
    text = readme.read_text()
    for name, table in tables.items():
        begin, end = (f"<!-- {name}:{word} -->" for word in ("begin", "end"))
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise InputError(f"{readme}: put {begin} and {end}, once each, around the {name} table")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    return text
