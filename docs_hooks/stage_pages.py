"""Pages that are made from a stage's folder: its card, what changed, its exercises, and one page per source file."""

import re
from pathlib import Path

from docs_hooks.diffs import Change, changes, stages
from docs_hooks.markdown import fence

_SHOWN = (
    "src/epmoe/core/**/*.py",
    "stages/*/epmoe/**/*.py",
    "stages/*/exercises/*.py",
    "stages/*/tests/*.py",
    "examples/*/src/**/*.py",
    "examples/*/tests/test_*.py",
)
_NO_SEARCH = "---\nsearch:\n  exclude: true\n---\n\n"


def title_of(stage: Path) -> str:
    """The stage's own words for itself: the title of its README."""
    return (stage / "README.md").read_text().splitlines()[0].removeprefix("# ").strip()


def card(stage: Path, root: Path) -> str:
    """README as a page: paths that name files of the project become links to their source pages."""
    text = (stage / "README.md").read_text()
    head, _, rest = text.partition("\n")
    links = "[Walkthrough](walkthrough.md){ .md-button .md-button--primary } [What changed](changes.md){ .md-button } "
    links += "[Exercises](exercises.md){ .md-button } [See its tokens move](../../play/tokens.md){ .md-button }"
    if not (stage / "walkthrough.py").is_file():
        links = links.replace(
            "[Walkthrough](walkthrough.md){ .md-button .md-button--primary } ", ""
        )
    rest = re.sub(r"`([\w./]+\.py)`", lambda m: _linked(m, stage, root), rest)
    return f"{head}\n\n{links}\n{{ .wt-buttons }}\n{rest}"


def _linked(match: re.Match[str], stage: Path, root: Path) -> str:
    """`name.py` -> a link to its source page, where exactly one file of the stage or the core is meant."""
    name = match[1]
    files = [str(path.relative_to(root)) for path in source_files(root)]
    for start in (f"stages/{stage.name}/", "src/epmoe/core/", ""):
        found = [f for f in files if f.startswith(start) and f"/{f}".endswith(f"/{name}")]
        if len(found) == 1:
            return f"[`{name}`](../../source/{found[0]}.md)"
    return match[0]


def link_files(text: str, stage: Path, root: Path) -> str:
    """Link the files that a walkthrough's card names."""

    def paragraph(match: re.Match[str]) -> str:
        return re.sub(r"`([\w./]+\.py)`", lambda m: _linked(m, stage, root), match[0])

    return re.sub(r"\*\*Files?\*\*.*?(?=\n\s*\n)", paragraph, text, count=1, flags=re.DOTALL)


def source_files(root: Path) -> list[Path]:
    """Every file that has a page of its own."""
    found = {path for pattern in _SHOWN for path in root.glob(pattern)}
    return sorted(path for path in found if path.stat().st_size)


def source_page(path: Path, root: Path) -> str:
    """One whole file, without the region markers."""
    name = path.relative_to(root)
    lines = [line for line in path.read_text().splitlines() if "--8<--" not in line]
    return f"{_NO_SEARCH}# `{name}`\n\n{fence(chr(10).join(lines), '{ .python .whole-file }')}\n"


def changes_page(stage: Path, root: Path) -> str:
    """What this stage changes, file by file; lines marked `# New:` first."""
    all_stages = stages(root)
    place = all_stages.index(stage)
    if place == 0:
        return (
            f"# What changed: {title_of(stage)}\n\nNothing: this is the first rung. Every later stage has a page like "
            "this one, with its difference to the stage before. Start with [the walkthrough](walkthrough.md).\n"
        )
    before = all_stages[place - 1]
    found = changes(root, before, stage)
    compared = [change for change in found if change.before]
    fresh = [change for change in found if not change.before]
    parts = [
        f"# What changed: {title_of(stage)}",
        f"Against [{title_of(before).lower()}](../{before.name}/index.md), made from the two folders as this site was "
        "built. Docstrings, imports and region markers are left out. The prose that explains each change is in "
        "[the walkthrough](walkthrough.md#the-difference-to-the-stage-before).",
        _new_lines(found),
        *(_compared(change, before.name, stage.name) for change in compared),
    ]
    if not compared:
        parts.append(
            "No file takes over from one of that stage: everything here is new, and stands beside it."
        )
    if fresh:
        rows = "\n".join(f"| [`{c.name}`](../../source/{c.after}.md) | {c.lines} |" for c in fresh)
        parts.append(f"## New files\n\n| file | lines |\n|---|---:|\n{rows}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _new_lines(found: list[Change]) -> str:
    rows = [
        f"| [`{c.name}`](../../source/{c.after}.md) | {words} |"
        for c in found
        for _, words in c.new
    ]
    if not rows:
        return ""
    return (
        "## The lines that matter\n\nMarked `# New:` in the code.\n\n| file | what is new |\n|---|---|\n"
        + "\n".join(rows)
    )


def _compared(change: Change, before: str, after: str) -> str:
    head = (
        f"## {change.name}\n\n[`{change.before}`](../../source/{change.before}.md) → "
        f"[`{change.after}`](../../source/{change.after}.md): {change.added} lines added, {change.removed} removed."
    )
    if not change.diff:
        return f"{head} Not a line differs."
    return f'{head}\n\n```{{ .diff .wt-diff }}\n--8<-- "diff/{before}--{after}/{change.name}.diff"\n```'


def exercises_page(stage: Path, root: Path) -> str:
    """exercises/README.md with folded hints as the site's own, and each skeleton shown with its command."""
    text = (stage / "exercises" / "README.md").read_text()
    text = re.sub(
        r"`(stages/[\w/]+\.py|[\w/]+\.py)`", lambda m: _exercise_link(m, stage, root), text
    )
    skeletons = sorted((stage / "exercises").glob("*_skeleton.py"))
    parts = [
        _fold(text),
        "## The skeletons\n\nFill the marked region and run the file; the suite holds every skeleton to its solution, "
        f"so neither can go stale: `pytest stages/{stage.name}/tests/test_exercises.py`.",
    ]
    for path in skeletons:
        name = path.relative_to(root)
        body = fence(path.read_text().rstrip(), f'{{ .python title="{name}" }}')
        parts.append(f"### {path.stem.removesuffix('_skeleton').replace('_', ' ')}\n\n{body}\n\n"
                     f"Checks itself: `python {name}`")  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _exercise_link(match: re.Match[str], stage: Path, root: Path) -> str:
    shown = {str(p.relative_to(root)) for p in source_files(root)}
    for path in (
        match[1],
        f"stages/{stage.name}/exercises/{match[1]}",
        f"stages/{stage.name}/{match[1]}",
    ):
        if path in shown:
            return f"[`{match[1]}`](../../source/{path}.md)"
    return match[0]


_FOLD = re.compile(r"^(?P<indent> *)<details><summary>(?P<title>[^<]*)</summary>\n(?P<body>.*?)\n(?P=indent)</details>",
                   re.MULTILINE | re.DOTALL)  # fmt: skip


def _fold(text: str) -> str:
    """<details> of a README as the site's folded admonitions, indented like what they belong to."""

    def one(match: re.Match[str]) -> str:
        indent, title = match["indent"], match["title"].strip()
        kind = {"Hint": "tip", "Answer": "success"}.get(title, "question")
        cut = len(indent)
        body = "\n".join(
            f"{indent}    {line[cut:] if line[:cut].strip() == '' else line}".rstrip()
            for line in match["body"].strip("\n").splitlines()
        )
        return f'{indent}??? {kind} "{title}"\n{body}\n'

    return _FOLD.sub(one, text)
