"""A package of somebody else, installed as a wheel: the guide's commands run on it, and its mistakes are found.

Page and package say the same because one is read from the other: docs/use/own-backend.md shows regions of
examples/fewer_bytes, its commands run here, and so do the mistakes of its table.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.installed import attempt, build_wheel, clean_environment, run

ROOT = Path(__file__).resolve().parent.parent
LONG = True
EXAMPLE = ROOT / "examples" / "fewer_bytes"
PAGE = (ROOT / "docs" / "use" / "own-backend.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
# pip takes what is there: the build backend from the environment, nothing from an index; tables have room for names
SETTINGS = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", "COLUMNS": "150"}
WHOLE_SUITE = 400.0  # seconds: one command of the page runs most of it


@dataclass(frozen=True)
class Mistake:
    """What is made wrong in a copy of the example: one piece of text of one file."""

    file: str
    right: str
    wrong: str
    stage: str = "once_per_rank+padded"


MISTAKES = {
    "a slot is off by one": Mistake(
        "exchange.py", "slots_of(topk_ids_TK)[token_S]", "slots_of(topk_ids_TK)[token_S].add(1)"
    ),
    "the answers are added up in the tokens' dtype": Mistake(
        "experts.py", "weigh_and_sum(f_NH, rows)", "weigh_and_sum(f_NH, rows).to(rows.x_RH.dtype)"
    ),
    "a promise of fixed sizes that are none": Mistake(
        "exchange.py", 'sizes="data"', 'sizes="static"'
    ),
    "an expert computes with another's weights": Mistake(
        "experts.py", "self.weights.w2_EHI.transpose", "self.weights.w2_EHI.flip(0).transpose"
    ),
    "an id of -1 means the last expert": Mistake(
        "layer.py",
        "torch.where(slot_TK >= 0, owner_TK * self.most + slot_TK, -1)",
        "owner_TK * self.most + slot_TK",
        stage="travelling_weights",
    ),
}
TABLE = {
    mistake: (check, words)
    for mistake, check, words in re.findall(r"^\| (.+?) \| `(test_\w+)` \| `(.+?)` \|$", PAGE, re.M)
}


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory) -> Path:
    """Of an environment that holds the wheel of epmoe."""
    wheel = build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))
    return clean_environment(tmp_path_factory.mktemp("theirs"), wheel)


@pytest.fixture(scope="module")
def package(bin_folder, tmp_path_factory) -> Path:
    """A copy of the example, installed by the guide's first command."""
    copy = tmp_path_factory.mktemp("example") / EXAMPLE.name
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    execute(COMMANDS[0], bin_folder, copy)
    return copy


def execute(command: str, bin_folder: Path, folder: Path) -> str:
    """What a command of the page prints, in the package's folder; it must succeed."""
    script = f'PATH="{bin_folder}:$PATH"; {command}'
    return run("bash", "-euc", script, cwd=folder, timeout=WHOLE_SUITE, **SETTINGS)


# what a command must have said, by how it begins
SAYS = {
    "python -m pip install": "",
    "epmoe stages": r"travelling_weights(.|\n)*once_per_rank\+triton",
    "epmoe check": "right",
    "python -m pytest": r"\d+ passed",
    "epmoe bench run": r"T=4",
}


def test_the_guide_begins_by_installing():
    assert COMMANDS[0].startswith("python -m pip install")
    begun = {start for start in SAYS for command in COMMANDS if command.startswith(start)}
    assert begun == set(SAYS)


@pytest.mark.timeout(WHOLE_SUITE + 60)
@pytest.mark.parametrize("command", COMMANDS[1:])
def test_a_command_of_the_guide(command, bin_folder, package):
    (words,) = (words for start, words in SAYS.items() if command.startswith(start))
    assert re.search(words, execute(command, bin_folder, package)), command


