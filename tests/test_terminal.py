"""What the commands do at the edges of a terminal: pipes that close, ASCII, errors in few words, their own version."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epmoe.core import cli, registry, tour
from epmoe.core.errors import InputError, RankFailedError

EPMOE = [sys.executable, "-c", "from epmoe.core.cli import main; main()"]
ASCII = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def refused(*words: object) -> str:
    result = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert isinstance(result.exception, InputError), (result.exception, result.output)
    return str(result.exception)


@pytest.mark.parametrize("command", [["doctor", "--json"], ["stages"]])
def test_a_reader_that_stops_reading_is_no_error(command):
    reader, writer = os.pipe()
    os.close(reader)
    # with a buffer, as it is by default: what is in it is written at the very end
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [*EPMOE, *command],
        env=buffered,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 1


def test_a_terminal_that_knows_ascii_only_gets_the_whole_answer():
    done = subprocess.run(
        [*EPMOE, "tour", "--stage", "00", "--ranks", "1", "--tokens", "1", "--device", "cpu"],
        cwd=Path(__file__).parent,
        env=os.environ | ASCII,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "Every stage gives the oracle's answer" in done.stdout
    assert "\n1 token of real text" in done.stdout
    assert re.search(r"rank 0 .*##", done.stdout)  # the darkest shade


def raised(error: Exception, note: str, monkeypatch, capsys) -> str:
    """What `main` says on stderr where a command raises the error."""
    error.add_note(note)

    def app() -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.setattr(sys, "argv", ["epmoe"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    return capsys.readouterr().err


NOTE = "raised on rank 1 of 2:\nTraceback (most recent call last):\n  File x"


def test_wrong_input_is_told_without_the_traceback_of_a_rank(monkeypatch, capsys):
    said = raised(InputError("a=1: give 2"), NOTE, monkeypatch, capsys)
    assert said.splitlines() == ["epmoe: a=1: give 2", "raised on rank 1 of 2"]


def test_any_other_error_keeps_its_traceback(monkeypatch, capsys):
    assert "Traceback" in raised(RankFailedError("it died"), NOTE, monkeypatch, capsys)


def test_the_version_is_the_packages():
    done = CliRunner().invoke(cli.app, ["--version"])
    assert done.exit_code == 0
    assert re.fullmatch(r"epmoe \d+\.\d+\.\d+\S*\n", done.output)


def test_without_a_command_there_is_help():
    assert "tour" in CliRunner().invoke(cli.app, []).output


@pytest.mark.parametrize("command", ["trace 00 --out -", "trace 00 --stepper -", "tune --out -"])
def test_only_json_goes_to_standard_output(command):
    assert "only --json writes to standard output" in refused(*command.split())


@pytest.mark.parametrize("command", ["tour", "balance --model models/tiny-glm-moe"])
def test_an_empty_text_is_named(command, tmp_path):
    (tmp_path / "empty.txt").touch()
    said = refused(*command.split(), "--text", tmp_path / "empty.txt")
    assert f"no text in {tmp_path / 'empty.txt'}: it is empty" in said


def test_a_model_that_is_none_is_not_asked_for_again(tmp_path):
    (tmp_path / "c.json").touch()
    for place in (tmp_path / "c.json", tmp_path / "nowhere"):
        said = refused("tour", "--model", place)
        assert f"no checkpoint at {place}: name a folder" in said
        assert "give --model" not in said


def test_stages_of_a_tour_come_with_commas_or_one_by_one():
    both = [registry.resolve("02"), registry.resolve("03")]
    assert tour.runnable_stages(["02,03"]) == both
    assert tour.runnable_stages(["02", "03, 02"]) == both
    assert tour.runnable_stages([]) == registry.names()
    with pytest.raises(InputError, match="no stage called 'nobodys'"):
        tour.runnable_stages(["02,nobodys"])
