"""Pictures say what is so, are the same every time, and use the seven colours; the pages' other helpers."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import partial

import pytest
import torch

from epmoe.core.bench.results import Measured, Point, Result
from epmoe.core.errors import InputError
from epmoe.core.figures import PALETTE, Picture, ledger_bars, matrix_picture
from epmoe.core.figures import page as figures_page
from epmoe.core.figures.buffer import buffer_picture, row_picture
from epmoe.core.figures.route import parcels, route_picture, row_bytes, rows_sent
from epmoe.core.packed_rows import RowLayout
from epmoe.core.toy import TOY

STAGES = ("reference", "variable_a2a", "fixed_capacity")
TEXT = "{http://www.w3.org/2000/svg}text"


PICTURES: dict[str, Callable[[], Picture]] = {
    **{stage: partial(route_picture, TOY, stage) for stage in STAGES},
    "matrix": lambda: matrix_picture({"needed": [[1, 2], [3, 4]], "sent": [[4, 4], [4, 4]]}),
    "ledger": lambda: ledger_bars(
        {"before": {"waits": 3, "KiB": 1.5}, "now": {"waits": 0, "KiB": 9}}
    ),
    "buffer": lambda: buffer_picture(TOY),
    "row": lambda: row_picture(RowLayout(4, 2, torch.float32)),
}


@pytest.mark.parametrize("name", PICTURES)
def test_svg(name):
    svg = PICTURES[name]().svg()
    words = [element.text for element in ET.fromstring(svg).iter(TEXT)]
    assert len(words) > 5, "text is text, not outlines"
    assert set(re.findall(r"#[0-9a-f]{6}\b", svg.lower())) <= set(PALETTE)
    assert "<dc:date>" not in svg
    assert svg == PICTURES[name]().svg(), "the same bytes every time"


def test_files(tmp_path):
    picture = PICTURES["row"]()
    picture.save(tmp_path / "row.svg")
    picture.save(tmp_path / "row.png")
    assert (tmp_path / "row.svg").read_text() == picture.svg()
    assert (tmp_path / "row.png").read_bytes().startswith(b"\x89PNG")


# rows[s][d], bytes of a row out, received rows for nobody
ROUTES = {
    "reference": ([[2, 2], [2, 2]], 32, 2),
    "variable_a2a": ([[3, 1], [1, 3]], 24, 0),
    "fixed_capacity": ([[2, 2], [2, 2]], 48, 2),
}


@pytest.mark.parametrize("name", STAGES)
def test_route(name):
    rows, out, idle = ROUTES[name]
    assert rows_sent(TOY, name) == rows
    assert row_bytes(TOY, name) == (out, 16)
    assert sum(not p.experts for received in parcels(TOY, name) for p in received) == idle
    says = route_picture(TOY, name).says
    assert f"{rows[0][1] + rows[1][0]} rows of {out} bytes" in says
    assert f"{idle} of 8 received rows name no expert" in says


def test_unknown_route():
    with pytest.raises(InputError, match="choose one of reference, variable_a2a, fixed_capacity"):
        parcels(TOY, "no_such_stage")


def test_matrix_says_what_leaves():
    assert matrix_picture({"a": [[5, 1], [2, 5]]}).says == "a: 3 rows leave their rank"
    with pytest.raises(InputError, match="no matrix"):
        matrix_picture({})


def test_ledger_bars_want_the_same_counts():
    assert ledger_bars({"a": {"waits": 0}}).says == "a: waits 0"
    with pytest.raises(InputError, match="b counts"):
        ledger_bars({"a": {"waits": 3}, "b": {"launches": 3}})
    with pytest.raises(InputError, match="no ledger"):
        ledger_bars({})


def test_buffers_show_padding():
    assert buffer_picture(TOY).says.startswith(
        "12 rows travel, 8 of them tokens, 4 of them padding"
    )
    assert "0 of them padding" in buffer_picture(TOY, 2).says
    with pytest.raises(InputError, match="capacity=1"):
        buffer_picture(TOY, 1)


def test_row_says_where_fields_lie():
    says = row_picture(RowLayout(4, 2, torch.float32)).says
    assert says.startswith(
        "one packed row of 48 bytes: 4 hidden values from byte 0, 2 slots from byte 16"
    )
    assert "padding" not in row_picture(RowLayout(5, 1, torch.float32)).says  # 20 + 4 + 4 + 4 = 32


def test_table():
    text = figures_page.table({"a": {"n": 1234, "x": 1.25}, "bcd": {"n": 5, "x": "-"}}, "rows")
    assert text.splitlines() == ["rows      n    x", "a     1,234  1.2", "bcd       5    -"]
    with pytest.raises(InputError, match="no row"):
        figures_page.table({})


def one_run(medians: dict[str, float], created="2026-01-01", sizes=(8,)) -> Result:
    """A loopback run in which every subject took medians[name] microseconds at all sizes."""
    subjects = {
        name: Measured(mode="graph", median_us=us, over_floor=[1.5, 1.4, 1.6])
        for name, us in medians.items()
    }
    subjects["01_failed"] = Measured(mode="graph", error="no kernel")
    return Result(
        created=created,
        command="epmoe bench",
        machine={"device": "H200"},
        setting={"ep": 4, "loopback": True},
        points=[Point(tokens=t, draws=[], subjects=subjects, ratios=[]) for t in sizes],
    )


def test_the_widest_run_of_a_setting_counts_then_the_newest(tmp_path):
    one_run({"00_slow": 10.5}, sizes=(8, 1)).save(tmp_path / "wide.json")
    one_run({"00_slow": 20.5}, "2026-02-01").save(tmp_path / "a-newer.json")
    lines = figures_page.measured("00_slow", tmp_path).splitlines()[1:]
    assert [line.split()[-2] for line in lines] == ["10.5", "10.5"]
    one_run({"00_slow": 30.5}, "2026-03-01", sizes=(8, 1)).save(tmp_path / "b-newest.json")
    lines = figures_page.measured("00_slow", tmp_path).splitlines()[1:]
    assert [line.split()[-2] for line in lines] == ["30.5", "30.5"]


def test_what_a_layer_loses_without_a_part(tmp_path):
    assert figures_page.ablations("03_fast", tmp_path) == "not measured yet"
    both = {"03_fast": 10.0, "03_fast:-pack": 12.5, "00_slow": 99.0}
    one_run(both, sizes=(8, 1)).save(tmp_path / "a.json")
    lines = figures_page.ablations("03_fast", tmp_path).splitlines()
    assert lines[0].split() == ["one", "GPU's", "share", "of", "EP=4,", "without", "T=1", "T=8"]
    assert [line.split() for line in lines[1:]] == [["pack", "+2.5", "+2.5"]]


def test_times_of_named_runs_by_size(tmp_path):
    one_run({"00_slow": 1234.4}, sizes=(8, 1)).save(tmp_path / "a.json")
    lines = figures_page.times("00_slow", {"before": "a", "after": "a"}, tmp_path).splitlines()
    assert lines[0].split() == ["T=1", "T=8"]
    assert lines[1].split() == ["before", "1,234", "1,234"]


def test_measured_reads_committed_results(tmp_path):
    assert figures_page.measured("00_slow", tmp_path) == "not measured yet"
    assert figures_page.measured("00_slow", tmp_path / "none") == "not measured yet"
    run = one_run({"00_slow": 12.5})
    run.save(tmp_path / "a.json")
    (tmp_path / "b.json").write_text('{"kind": "ledger"}')
    lines = figures_page.measured("00_slow", tmp_path).splitlines()
    assert lines[1].split("  ")[0] == "H200, EP=4 loopback, graph, T=8"
    assert lines[1].split()[-2:] == ["12.5", "1.50"]
    for other in ("01_failed", "02_other"):
        assert figures_page.measured(other, tmp_path) == "not measured yet"
    (tmp_path / "c.json").write_text("[]")
    with pytest.raises(InputError, match=r"c\.json holds a list"):
        figures_page.measured("00_slow", tmp_path)


def test_prove_shows_the_verdict_and_hides_no_failure(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a notebook's kernel does
    test = tmp_path / "test_it.py"
    test.write_text("def test_one(): pass\n")
    figures_page.prove(str(test))
    assert capsys.readouterr().out.splitlines()[1:] == ["  test_one PASSED", "1 passed"]
    test.write_text("def test_one(): assert 1 == 2\n")
    with pytest.raises(AssertionError, match="assert 1 == 2"):
        figures_page.prove(str(test))


def test_counted_is_one_right_call(pool):
    counts, verdict = figures_page.counted(pool, "reference", (3, 1))
    assert "right" in verdict
    assert counts["collectives"] == 4
    assert counts["needed"] == counts["rows done"] == 4 * 4