def test_the_code_of_the_guide_is_the_package():
    """Every block of code on the page is one region of a file of the example, as it is."""
    blocks = re.findall(r"^```(?:python|toml)[^\n]*\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    shown = [re.fullmatch(r'--8<-- "(examples/fewer_bytes/\S+):(\w+)"\n', b) for b in blocks]
    assert len(shown) >= 7
    for block, match in zip(blocks, shown, strict=True):
        assert match, block
        text = (ROOT / match[1]).read_text()
        assert text.count(f"# --8<-- [start:{match[2]}]\n") == 1, block
        assert text.count(f"# --8<-- [end:{match[2]}]\n") == 1, block


def test_it_is_the_wheel_that_ran(bin_folder, package):
    """Not the checkout: neither epmoe nor the example comes from it."""
    find = "import epmoe.core, fewer_bytes; print(*epmoe.core.__path__, *fewer_bytes.__path__)"
    places = run(bin_folder / "python", "-c", find, cwd=package).split()
    assert places
    assert all(Path(p).resolve().is_relative_to(bin_folder.parent.resolve()) for p in places)


# ---- mistakes


def make_copies(folder: Path) -> None:
    """One package of all mistakes, each in a copy of the example under names of its own; copy 0 is right."""
    changes = [None, *MISTAKES.values()]
    text = (EXAMPLE / "pyproject.toml").read_text().split("# --8<--")[0]
    groups: dict[str, str] = {"exchanges": "", "experts": "", "stages": ""}
    for number, mistake in enumerate(changes):
        name = f"copy{number}"
        target = folder / "src" / name
        shutil.copytree(EXAMPLE / "src" / "fewer_bytes", target)
        if mistake is not None:
            source = (target / mistake.file).read_text()
            assert source.count(mistake.right) == 1, mistake
            (target / mistake.file).write_text(source.replace(mistake.right, mistake.wrong))
        for path in target.glob("*.py"):
            renamed = path.read_text().replace("fewer_bytes", name)
            path.write_text(re.sub(r'(^    name=)"\w+"', rf'\1"{name}"', renamed, flags=re.M))
        groups["exchanges"] += f'{name} = "{name}.exchange:EXCHANGE"\n'
        groups["experts"] += f'{name} = "{name}.experts:EXPERTS"\n'
        groups["stages"] += f'{name} = "{name}.layer:STAGE"\n'
    tables = (f'[project.entry-points."epmoe.{name}"]\n{lines}' for name, lines in groups.items())
    packages = [f"src/copy{number}" for number in range(len(changes))]
    tables = (*tables, f"[tool.hatch.build.targets.wheel]\npackages = {packages}\n")
    text = text.replace('"fewer-bytes"', '"copies"').replace('readme = "README.md"\n', "")
    (folder / "pyproject.toml").write_text(text + "\n".join(tables))


def stage_of(number: int, mistake: Mistake) -> str:
    return f"copy{number}+copy{number}" if "+" in mistake.stage else f"copy{number}"


@pytest.fixture(scope="module")
def verdicts(bin_folder, tmp_path_factory) -> dict[tuple[str, str], str]:
    """(check, stage) -> why it failed, "" where it passed: every mistake, and the right copy, in one run."""
    folder = tmp_path_factory.mktemp("copies")
    make_copies(folder)
    execute("python -m pip install --no-deps .", bin_folder, folder)
    tests = tmp_path_factory.mktemp("suites")
    asked = {stage_of(n, mistake) for n, mistake in enumerate(MISTAKES.values(), 1)}
    for place, stage in enumerate(sorted(asked | {"copy0", "copy0+copy0"})):
        lines = "from epmoe.core.conformance.everything import *\n", f'STAGE = "{stage}"\n'
        (tests / f"test_suite{place}.py").write_text("".join(lines))
    (tests / "conftest.py").write_text('pytest_plugins = ["epmoe.core.conformance.plugin"]\n')
    wanted = " or ".join(sorted({check for check, _ in TABLE.values()}))
    suite = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-k", wanted]
    command = [bin_folder / "python", "-m", "pytest", *suite, "--junitxml", "out.xml", "."]
    done = attempt(*command, cwd=tests, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(tests / "out.xml").iter("testcase"):
        check, _, stage = case.attrib["name"].removesuffix("]").partition("[")
        assert case.find("skipped") is None, case.attrib
        failure = case.find("failure")
        found[check, stage] = "" if failure is None else failure.attrib["message"]
    return found


def test_the_guide_knows_every_mistake():
    assert set(TABLE) == set(MISTAKES)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name, verdicts):
    """By the check that the guide names, in its words; the right copy passes it."""
    check, words = TABLE[name]
    number, mistake = [*MISTAKES].index(name) + 1, MISTAKES[name]
    assert words in verdicts[check, stage_of(number, mistake)]
    assert verdicts[check, stage_of(0, mistake)] == ""
