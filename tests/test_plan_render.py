"""What the limit calculator prints."""

import io
import json

import pytest
from rich.console import Console
from tests.plan_examples import SLOW, TOY
from typer.testing import CliRunner

from epmoe.core.cli import app
from epmoe.core.errors import InputError
from epmoe.core.plan import SCHEMES, plan
from epmoe.core.plan.render import (
    headline,
    plan_command,
    render,
    render_sweep,
)
from epmoe.core.shape import named_shape

GLM = named_shape("glm-5.3-flash")


def printed(renderable, width: int = 100) -> str:
    page = io.StringIO()
    Console(width=width, file=page).print(renderable)
    return page.getvalue()


def test_a_rendered_plan_says_what_binds():
    one = plan(GLM, 4, 1)
    assert "at least 87.8 us, memory-bound" in headline(one)
    text = printed(render(one))
    for words in ("0-3", "386.2 MB", "7.7", "4.40 TB/s", "450 GB/s", *SCHEMES):
        assert words in text


def test_a_rendered_plan_of_uneven_ranks_has_a_line_for_each():
    text = printed(render(plan(TOY, 2, (1, 3), SLOW, capacity=4)))
    assert "T 1/3" in text
    assert "0-1" not in text


def test_a_sweep_fits_eighty_columns():
    text = printed(render_sweep([plan(GLM, 4, tokens) for tokens in (1, 8, 128)]), width=80)
    rows = [line.split() for line in text.splitlines() if line.split()[5:6] == ["memory"]]
    assert [row[:2] for row in rows] == [["1", "7.7"], ["8", "42.8"], ["128", "72.0"]]
    assert "…" not in text


def test_the_command_prints_tables_and_json(capsys, tmp_path):
    plan_command(tokens="1")
    assert "memory-bound" in capsys.readouterr().out
    plan_command(tokens="1,8")
    assert "42.8" in capsys.readouterr().out
    plan_command(tokens="1,8", json_to="-")
    text = capsys.readouterr().out
    assert [one["ranks"][0]["tokens"] for one in json.loads(text)] == [1, 8]
    plan_command(tokens="1,8", json_to=str(tmp_path / "plans.json"))
    assert (tmp_path / "plans.json").read_text() == text
    assert "42.8" in capsys.readouterr().out


def test_under_torchrun_rank_0_alone_answers(capsys, monkeypatch, tmp_path):
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    for rank, said in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        path = tmp_path / rank
        plan_command(tokens="1", json_to=str(path))
        assert bool(capsys.readouterr().out) == said
        assert path.exists() == said
        plan_command(tokens="1", json_to="-")
        assert bool(capsys.readouterr().out) == said


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plan_command(tokens="1,many"), "tokens='1,many'"),
        (lambda: plan_command(placement="anywhere"), "anywhere"),
        (lambda: render_sweep([]), "at least one"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(InputError, match=words):
        call()


def command(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_command_counts_an_exact_draw():
    """Every rank draws its own tokens; the counts add up to T * K over all ranks, and say that they are exact."""
    said = command("--shape", "tiny", "--ep", "2", "--tokens", "8", "--draw", "zipf", "--json", "-")
    (one,) = json.loads(said.output)
    assert one["exact"] is True
    assert sum(rank["assignments"] for rank in one["ranks"]) == 2 * 8 * 4
    other = command(
        "--shape",
        "tiny",
        "--ep",
        "2",
        "--tokens",
        "8",
        "--draw",
        "zipf",
        "--seed",
        "1",
        "--json",
        "-",
    )
    assert json.loads(other.output) != [one]


def test_the_command_takes_a_gpu_by_its_figures():
    """TB/s, TFLOP/s and GB/s, in this order."""
    said = command("--tokens", "1", "--gpu", "custom:4.8,990,450", "--json", "-")
    (one,) = json.loads(said.output)
    floor = one["ranks"][0]["floor"]
    assert (floor["bandwidth"], floor["peak"], one["link_bandwidth"]) == (4.8e12, 990e12, 450e9)
    refused = CliRunner().invoke(app, ["plan", "--gpu", "a100"])
    assert "custom:4.8,990,450" in str(refused.exception)
