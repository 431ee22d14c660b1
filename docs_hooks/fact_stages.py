"""Tables about the stages: what each does, declares, takes and where it loses; results and the glossary."""

import json
import re
from typing import Any

from docs_hooks.fact_tables import ROOT, fact, markdown_table, measured_results

from epmoe.core import registry
from epmoe.core.bench import headline, report
from epmoe.core.commands.stages import SHOWN, offer


@fact
def ladder_table(to: str = "") -> str:
    """The ladder: what each stage does in one call, and its time over the floor where it was measured."""
    link = to + "{}/index.md"
    return markdown_table(*report.ladder_table(ROOT, registry.names(), measured_results(), link), 2)


@fact
def against_vllm_table() -> str:
    """Time of the last stage over vLLM's, wherever both were measured."""
    return markdown_table(*headline.against_vllm(measured_results(), registry.names()[-1]), 2)


@fact
def suite_table() -> str:
    """Runs of the conformance suite on GPUs, the fullest of each stage or pair, from records of `--record`."""
    fullest: dict[tuple[str, str], list[str]] = {}
    for path in sorted((ROOT / report.RESULTS).glob("suite-*.json")):
        run = json.loads(path.read_text())
        for stage, found in run["stages"].items():
            passed, *others = (str(found.get(o, 0)) for o in ("passed", "skipped", "failed"))
            place, commit = _place(run), run["machine"]["git_sha"][:12]
            row = [f"`{stage}`", place, commit, _whole(run), passed, *others]
            known = fullest.get((stage, place))
            if known is None or int(passed) >= int(known[4]):
                fullest[stage, place] = row
    head = ["stage or pair", "where", "commit", "suite", "passed", "skipped", "failed"]
    return markdown_table(head, [fullest[key] for key in sorted(fullest)], 4)


def _place(run: dict[str, Any]) -> str:
    """In few words: the record says which device each rank had."""
    where, device = run["where"], run["machine"]["device"].removeprefix("NVIDIA ")
    ranks, last = where.split()[0], re.search(r"to cuda:(\d+)", where)
    devices = f"{int(last[1]) + 1} {device}s" if last else f"one {device}"
    return f"{ranks} ranks, {devices}" if "share" in where else devices


def _whole(run: dict[str, Any]) -> str:
    checks = run.get("checks")
    if checks is None:
        return "?"  # the first records do not say how many checks there were
    return "whole" if checks["ended"] == checks["collected"] else "in part"


@fact
def time_split_table() -> str:
    """Where the time of the last stage and of vLLM's tuned layer goes on real ranks."""
    return markdown_table(*headline.time_split(measured_results(), registry.names()[-1]), 3)


@fact
def ledger_source() -> str:
    """Where the counts come from."""
    path = ROOT / report.RESULTS / report.LEDGER
    if not path.is_file():
        return "The counts are not measured yet: `epmoe tour --json benchmarks/results/ledger-cpu.json` makes them."
    data = json.loads(path.read_text())
    layer = data["layer"].replace("\n", ", ")
    return f"Counts: `{report.RESULTS}/{report.LEDGER}`, one call of `epmoe tour`, {data['where']}, {layer}."


@fact
def capabilities_table() -> str:
    """What every registered stage declares."""
    rows = []
    for name, stage in registry.loaded(registry.STAGES).items():
        can = stage.capabilities
        limits = [f"{n} ≤ {v}" for n, v in (("K", can.max_topk), ("E", can.max_experts)) if v]
        arch = f"compute capability {can.min_arch[0]}.{can.min_arch[1]}" if can.min_arch else "any"
        dtypes = ", ".join(str(d).removeprefix("torch.") for d in can.dtypes)
        rows.append(
            [
                f"`{name}`",
                dtypes,
                arch,
                *(offer(stage, flag) for flag in SHOWN),
                ", ".join(limits) or "none",
            ]
        )
    head = [
        "stage",
        "dtypes",
        "GPU",
        "CUDA graph",
        "deterministic",
        "batch invariant",
        "limits of its own",
    ]
    return markdown_table(head, rows, 7)


@fact
def options_table() -> str:
    """Options that stages take in `build`."""
    rows = [
        [f"`{stage}`", f"`{name}`", meaning.replace("|", "\\|")]
        for stage in registry.names()
        for name, meaning in registry.load(stage).options.items()
    ]
    return markdown_table(["stage", "option", "what it does"], rows, 3)


@fact
def where_they_lose() -> str:
    """The section "Where it loses" of every stage's README."""
    parts = []
    for readme in sorted(ROOT.glob("stages/[0-9][0-9]_*/README.md")):
        lines = readme.read_text().splitlines()
        title = lines[0].removeprefix("# ")
        text = "\n".join(lines)
        _, _, rest = text.partition("## Where it loses\n")
        if rest:
            body = rest.split("\n## ")[0].strip()
            parts.append(f"### [{title}](../stages/{readme.parent.name}/index.md)\n\n{body}")
    return "\n\n".join(parts)


@fact
def results_list() -> str:
    """Pages made of committed measurements."""
    pages = [p for p in sorted((ROOT / "docs/ladder").glob("*.md")) if p.stem != "index"]
    if not pages:
        return "No run on a GPU is committed: not measured yet."
    titles = {
        p: next((x[2:] for x in p.read_text().splitlines() if x.startswith("# ")), p.stem)
        for p in pages
    }
    return "\n".join(f"- [{title}](../ladder/{page.name})" for page, title in titles.items())


@fact
def command_help() -> str:
    """Every command with its options, from the program itself."""
    from docs_hooks.cli_pages import commands

    return commands()


@fact
def glossary() -> str:
    """includes/glossary.md as a definition list; the same lines make the tooltips."""
    entries = {}
    for line in (ROOT / "includes" / "glossary.md").read_text().splitlines():
        if line.startswith("*["):
            word, _, meaning = line[2:].partition("]: ")
            entries.setdefault(meaning, []).append(word)
    ordered = sorted(
        ((words[0], meaning) for meaning, words in entries.items()), key=lambda e: e[0].lower()
    )
    return "\n\n".join(f"**{word}**\n:   {meaning}" for word, meaning in ordered)
