"""Every stage's page runs from its own folder, draws what it shows, has all its parts, and shows code that exists."""

import ast
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from epmoe.core import launch
from epmoe.core.figures import Picture
from epmoe.core.figures import page as figures_page

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(ROOT.glob("stages/*/walkthrough.py"))

# words of the section titles, in this order
PARTS = (
    *("problem", "predict", "picture", "paper", "code", "difference", "prove", "## measured"),
    *("loses", "exercises", "hurts", "wild"),
)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)


def prose(page: Path) -> str:
    """The Markdown cells, without the comment signs."""
    cells = re.split(r"^# %%", page.read_text(), flags=re.MULTILINE)
    texts = [cell.partition("\n")[2] for cell in cells if cell.startswith(" [markdown]")]
    return "\n\n".join(re.sub(r"^# ?", "", text, flags=re.MULTILINE) for text in texts)


def run(page: Path, show) -> None:
    """As a notebook would: every bare expression is shown. Line numbers stay those of the file."""
    tree = ast.parse(page.read_text(), str(page))
    for number, node in enumerate(tree.body):
        if isinstance(node, ast.Expr):
            call = ast.Call(ast.Name("show_", ast.Load()), [node.value], [])
            tree.body[number] = ast.copy_location(ast.Expr(ast.copy_location(call, node)), node)
    code = compile(ast.fix_missing_locations(tree), str(page), "exec")
    exec(code, {"__name__": "__walkthrough__", "show_": show})


def test_there_are_pages():
    assert [page.parent.name for page in PAGES][:3] == [
        "00_reference",
        "01_variable_a2a",
        "02_fixed_capacity",
    ]


@each_page
@pytest.mark.timeout(120)
def test_page_runs(page, pool, monkeypatch, capsys):
    """With the session's ranks for its own, and without a pytest inside of pytest."""
    if pool.choice.device_type != "cpu":
        pytest.skip("pages are about a CPU: run without --device")
    shared = SimpleNamespace(run=pool.run, close=lambda: None, describe=pool.describe)
    proofs: list[str] = []
    monkeypatch.setattr(launch, "RankPool", lambda ranks, device: shared)
    monkeypatch.setattr(figures_page, "prove", lambda path, *_: proofs.append(path))
    monkeypatch.chdir(page.parent)
    shown: list[object] = []
    run(page, shown.append)
    pictures = [thing for thing in shown if isinstance(thing, Picture)]
    assert len(pictures) >= 2
    assert all("<text" in picture.svg() for picture in pictures)
    assert proofs, "a page shows a test and its output"
    assert all((ROOT / path).is_file() for path in proofs)
    assert "error" not in capsys.readouterr().err.lower()


@each_page
def test_page_has_its_parts(page):
    text = prose(page)
    titles = [line.lower() for line in text.splitlines() if line.startswith("## ")]
    assert [part for part in PARTS if not any(part in title for title in titles)] == []
    places = [next(i for i, title in enumerate(titles) if part in title) for part in PARTS]
    assert places == sorted(places), titles
    for words in ("**Time**", "**Hardware**", "**Afterwards you can**", "**One number**"):
        assert words in text
    assert "??? question" in text, "a prediction, its answer folded"


@each_page
def test_included_code_exists(page):
    included = re.findall(r'^--8<-- "(.+)"$', prose(page), flags=re.MULTILINE)
    assert len(included) >= 3
    stages = {folder.name for folder in (ROOT / "stages").iterdir()}
    for name in included:
        if name.startswith("diff/"):  # made by the site: before--after/file.diff
            before, _, after = name.split("/")[1].partition("--")
            assert {before, after} <= stages
            file = name.split("/")[-1].removesuffix(".diff")
            assert list((ROOT / "stages" / after).glob(f"epmoe/*/{file}")), name
            continue
        path, _, region = name.partition(":")
        text = (ROOT / path).read_text()
        assert text.count(f"# --8<-- [start:{region}]\n") == 1, name
        assert text.count(f"# --8<-- [end:{region}]\n") == 1, name


@each_page
def test_header_names_no_versions(page):
    """So that a newer jupytext does not change every page."""
    header = page.read_text().split("# ---\n")[1]
    assert "format_name: percent" in header
    assert "name: python3" in header
    assert "version" not in header


def hosts() -> list[str]:
    """Stages without a layer of their own: they are used through a framework, and have more to say about it."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["epmoe"]["hosts"]


@each_page
def test_readme_is_one_screen_with_all_parts(page):
    stage = page.parent
    text, host = (stage / "README.md").read_text(), stage.name in hosts()
    assert len(text.splitlines()) <= (90 if host else 60)
    for words in (
        f"pytest stages/{stage.name}",
        "epmoe vllm compare" if host else "epmoe tour --stage",
        "walkthrough.py",
        "## Contract",
    ):
        assert words in text
    for words in ("memory", "refuses", "## Where it loses", "in reading order"):
        assert words in text


def test_glossary_is_made_of_abbreviations():
    lines = (ROOT / "includes/glossary.md").read_text().strip().splitlines()
    entries = [re.fullmatch(r"\*\[([^\]]+)\]: (\S.*[^.])", line) for line in lines]
    assert all(entries), [line for line, entry in zip(lines, entries, strict=True) if not entry]
    names = [entry.group(1) for entry in entries if entry]
    assert names == sorted(set(names), key=lambda name: (name.lower(), name))
    assert {"EP", "MoE", "source rank", "owner rank"} <= set(names)
