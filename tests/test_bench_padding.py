"""`epmoe bench padding`: rows are counted in real runs, and impossible counts are refused."""

import json

import pytest
from typer.testing import CliRunner

from epmoe.core import cli
from epmoe.core.bench import padding, report
from epmoe.core.bench.workload import Routing
from epmoe.core.errors import InputError


def test_padding_is_counted_in_real_runs(tmp_path):
    routings = [Routing(), Routing(kind="one_rank")]
    rows = padding.sweep(["00", "01", "02"], "tiny", [1, 4], [2], routings, 2)
    assert len(rows) == 12
    by = {(r.stage[:2], r.tokens, r.routing): r for r in rows}
    assert by["00", 4, "uniform"].rows_sent == 8  # every token to the one other rank
    assert by["02", 4, "uniform"].rows_sent == 8
    assert by["01", 4, "uniform"].rows_computed == 2 * 4 * 4  # exactly T * K on each of two ranks
    assert by["02", 4, "uniform"].rows_computed > by["01", 4, "uniform"].rows_computed
    # all experts on rank 1: rank 0 sends T tokens as K assignments each, or once; nothing comes the other way
    assert by["01", 4, "one_rank"].rows_sent == 4 * 4
    assert by["01", 4, "one_rank"].rows_sent_needed == 4
    (tmp_path / "stages").mkdir()
    marks = "".join(f"<!-- {b}:begin -->\n<!-- {b}:end -->\n" for b in ("ladder", "against"))
    (tmp_path / "README.md").write_text(marks)
    path = tmp_path / report.RESULTS / "padding.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(padding.document(rows, "tiny", 2, "epmoe bench padding")))
    assert padding.load(path)[1] == rows
    report.generate(tmp_path)
    assert "| 2 | uniform | 4 |" in (tmp_path / "docs/ladder/padding.md").read_text()
    assert report.generate(tmp_path, check=True) == []


def test_impossible_padding_counts_are_refused(tmp_path):
    row = padding.PaddingRow(
        stage="02_fixed_capacity", tokens=1, ep=2, routing="uniform", skew=None, rows_sent=1.0,
        rows_sent_needed=2.0, rows_computed=4.0, rows_computed_needed=4.0, wire_bytes=1.0,
    )  # fmt: skip
    (tmp_path / "p.json").write_text(json.dumps(padding.document([row], "tiny", 1, "x")))
    with pytest.raises(InputError, match="sent fewer rows"):
        padding.load(tmp_path / "p.json")


@pytest.mark.parametrize("to_file", [True, False])
def test_the_command_gives_its_counts_as_json(to_file, tmp_path):
    path = tmp_path / "p.json"
    words = "bench padding --stages reference --tokens 2 --ep 2 --routings uniform --draws 1 --json"
    done = CliRunner().invoke(cli.app, [*words.split(), str(path) if to_file else "-"])
    assert done.exit_code == 0, done.output
    if not to_file:
        path.write_text(done.stdout)
    head, [row] = padding.load(path)
    assert head["shape"] == "tiny"
    assert (row.tokens, row.ep, row.rows_sent) == (2, 2, 4)
