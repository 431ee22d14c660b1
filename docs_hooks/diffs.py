"""What changed between neighbouring stages, as unified diffs that pages include.

Docstrings, region markers and imports are taken out, so that a diff shows the idea and not the housekeeping. A file
that the stage before does not have is compared with the file whose work it takes over.
"""

import ast
import difflib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

# file of a later stage -> what it takes over from, where the names differ
TAKES_OVER = {
    ("02_fixed_capacity", "exchange.py"): "stages/01_variable_a2a/epmoe/variable_a2a/layer.py",
    ("02_fixed_capacity", "experts.py"): "src/epmoe/core/experts.py",
    ("02_fixed_capacity", "layer.py"): None,  # nothing but assembly
}
CONTEXT = 2


@dataclass(frozen=True)
class Change:
    """One file of a stage against what did its work before.

    Attributes:
        name: of the file, in the stage's package.
        before, after: paths from the root; before is None for a new file.
        diff: unified, without headers; empty for a new file.
        new: (line number, text) of the lines marked `# New:`.
        lines: of the file.
    """

    name: str
    before: str | None
    after: str
    diff: str
    new: tuple[tuple[int, str], ...]
    lines: int

    @property
    def added(self) -> int:
        return sum(line.startswith("+") for line in self.diff.splitlines())

    @property
    def removed(self) -> int:
        return sum(line.startswith("-") for line in self.diff.splitlines())


def stages(root: Path) -> list[Path]:
    """Stages that present themselves: a README and a package; in ladder order."""
    found = (p.parent for p in root.glob("stages/[0-9][0-9]_*/README.md"))
    return sorted(stage for stage in found if (stage / "epmoe").is_dir())


def changes(root: Path, before: Path, after: Path) -> list[Change]:
    """Every file of `after`'s package, compared ones first."""
    found = []
    for path in sorted(_package(after).rglob("*.py")):
        if path.name == "__init__.py":
            continue
        name = str(path.relative_to(_package(after)))
        origin = _origin(root, before, after, name)
        found.append(
            Change(
                name=name,
                before=str(origin.relative_to(root)) if origin else None,
                after=str(path.relative_to(root)),
                diff=diff(origin, path) if origin else "",
                new=tuple(_marked(path)),
                lines=len(path.read_text().splitlines()),
            )
        )
    return sorted(found, key=lambda change: (not change.diff, change.name))


def _package(stage: Path) -> Path:
    return stage / "epmoe" / stage.name.split("_", 1)[1]


def _origin(root: Path, before: Path, after: Path, name: str) -> Path | None:
    if (after.name, name) in TAKES_OVER:
        known = TAKES_OVER[after.name, name]
        return root / known if known else None
    same = _package(before) / name
    return same if same.is_file() else None


def diff(before: Path, after: Path) -> str:
    """Unified diff of two Python files without docstrings, imports and region markers."""
    old, new = (bare(p.read_text()) for p in (before, after))
    lines = difflib.unified_diff(old, new, lineterm="", n=CONTEXT)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++")))


def bare(text: str) -> list[str]:
    """Lines of a module without what does not belong to the idea."""
    drop: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            drop |= set(range(node.lineno, node.end_lineno + 1))  # pyright: ignore[reportOptionalOperand]
        body = getattr(node, "body", None)
        holds = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if (
            holds
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            drop |= set(range(body[0].lineno, body[0].end_lineno + 1))  # pyright: ignore[reportOptionalOperand]
    kept = [
        line
        for number, line in enumerate(text.splitlines(), 1)
        if number not in drop and "--8<--" not in line
    ]
    squeezed: list[str] = []
    for line in kept:
        if line.strip() or (squeezed and squeezed[-1].strip()):
            squeezed.append(line)
    return squeezed


def _marked(path: Path) -> list[tuple[int, str]]:
    lines = path.read_text().splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        match = re.search(r"# New: (.*)", line)
        if match:
            found.append((number, match.group(1).strip()))
    return found


def write(root: Path, folder: Path) -> list[Path]:
    """NN_before--NN_after/FILE.diff for every compared file, below `folder`/diff; only what differs is written."""
    written = []
    found = stages(root)
    for before, after in itertools.pairwise(found):
        for change in changes(root, before, after):
            if not change.before:
                continue
            path = folder / "diff" / f"{before.name}--{after.name}" / f"{change.name}.diff"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_file() or path.read_text() != change.diff + "\n":
                path.write_text(change.diff + "\n")
            written.append(path)
    return written
