"""The rules of the source tree, as functions from a root folder to a list of problems.

    python -m tools.check_layout        # prints every problem, exits 1 if there is one

`tests/test_layout.py` runs them too, and shows that each can fail.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

from tools.source_files import (
    SKIPPED_FOLDERS,
    assigned,
    files,
    imported,
    kernels,
    python_files,
    tracked,
)

STAGE_FOLDER = re.compile(r"^\d\d_[a-z][a-z0-9_]*$")
ORACLE = "reference"
MAX_FILE_LINES = 300
MAX_KERNEL_LINES = 60
# digits that belong to a dtype, a tensor, a model or a GPU, not to a place on the ladder
NAMED_DIGITS = re.compile(
    r"(?i)(bf16|fp(8|16|32|64)|int(4|8|32|64)|float(8|16|32|64)|w13|w2|glm4|qwen3|v3|h[12]00|b[23]00|sm\d+|2d|3d)"
)


def stages(root: Path) -> list[Path]:
    """The stage folders on disk, in ladder order."""
    folder = root / "stages"
    found = folder.iterdir() if folder.is_dir() else []
    return sorted(path for path in found if path.is_dir() and STAGE_FOLDER.match(path.name))


def package_of(stage: Path) -> str:
    """The name of a stage's package: its folder's name without the number."""
    return stage.name.split("_", 1)[1]


def check_lists(root: Path) -> list[str]:
    """pyproject's two folder lists name src and every stage on disk, in order."""
    build = _pyproject(root)["tool"]["hatch"]["build"]
    folders = [f"stages/{stage.name}" for stage in stages(root)]
    wanted = {
        "tool.hatch.build dev-mode-dirs": (build["dev-mode-dirs"], ["src", *folders]),
        "tool.hatch.build.targets.wheel packages": (
            build["targets"]["wheel"]["packages"],
            ["src/epmoe", *(f"{folder}/epmoe" for folder in folders)],
        ),
    }
    return [
        f"pyproject.toml: {name} is {listed}, the folders on disk ask for {on_disk}"
        for name, (listed, on_disk) in wanted.items()
        if listed != on_disk
    ]


def check_entry_points(root: Path) -> list[str]:
    """Every stage but a host is registered under its folder's name and offers STAGE in its layer module.

    A host carries the other stages into another program and has no layer; pyproject's tool.epmoe.hosts names it.
    """
    pyproject = _pyproject(root)
    listed = pyproject["project"].get("entry-points", {}).get("epmoe.stages", {})
    hosts = pyproject["tool"].get("epmoe", {}).get("hosts", [])
    layers = [s for s in stages(root) if s.name not in hosts]
    wanted = {s.name: f"epmoe.{package_of(s)}.layer:STAGE" for s in layers}
    problems = [
        f"pyproject.toml: tool.epmoe.hosts names {host}, which has a layer or is no stage"
        for host in hosts
        if not (root / "stages" / host).is_dir()
        or (root / "stages" / host / "epmoe" / host.split("_", 1)[-1] / "layer.py").is_file()
    ]
    if listed != wanted:
        problems.append(
            f"pyproject.toml: epmoe.stages is {listed}, the folders on disk ask for {wanted}"
        )
    for stage in layers:
        module = stage / "epmoe" / package_of(stage) / "layer.py"
        if not module.is_file() or "STAGE" not in assigned(module):
            problems.append(f"{module.relative_to(root)}: does not assign STAGE")
    return problems


def check_namespace(root: Path) -> list[str]:
    """No __init__.py where it would hide a part of the namespace, or make test folders into packages."""
    problems = []
    for init in files(root, "__init__.py"):
        folder = init.parent
        below = folder.relative_to(root).parts
        hides_roots = folder.name == "epmoe"
        is_above_tests = (
            "tests" in below or (folder / "tests").is_dir() or folder == root / "stages"
        )
        if hides_roots or is_above_tests:
            problems.append(f"{init.relative_to(root)}: remove it")
    return problems


def check_stage_parts(root: Path) -> list[str]:
    """Every stage has its page, its walkthrough, exercises, tests and exactly one package."""
    problems = []
    for stage in stages(root):
        problems += [
            f"{stage.relative_to(root)}: has no {part}"
            for part, pattern in _PARTS.items()
            if not any(stage.glob(pattern))
        ]
        packages = sorted(
            p.name for p in (stage / "epmoe").glob("*") if (p / "__init__.py").is_file()
        )
        if packages != [package_of(stage)]:
            problems.append(
                f"{stage.relative_to(root)}: has packages {packages}, not only {package_of(stage)}"
            )
    folder = root / "stages"
    strange = (
        [p for p in folder.iterdir() if p.is_dir() and p not in stages(root)]
        if folder.is_dir()
        else []
    )
    return problems + [
        f"stages/{path.name}: is not named like 00_some_name"
        for path in strange
        if path.name not in SKIPPED_FOLDERS
    ]


_PARTS = {
    "README.md": "README.md",
    "walkthrough.py": "walkthrough.py",
    "exercises/*.py": "exercises/*.py",
    "tests/test_*.py": "tests/test_*.py",
}


