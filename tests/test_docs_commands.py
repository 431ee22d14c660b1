"""Every `epmoe` command that a page shows can be typed: its command, its options and their values are parsed."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from epmoe.core.cli import _complete_json, app

# click's own, or that of the click inside typer
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "ladder"),
    *sorted(ROOT.glob("stages/*/*.md")),
    *sorted(ROOT.glob("examples/**/*.md")),
    ROOT / "benchmarks/README.md",
]


def commands(text: str) -> list[str]:
    """What stands after `epmoe`: in prose where options are given, and in code blocks, continued lines joined."""
    found = re.findall(r"`epmoe ([a-z][^`\n]* --[^`\n]*)`", text)
    for block in re.findall(r"^ *```[^\n]*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.match(
                r"\s*(?:\$ )?(?:srun )?(?:\S*torchrun .*?)?(?:\S*/)?epmoe (\w.*)", line
            )
            if match:
                found.append(match[1].split(" #")[0].strip())
    return found


def idle(command) -> None:
    """Take out of a command, and of all below it, what it does."""
    command.callback = None
    for inner in getattr(command, "commands", {}).values():
        idle(inner)


def parse(command: str) -> None:
    """Read a command line as the program does, and do nothing. Raises UsageError."""
    group = typer.main.get_command(app)
    idle(group)
    text = re.sub(r"--model [A-Z]+\b", "--model models/tiny-glm-moe", command)
    text = re.sub(r"[][]", "", text)  # around what may be left out
    group.main(_complete_json(shlex.split(text)), prog_name="epmoe", standalone_mode=False)


SHOWN = sorted({(str(p.relative_to(ROOT)), c) for p in PAGES for c in commands(p.read_text())})


def test_pages_show_commands():
    assert len(SHOWN) > 40
    assert {"docs/use/tuning.md", "stages/00_reference/README.md"} <= {page for page, _ in SHOWN}


@pytest.mark.parametrize(("page", "command"), SHOWN)
def test_command_can_be_typed(page, command, monkeypatch):
    monkeypatch.chdir(ROOT)
    parse(command)


@pytest.mark.parametrize(
    "command", ["check 02 --rank 4", "plans", "bench run --blocks", "tour --ranks many"]
)
def test_what_cannot_be_typed_is_seen(command):
    with pytest.raises(UsageError):
        parse(command)
