"""The rules of the source tree hold, and each rule can fail."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.check_layout import CHECKS, stages
from tools.source_files import files

ROOT = Path(__file__).resolve().parent.parent

PYPROJECT = """
[project]
name = "epmoe"
[project.entry-points."epmoe.stages"]
"00_plain" = "epmoe.plain.layer:STAGE"
"01_quick" = "epmoe.quick.layer:STAGE"
[tool.hatch.build]
dev-mode-dirs = ["src", "stages/00_plain", "stages/01_quick"]
[tool.hatch.build.targets.wheel]
packages = ["src/epmoe", "stages/00_plain/epmoe", "stages/01_quick/epmoe"]
"""

EXAMPLE = "examples/theirs"
THEIR_PYPROJECT = """
[project]
name = "theirs"
[project.entry-points."epmoe.stages"]
theirs = "theirs.a:STAGE"
"""


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def tree(tmp_path) -> Path:
    """A small tree that breaks no rule."""
    write(tmp_path / "pyproject.toml", PYPROJECT)
    write(tmp_path / "src/epmoe/core/layer.py", "class Layer:\n    pass\n")
    write(tmp_path / "tests/test_all.py")
    for stage in ("00_plain", "01_quick"):
        folder, name = tmp_path / "stages" / stage, stage[3:]
        write(folder / "epmoe" / name / "__init__.py")
        write(
            folder / "epmoe" / name / "layer.py", "from epmoe.core import layer\n\nSTAGE = layer\n"
        )
        for part in ("README.md", "walkthrough.py", "exercises/first.py", "tests/test_layer.py"):
            write(folder / part)
    write(tmp_path / EXAMPLE / "pyproject.toml", THEIR_PYPROJECT)
    for part in ("README.md", "src/theirs/__init__.py", "src/theirs/a.py", "tests/test_a.py"):
        write(tmp_path / EXAMPLE / part)
    return tmp_path


def replaced(path: str, old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        text = (root / path).read_text()
        assert old in text
        (root / path).write_text(text.replace(old, new))

    return change


def added(path: str, text: str = "") -> Callable[[Path], None]:
    return lambda root: write(root / path, text)


def removed(path: str) -> Callable[[Path], None]:
    return lambda root: (root / path).unlink()


def kernel(lines: int) -> str:
    body = "\n".join(["    x = 1"] * (lines - 1))
    return f"@triton.jit\ndef my_kernel():\n{body}\n"


PLAIN, QUICK = "stages/00_plain/epmoe/plain", "stages/01_quick/epmoe/quick"

# check, what is done to the tree, words of the problem that it must find
FAULTS = [
    ("lists", replaced("pyproject.toml", '"src", "stages/00_plain"', '"src"'), "dev-mode-dirs"),
    ("lists", replaced("pyproject.toml", ', "stages/01_quick/epmoe"]', "]"), "wheel packages"),
    ("lists", added("stages/02_new/README.md"), "stages/02_new"),
    ("entry points", replaced("pyproject.toml", "epmoe.quick.layer", "epmoe.quik.layer"), "quik"),
    ("entry points", replaced("pyproject.toml", '"01_quick" =', '"quick" ='), "epmoe.stages is"),
    ("entry points", replaced(f"{QUICK}/layer.py", "STAGE =", "STEP ="), "does not assign STAGE"),
    ("entry points", removed(f"{QUICK}/layer.py"), "does not assign STAGE"),
    (
        "entry points",
        replaced("pyproject.toml", "[project]", '[tool.epmoe]\nhosts = ["01_quick"]\n[project]'),
        "01_quick, which has a layer",
    ),
    ("namespace", added("src/epmoe/__init__.py"), "src/epmoe/__init__.py"),
    ("namespace", added("stages/01_quick/epmoe/__init__.py"), "01_quick/epmoe/__init__.py"),
    ("namespace", added("tests/__init__.py"), "tests/__init__.py"),
    ("namespace", added("stages/00_plain/tests/deep/__init__.py"), "tests/deep/__init__.py"),
    ("namespace", added("stages/00_plain/__init__.py"), "00_plain/__init__.py"),
    ("namespace", added("stages/__init__.py"), "stages/__init__.py"),
    ("namespace", added("__init__.py"), "__init__.py: remove it"),
    ("stage parts", removed("stages/00_plain/README.md"), "has no README.md"),
    ("stage parts", removed("stages/00_plain/walkthrough.py"), "has no walkthrough.py"),
    ("stage parts", removed("stages/00_plain/exercises/first.py"), "has no exercises"),
    ("stage parts", removed("stages/00_plain/tests/test_layer.py"), "has no tests"),
    ("stage parts", added("stages/01_quick/epmoe/extra/__init__.py"), "has packages"),
    ("stage parts", added("stages/02-dash/README.md"), "is not named like"),
    ("examples", removed(f"{EXAMPLE}/README.md"), "examples/theirs: has no README.md"),
    ("examples", removed(f"{EXAMPLE}/src/theirs/__init__.py"), "has no src"),
    ("examples", removed(f"{EXAMPLE}/tests/test_a.py"), "has no tests"),
    ("examples", added("examples/other/README.md"), "examples/other: has no pyproject.toml"),
    (
        "examples",
        replaced(f"{EXAMPLE}/pyproject.toml", "epmoe.stages", "other.stages"),
        "registers nothing with epmoe",
    ),
    (
        "imports",
        added(f"{EXAMPLE}/src/theirs/b.py", "import epmoe.quick\n"),
        "imports the stage quick",
    ),
    ("numbers", added(f"{EXAMPLE}/src/theirs/stage02.py"), "stage02 has a number"),
    ("imports", added(f"{QUICK}/a.py", "import epmoe.plain.layer\n"), "imports the stage plain"),
    (
        "imports",
        added(f"{QUICK}/a.py", "from epmoe.plain import layer\n"),
        "imports the stage plain",
    ),
    ("imports", added(f"{QUICK}/a.py", "from epmoe import plain\n"), "imports the stage plain"),
    ("imports", added(f"{QUICK}/a.py", "from ..plain import layer\n"), "imports the stage plain"),
    ("imports", added(f"{QUICK}/a.py", "from .. import plain\n"), "imports the stage plain"),
    (
        "imports",
        added(f"{QUICK}/a.py", "def f():\n    import epmoe.plain\n"),
        "imports the stage plain",
    ),
    ("imports", added(f"{QUICK}/a.py", "import_module('epmoe.plain.layer')\n"), "the stage plain"),
    ("imports", added("stages/01_quick/walkthrough.py", "import epmoe.plain\n"), "the stage plain"),
    ("imports", added("src/epmoe/core/a.py", "import epmoe.quick\n"), "imports the stage quick"),
    ("lengths", added(f"{PLAIN}/long.py", "x = 1\n" * 301), "301 lines"),
    ("lengths", added("tests/test_long.py", "x = 1\n" * 301), "301 lines"),
    ("lengths", added("stages/01_quick/walkthrough.py", "x = 1\n" * 301), "301 lines"),
    ("lengths", added(f"{PLAIN}/kernels.py", kernel(61)), "my_kernel has 61 lines"),
    ("numbers", added("src/epmoe/core/stage02.py"), "stage02 has a number"),
    ("numbers", added(f"{QUICK}/b.py", "class Layer2:\n    pass\n"), "Layer2 has a number"),
    ("numbers", added("stages/01_quick/README.md", "as in sta" + "ge 00\n"), "names a stage"),
    ("words", added("README.md", "cd /wo" + "rk/main\n"), "path of a developer's machine"),
    ("words", added("docs/a.md", "see /" + "root/.config\n"), "path of a developer's machine"),
    ("words", added("docs/a.md", "`/ho" + "me/ann/epmoe`\n"), "path of a developer's machine"),
    (
        "words",
        added("Makefile", "pip install -i https://pypi" + ".org/simple\n"),
        "registry's host",
    ),
    ("words", added("docs/a.md", "as CASES" + ".md says\n"), "a paper that is not here"),
    ("words", added(f"{PLAIN}/c.py", "# TO" + "DO: later\n"), "something to do"),
]


@pytest.mark.parametrize("name", CHECKS)
def test_the_project_breaks_no_rule(name):
    assert CHECKS[name](ROOT) == []


def test_the_project_is_what_was_checked():
    assert [stage.name for stage in stages(ROOT)][:2] == ["00_reference", "01_variable_a2a"]
    assert Path(__file__).resolve() in set(files(ROOT, "*.py"))


@pytest.mark.parametrize("name", CHECKS)
def test_a_good_tree_breaks_no_rule(name, tree):
    assert CHECKS[name](tree) == []


@pytest.mark.parametrize(("name", "fault", "words"), FAULTS, ids=[f"{f[0]}-{f[2]}" for f in FAULTS])
def test_every_rule_can_fail(name, fault, words, tree):
    fault(tree)
    problems = CHECKS[name](tree)
    assert any(words in problem for problem in problems), problems


def test_every_rule_has_a_fault():
    assert {name for name, _, _ in FAULTS} == set(CHECKS)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (f"{PLAIN}/fp8_bf16.py", "class Glm4Weights:\n    pass\n"),
        (f"{PLAIN}/kernels.py", kernel(60)),
        (f"{PLAIN}/long.py", "x = 1\n" * 300),
        ("stages/01_quick/walkthrough.py", "# %% [markdown]\n# words\n" * 200),
        (
            f"{PLAIN}/own.py",
            "from epmoe.plain import layer\nfrom . import layer\nimport epmoe.core\n",
        ),
        ("docs/words.md", "homework/rooted, see ../work/notes and src/root/x\n"),
    ],
)
def test_what_no_rule_forbids(path, text, tree):
    write(tree / path, text)
    assert [problem for check in CHECKS.values() for problem in check(tree)] == []


def test_a_docstring_is_no_part_of_a_kernels_length(tree):
    doc = '    """' + "words\n    " * 40 + '"""\n'
    text = kernel(60).replace("def my_kernel():\n", "def my_kernel():\n" + doc)
    write(tree / PLAIN / "kernels.py", text)
    assert CHECKS["lengths"](tree) == []
