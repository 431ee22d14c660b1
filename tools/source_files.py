"""Finding and reading the project's own files, for the checks of the source tree."""

import ast
import os
import subprocess
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

SKIPPED_FOLDERS = {
    ".git",
    ".venv",
    ".venv-vllm",
    ".cache",
    ".gpu",
    ".hypothesis",
    "__pycache__",
    "site",
    "dist",
}
TEXT_ENDINGS = (".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".sh", ".js", ".css", ".html", "")


def files(root: Path, pattern: str) -> Iterator[Path]:
    """Files below `root` whose names match, in order; folders of tools and outputs are not entered."""
    for folder, below, names in os.walk(root):
        below[:] = sorted(set(below) - SKIPPED_FOLDERS)
        yield from (Path(folder) / name for name in sorted(names) if fnmatch(name, pattern))


def python_files(root: Path) -> Iterator[Path]:
    """All .py files below `root`."""
    return files(root, "*.py")


def tracked(root: Path) -> Iterator[Path]:
    """Text files that belong to the project: what git does not ignore, or everything where there is no git."""
    if not (root / ".git").exists():
        yield from (p for p in files(root, "*") if p.suffix in TEXT_ENDINGS)
        return
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    paths = (root / name for name in sorted(listed.split("\0")) if name)
    yield from (
        p for p in paths if p.suffix in TEXT_ENDINGS and p.is_file() and p.name != "LICENSE"
    )


def assigned(module: Path) -> set[str]:
    """Names that a module assigns at its top level."""
    names = set()
    for node in ast.parse(module.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def imported(path: Path, root: Path) -> Iterator[str]:
    """Second parts of all `epmoe.<name>` that a file imports, by statement, relatively or by import_module."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from _second_parts(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            base = start + (node.module or "")
            yield from _second_parts(
                [base, *(f"{base.rstrip('.')}.{alias.name}" for alias in node.names)]
            )
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            yield from _second_parts(a.value for a in node.args if isinstance(a, ast.Constant))


def _second_parts(names: Iterable[object]) -> Iterator[str]:
    for name in names:
        parts = str(name).split(".")
        if parts[0] == "epmoe" and len(parts) > 1:
            yield parts[1]


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def kernels(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Functions decorated with triton.jit: (name, lines from def to end without the docstring)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(
            "jit" in ast.unparse(d) for d in node.decorator_list
        ):
            doc = node.body[0]
            is_doc = isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
            skipped = doc.end_lineno - doc.lineno + 1 if is_doc and doc.end_lineno else 0
            yield node.name, (node.end_lineno or 0) - node.lineno + 1 - skipped