def check_examples(root: Path) -> list[str]:
    """Every folder of examples/ is a complete package of its own: see `_EXAMPLE_PARTS`."""
    folder, problems = root / "examples", []
    for example in sorted(p for p in folder.glob("*") if p.is_dir()):
        problems += [
            f"{example.relative_to(root)}: has no {part}"
            for part, pattern in _EXAMPLE_PARTS.items()
            if not any(example.glob(pattern))
        ]
        project = _pyproject(example)["project"] if (example / "pyproject.toml").is_file() else {}
        if not any(group.startswith("epmoe.") for group in project.get("entry-points", {})):
            problems.append(f"{example.relative_to(root)}: registers nothing with epmoe")
    return problems


_EXAMPLE_PARTS = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "src/*/__init__.py": "src/*/__init__.py",
    "tests/test_*.py": "tests/test_*.py",
}


def check_imports(root: Path) -> list[str]:
    """A stage imports epmoe.core and itself, an example no stage; core none but the reference, for its oracle."""
    names = {package_of(stage) for stage in stages(root)}
    sources = [(stage, names - {package_of(stage)}) for stage in stages(root)]
    others = [(root / "src", names - {ORACLE}), (root / "examples", names)]
    problems = []
    for folder, foreign in [*sources, *others]:
        for path in python_files(folder):
            hits = sorted({name for name in imported(path, folder) if name in foreign})
            problems += [f"{path.relative_to(root)}: imports the stage {name}" for name in hits]
    return problems


def check_lengths(root: Path) -> list[str]:
    """Files stay within 300 lines (prose of walkthroughs not counted), kernels within 60 (nor their docstrings)."""
    problems = []
    for path in python_files(root):
        text = path.read_text()
        lines = text.splitlines()
        prose = path.name == "walkthrough.py"
        count = sum(not (prose and line.startswith("#")) for line in lines)
        if count > MAX_FILE_LINES:
            problems.append(f"{path.relative_to(root)}: {count} lines, at most {MAX_FILE_LINES}")
        for name, lines in kernels(ast.parse(text)):
            if lines > MAX_KERNEL_LINES:
                problems.append(
                    f"{path.relative_to(root)}: kernel {name} has {lines} lines, at most {MAX_KERNEL_LINES}"
                )
    return problems


def check_numbers(root: Path) -> list[str]:
    """A stage's number lives in its folder's name alone: not in modules, classes or prose."""
    problems = []
    for folder in (root / "src", root / "examples", *(s / "epmoe" for s in stages(root))):
        for path in python_files(folder):
            classes = [
                n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)
            ]
            problems += [
                f"{path.relative_to(root)}: the name {name} has a number"
                for name in (path.stem, *classes)
                if re.search(r"\d", NAMED_DIGITS.sub("", name))
            ]
    in_prose = re.compile(r"\b(?:stages?|Stages?)[ -]\d")
    return problems + _lines_with(root, in_prose, "names a stage by its number")


def check_words(root: Path) -> list[str]:
    """No paths of a developer's machine, no hosts of registries, no papers that are not here, nothing left to do."""
    # put together from parts, so that this file does not hold them
    folders = ["work", "root", "home/[a-z]+", "opt/" + "pypi", "opt/" + "wheels", "Users/[a-z]+"]
    hosts = [
        "pypi" + r"\.org",
        "python" + "hosted",
        "download" + r"\.pytorch",
        "npm" + r"js\.",
        "registry" + r"\.npm",
        "deb" + r"\.debian",
    ]
    papers = ["CASES", "SYSTEMS", "PERFORMANCE", "CONVENTIONS", "ARCHITECTURE", "STYLE"]
    patterns = {
        "names a path of a developer's machine": rf"(?<![\w.}}$/-])/(?:{'|'.join(folders)})(?:/|\b)",
        "names a registry's host": "|".join(hosts),
        "names a paper that is not here": rf"\b(?:{'|'.join(papers)})\.m" + r"d\b",
        "leaves something to do": r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b",
    }
    return [
        problem
        for what, pattern in patterns.items()
        for problem in _lines_with(root, re.compile(pattern), what)
    ]


CHECKS: dict[str, Callable[[Path], list[str]]] = {
    "lists": check_lists,
    "entry points": check_entry_points,
    "namespace": check_namespace,
    "stage parts": check_stage_parts,
    "examples": check_examples,
    "imports": check_imports,
    "lengths": check_lengths,
    "numbers": check_numbers,
    "words": check_words,
}


def _pyproject(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text())


def _lines_with(root: Path, pattern: re.Pattern[str], what: str) -> list[str]:
    problems = []
    for path in tracked(root):
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                problems.append(f"{path.relative_to(root)}:{number}: {what}: {line.strip()[:100]}")
    return problems


if __name__ == "__main__":
    here = Path(__file__).resolve().parent.parent
    found = [f"[{name}] {problem}" for name, check in CHECKS.items() for problem in check(here)]
    print("\n".join(found))
    sys.exit(bool(found))
