"""The site's machinery: what it shows is code that runs, and what is wrong fails with a name."""

import ast
import json
import re
import textwrap
from pathlib import Path

import pytest

from tools.check_site import check

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
pytest.importorskip("mkdocs", reason="needs the docs extra: make docs installs it")

from docs_hooks import cli_pages, diffs, fact_tables, facts, markdown, notebooks, stage_pages  # noqa: E402
from docs_hooks.docstrings import escape  # noqa: E402
from docs_hooks.walkthroughs import WalkthroughError, execute, read, walkthroughs  # noqa: E402

HEADER = (ROOT / "stages/00_reference/walkthrough.py").read_text().split("# %%")[0]


def text_of(page: Path) -> str:
    return page.read_text()


# ---- pages


def test_every_page_has_a_title_and_no_loose_end():
    for page in PAGES:
        if page.parent.name == "ladder":
            continue  # made by `epmoe bench report`
        text = text_of(page)
        assert re.search(r"^# \S", text, re.MULTILINE), page
        assert not re.search(
            r"\b(TO" r"DO|FIX" r"ME|TB" r"D|coming soon)\b", text, re.IGNORECASE
        ), page


def test_commands_on_pages_exist():
    from epmoe.core.cli import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for command in re.findall(r"(?:^|`|/)epmoe ([a-z]+)", text_of(page), re.MULTILINE):
            assert command in known, f"{page}: epmoe {command}"
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", text_of(page), re.MULTILINE):
            assert target in targets, f"{page}: make {target}"


def test_python_on_pages_parses():
    for page in PAGES:
        for block in re.findall(
            r"^```python[^\n]*\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL
        ):
            if "--8<--" not in block:
                ast.parse(textwrap.dedent(block), str(page))


def test_the_example_of_use_runs(capsys):
    (block,) = re.findall(
        r"^```python\n(.*?)^```", text_of(ROOT / "docs/use/index.md"), re.M | re.S
    )
    exec(compile(block, "docs/use/index.md", "exec"), {"__name__": "example"})
    assert "torch.Size([5, 128])" in capsys.readouterr().out


def test_facts_on_pages_can_be_computed():
    known = set(fact_tables.FACTS) | {"figure"}
    for page in PAGES:
        for name, words in re.findall(r"\{\{ *(\w+)(?:\((.*?)\))? *\}\}", text_of(page)):
            assert name in known, f"{page}: {name}"
            if name not in ("figure", "command_help"):
                assert facts.fact(name, words)


def test_an_unknown_fact_is_refused():
    with pytest.raises(KeyError, match="no fact is called"):
        facts.fact("no_such_thing", "")
    with pytest.raises(KeyError, match="no figure is called"):
        facts.fact("figure", "no_such_thing")


def test_worked_numbers_by_hand():
    assert (
        facts.fact("expert_mb", "glm-5.3-flash")
        == f"{3 * 4096 * 2048 * 2 / 1e6:.1f} MB"
        == "50.3 MB"
    )
    assert facts.fact("active", "8") == f"{72 * (1 - (1 - 8 / 288) ** 32):.1f}"
    assert facts.fact("hit_percent", "2").endswith("%")


@pytest.mark.parametrize(
    "name",
    ["moe", "expert_parallelism", "all_to_all", "memory_floor", "cuda_graphs", "determinism"],
)
def test_figures_are_themed_and_say_what_they_show(name):
    shown = facts.fact("figure", name)
    assert shown.count("<figure") == 1
    assert "\n" not in shown
    assert re.search(r'role="img" aria-label="[^"]{20,}"', shown)
    assert not re.search(r"#(?!i-)[0-9a-f]{6}\b", shown), "a colour that knows no dark scheme"
    ids = re.findall(r'\bid="([^"]+)"', shown)
    assert len(ids) == len(set(ids))
    assert all(i.startswith(f"i-{name}-") for i in ids)


def test_command_reference_names_every_option():
    shown = cli_pages.commands()
    for words in (
        "## `epmoe tour`",
        "## `epmoe bench run`",
        "`--ranks`",
        "`--loopback`",
        "`--tokens`",
    ):
        assert words in shown


def test_glossary_lines_are_well_formed():
    lines = [x for x in (ROOT / "includes/glossary.md").read_text().splitlines() if x.strip()]
    assert all(re.match(r"^\*\[[^\]]+\]: \S", line) for line in lines)
    words = [line[2 : line.index("]")] for line in lines]
    assert len(words) == len(set(words)) > 20


# ---- walkthroughs


def make_walkthrough(folder: Path, *cells: str) -> Path:
    script = folder / "stages" / "09_trial" / "walkthrough.py"
    script.parent.mkdir(parents=True)
    script.write_text(HEADER + "\n\n".join(cells) + "\n")
    return script


def test_a_failing_cell_names_page_line_and_cell(tmp_path):
    script = make_walkthrough(
        tmp_path, "# %% [markdown]\n# # Title", "# %%\nx = 1", "# %%\nx.no_such_thing()"
    )
    line = script.read_text().splitlines().index("x.no_such_thing()")
    with pytest.raises(WalkthroughError, match=rf"walkthrough\.py:{line}: cell 3 failed") as caught:
        execute(script, cache=None)
    assert "no_such_thing" in str(caught.value)


