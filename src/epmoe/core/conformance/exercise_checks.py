"""Checks of a stage's exercises: the skeleton is the solution without its marked region, and the solution passes.

An exercise is a pair of files, `<name>_skeleton.py` and `<name>_solution.py`, each with a `check()` that raises
AssertionError with the numbers when the answer is wrong. The region to fill lies between the lines OPEN and CLOSE. A
stage takes these checks over in a file of its tests folder:

    from epmoe.core.conformance.exercise_checks import *
"""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

OPEN, CLOSE = "# >>> your code", "# <<< your code"


def names(folder: Path) -> list[Path]:
    """Paths without the ending, one per exercise of `folder`."""
    found = {p.with_name(p.name.rsplit("_", 1)[0]) for p in folder.glob("*_s*.py")}
    return sorted(found)


def without_region(text: str) -> str:
    """The text with nothing between OPEN and CLOSE; exactly one region is expected."""
    before, _, rest = text.partition(OPEN)
    region, _, after = rest.partition(CLOSE)
    if not region or OPEN in after or CLOSE in after:
        raise ValueError(f"expected exactly one region from {OPEN!r} to {CLOSE!r}")
    return before + OPEN + CLOSE + after


def load(path: Path) -> ModuleType:
    """The file as a module of its own."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _file(exercise: Path, which: str) -> Path:
    return exercise.with_name(f"{exercise.name}_{which}.py")


def test_skeleton_is_the_solution_without_its_region(exercise):
    skeleton, solution = (_file(exercise, w).read_text() for w in ("skeleton", "solution"))
    assert without_region(skeleton) == without_region(solution)


def test_solution_passes(exercise):
    load(_file(exercise, "solution")).check()


def test_skeleton_asks_to_be_filled(exercise):
    """Run as the reader runs it: it ends with an error that says what is missing, not with an import problem."""
    done = subprocess.run(
        [sys.executable, str(_file(exercise, "skeleton"))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "NotImplementedError: fill in" in done.stderr


def test_a_wrong_answer_fails(exercise):
    """The solution's own function, spoilt in its first result, does not get past check()."""
    module = load(_file(exercise, "solution"))
    right = vars(module)["answer"]

    def spoilt(*args):
        result = right(*args)
        first = result[0] if isinstance(result, tuple) else result
        first.add_(1)
        return result

    vars(module)["answer"] = spoilt  # where check() looks it up
    with pytest.raises(AssertionError):
        module.check()


def test_readme_folds_the_answer(exercise):
    """The page names the file to fill, and shows the solution's region inside <details>."""
    page = (exercise.parent / "README.md").read_text()
    assert f"{exercise.name}_skeleton.py" in page
    assert f"{exercise.name}_solution.py" in page
    assert page.count("<details>") == page.count("</details>") >= 3
