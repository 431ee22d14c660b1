"""What the commands refuse before anything runs: places that cannot be written, files that cannot be read, limits."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epmoe.core import cli, launch
from epmoe.core.bench import results
from epmoe.core.commands.terminal import check_file, whole_numbers
from epmoe.core.errors import InputError

RUNS = ("tour", "check 00", "trace 00", "stages", "doctor", "plan", "bench", "bench padding")


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch):
    """No rank starts, and no program runs in this process either."""

    def started(*args, **kwargs):
        pytest.fail("ranks were started before the arguments were looked at")

    monkeypatch.setattr(launch, "choose_here", started)
    monkeypatch.setattr("epmoe.core.bench.cli.run", started)
    monkeypatch.setattr("epmoe.core.commands.doctor.diagnose", started)


def refused(*words: object) -> str:
    """What the InputError of a command line says."""
    result = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert isinstance(result.exception, InputError), (result.exception, result.output)
    return str(result.exception)


@pytest.mark.parametrize("command", RUNS)
def test_json_into_a_folder_is_refused_before_the_run(command, tmp_path):
    assert f"{tmp_path} cannot be written" in refused(*command.split(), "--json", tmp_path)


@pytest.mark.parametrize("command", [run for run in RUNS if run != "bench"])
def test_json_in_a_missing_folder_is_refused_before_the_run(command, tmp_path):
    assert "cannot be written" in refused(*command.split(), "--json", tmp_path / "no" / "a.json")


def test_bench_makes_folders_but_none_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    check_file(tmp_path / "new" / "newer" / "a.json", makes_folders=True)
    assert "cannot be written" in refused("bench", "--json", tmp_path / "file" / "a.json")


@pytest.mark.parametrize(
    "words",
    ["bench --save-vllm-config", "tune --out", "trace 00 --out", "trace 00 --stepper"],
)
def test_other_targets_are_refused_before_the_run(words, tmp_path):
    assert "cannot be written" in refused(*words.split(), tmp_path)


def test_a_result_does_not_replace_a_device(tmp_path):
    """`--json /dev/stdout` as root would have put a file in its place."""
    result = results.Result(created="now", command="epmoe", machine={}, setting={})
    path = tmp_path / "device"
    path.symlink_to("/dev/null")
    result.save(path)
    assert path.is_symlink()
    assert not path.is_file()


@pytest.mark.parametrize("command", ["tour", "balance --model models/tiny-glm-moe"])
@pytest.mark.parametrize("kind", ["missing", "folder", "bytes"])
def test_text_that_cannot_be_read_is_refused(command, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    path = tmp_path / "text"
    if kind == "folder":
        path.mkdir()
    if kind == "bytes":
        path.write_bytes(b"\xff\xfe\xfa")
    assert str(path) in refused(*command.split(), "--text", path)


@pytest.mark.parametrize("limit", ["nan", "inf", "0", "-3"])
@pytest.mark.parametrize("command", ["tour", "check 00", "trace 00", "bench", "bench padding"])
def test_a_time_limit_that_is_none_is_refused(command, limit):
    assert "give a finite number of seconds above 0" in refused(
        *command.split(), "--timeout", limit
    )


@pytest.mark.parametrize(
    "words",
    ["trace 00 --routing zipf:nan", "bench --skew nan", "bench padding --routings zipf:inf"],
)
def test_a_skew_that_is_no_number_is_refused(words):
    assert "give a finite exponent" in refused(*words.split())


def test_seconds_that_are_none_are_refused_by_their_own_name():
    assert refused("bench", "--seconds", "nan").startswith("seconds=nan: give a finite number")


@pytest.mark.parametrize("option", ["tokens", "ep"])
def test_counts_of_nothing_are_refused(option):
    words = f"{option}='2,0': give whole numbers of at least 1"
    assert words in refused("bench", "padding", f"--{option}", "2,0")


@pytest.mark.parametrize("command", ["plan --draw uniform", "bench"])
def test_a_seed_that_torch_cannot_take_is_refused(command):
    result = CliRunner().invoke(cli.app, [*command.split(), "--seed", "9" * 20])
    assert result.exit_code == 2
    assert "--seed" in result.output


@pytest.mark.parametrize(
    "words",
    [
        "--subjects nope",
        "--subjects 02,fixed_capacity",
        "--gpu nope",
        "--shape nope",
        "--dtype nope",
        "--placement nope",
    ],
)
@pytest.mark.parametrize("where", ["--loopback", ""])
def test_a_bench_of_what_has_no_such_name_is_refused_before_the_run(words, where):
    said = refused("bench", *words.split(), *where.split())
    assert ("nope" if "nope" in words else "named twice") in said


def test_numbers_with_commas_are_read():
    assert whole_numbers("tokens", "1, 8,128") == (1, 8, 128)
    assert whole_numbers("tokens", "0") == (0,)


@pytest.mark.parametrize("text", ["", "1,", "-1", "1.5", "many", "1 2", "9" * 5000, "²", "٣"])
@pytest.mark.parametrize(
    "option",
    ["plan --tokens", "check 00 --tokens", "tune --tokens", "bench --tokens", "bench padding --ep"],
)
def test_what_is_no_list_of_whole_numbers_is_refused(option, text):
    name = option.split("--")[1]
    said = refused(*option.split()[:-1], f"--{name}={text}")
    assert f"{name}={text!r}: give whole numbers of at least" in said


def test_a_refusal_is_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["epmoe", "plan", "--json", str(tmp_path / "a" / "b.json")])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_shared_json_option_still_prints():
    result = CliRunner().invoke(cli.app, ["plan", "--tokens", "1", "--json", "-"])
    assert len(json.loads(result.stdout)) == 1