def test_outputs_become_a_page_and_are_cached(tmp_path):
    cells = [
        "# %% [markdown]\n# # Title\n#\n# Words",
        "# %%\nprint(6 * 7)",
        '# %% tags=["hide-cell"]\nsecret = 1',
    ]
    script = make_walkthrough(tmp_path, *cells)
    notebook = execute(script, cache=tmp_path / "cache")
    page = markdown.to_markdown(notebook, script, tmp_path)
    assert page.startswith("# Title\n\n[:material-notebook-outline: Notebook]")
    assert "```{ .text .wt-output }\n42\n```" in page
    assert "secret" not in page
    (held,) = (tmp_path / "cache").iterdir()
    before = held.stat().st_mtime_ns
    assert markdown.to_markdown(execute(script, cache=tmp_path / "cache"), script, tmp_path) == page
    assert held.stat().st_mtime_ns == before


@pytest.mark.parametrize("script", walkthroughs(), ids=lambda p: p.parent.name)
def test_notebooks_are_stripped_and_portable(script):
    diffs.write(ROOT, ROOT / ".cache" / "snippets")
    notebook = json.loads(notebooks.to_notebook(read(script), ROOT))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    prose = "".join("".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown")
    for foreign in (r"--8<--", r"!!! ", r"\?\?\? ", r"\{ \.", r"\]\(\.\.(?!/\.\./docs/)[^)]*\.md"):
        assert not re.search(foreign, prose), foreign
    for linked in re.findall(r"\]\((\.\.[^)]*)\)", prose):
        beside = script.parent / linked.replace(".ipynb", ".py")
        assert beside.is_file(), f"{linked}: seen from the stage's folder, no such file"
    assert "def " in prose, "included code is missing"


# ---- code on pages


def test_regions_and_their_new_lines(tmp_path):
    source = tmp_path / "a.py"
    source.write_text(
        "x = 1\n# --8<-- [start:part]\ny = 2\nz = 3  # New: this\n# --8<-- [end:part]\n"
    )
    assert markdown.region_lines(source, "part") == ["y = 2", "z = 3  # New: this"]
    page = markdown.link_code(
        '```python\n--8<-- "a.py:part"\n```', "stages/x/walkthrough.md", tmp_path
    )
    assert 'title="a.py" hl_lines="2"' in page
    assert "(../../source/a.py.md)" in page
    with pytest.raises(ValueError, match="no region gone"):
        markdown.link_code('```python\n--8<-- "a.py:gone"\n```', "p.md", tmp_path)


def test_diffs_show_the_idea_alone(tmp_path):
    (tmp_path / "a.py").write_text(
        '"""Old."""\nimport os\n\n\ndef f():\n    """Says."""\n    return 1\n'
    )
    (tmp_path / "b.py").write_text(
        '"""New."""\nimport sys\n\n\ndef f():\n    """Else."""\n    return 2\n'
    )
    shown = diffs.diff(tmp_path / "a.py", tmp_path / "b.py").splitlines()
    assert [line for line in shown if line[0] in "+-"] == ["-    return 1", "+    return 2"]


def test_every_stage_has_a_page_of_changes():
    for stage in diffs.stages(ROOT):
        page = stage_pages.changes_page(stage, ROOT)
        assert page.startswith("# What changed")
        for path in re.findall(r"\(\.\./\.\./source/(\S+?)\.md\)", page):
            assert (ROOT / path).is_file(), path


def test_hints_and_answers_are_folded():
    for stage in diffs.stages(ROOT):
        page = stage_pages.exercises_page(stage, ROOT)
        assert "<details>" not in page
        assert '??? success "Answer"' in page
        assert "Checks itself: `python stages/" in page


def test_brackets_of_docstrings_are_no_links():
    assert (
        escape("`a[b][c]` and m[s][d] and [`x`][epmoe.core.x]")
        == "`a[b][c]` and m[s]\\[d] and [`x`][epmoe.core.x]"
    )


# ---- the built site's checker


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="gone.html">x</a>', "which is not there"),
        ('<a href="#gone">x</a>', "whose anchor is not there"),
        ('<p id="a"></p><p id="a"></p>', "twice"),
        ('<img src="a.png">', "no alt text"),
        ('<script src="https://example.org/a.js"></script>', "from elsewhere"),
        ('<link rel="stylesheet" href="gone.css">', "which is not there"),
        ('<svg role="img"></svg>', "no label"),
    ],
)
def test_checker_finds(tmp_path, body, problem):
    (tmp_path / "a.png").touch()
    (tmp_path / "index.html").write_text(f"<html><body>{body}</body></html>")
    assert any(problem in found for found in check(tmp_path))


def test_checker_accepts_a_sound_site(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.html").write_text('<h1 id="top">A</h1><a href="../">back</a>')
    (tmp_path / "index.html").write_text(
        '<a href="a/#top">A</a><a href="https://example.org">out</a>'
    )
    assert check(tmp_path) == []
    assert check(tmp_path / "nothing") != []


def test_cards_link_the_files_that_they_name():
    (stage,) = [s for s in diffs.stages(ROOT) if s.name == "01_variable_a2a"]
    text = "**File**: `epmoe/variable_a2a/layer.py`, and `no_such.py`.\n\n`layer.py`\n"
    linked = stage_pages.link_files(text, stage, ROOT)
    page = "../../source/stages/01_variable_a2a/epmoe/variable_a2a/layer.py.md"
    assert linked == text.replace(
        "`epmoe/variable_a2a/layer.py`", f"[`epmoe/variable_a2a/layer.py`]({page})"
    )
    assert f"({page})" in stage_pages.card(stage, ROOT)


def test_the_formatter_has_left_snippets_alone():
    for page in PAGES:
        assert "--8 <" not in text_of(page), f"{page}: a snippet's marker was formatted as code"
