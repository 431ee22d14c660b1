"""Results validate against themselves; README's ladder and docs/ladder follow from committed files alone."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from tests.bench_example import changed, example, with_subject

from epmoe.core.bench import pages, plots, report
from epmoe.core.bench.floors import floor_us
from epmoe.core.bench.results import (
    Point,
    Ratio,
    compared,
    load,
    ratios_of,
    timed_subjects,
    validate,
)
from epmoe.core.errors import InputError

ROOT = Path(__file__).resolve().parent.parent


def test_a_result_survives_the_disk(tmp_path):
    result = example()
    assert validate(result) == []
    result.save(tmp_path / "r.json")
    assert load(tmp_path / "r.json") == result
    assert not list(tmp_path.glob("*.part"))


def test_numbers_follow_from_the_samples():
    one = example().points[0].subjects["02_fixed_capacity"]
    assert one.over_floor[0] == pytest.approx(1.2 * 1.0015, rel=1e-3)
    assert one.over_ceiling[0] == pytest.approx(one.over_floor[0] * 4.18 / 4.4)
    expert_us = 3 * 4096 * 2048 * 2 / 4.4e12 * 1e6
    assert one.median_us == pytest.approx(1.2 * 5.5 * expert_us, rel=1e-2)  # 5 experts, then 6
    # loopback counts the played rank alone: 8 assignments of 6 H I operations
    assert one.tflops == pytest.approx(6 * 4096 * 2048 * 8 / one.median_us / 1e6)


def _shift(result):
    samples = result.points[0].subjects["02_fixed_capacity"].samples_us
    with_subject(result, samples_us=[0.9 * s for s in samples])


def _claim(result):
    point = result.points[0]
    result.points[0] = changed(point, ratios=[dataclasses.replace(point.ratios[0], claim="slower")])


def _floor(result):
    draws = [dataclasses.replace(d, floor_us=1.1 * d.floor_us) for d in result.points[0].draws]
    result.points[0] = changed(result.points[0], draws=draws)


def _timed_failure(result):
    point = result.points[0]
    bad = dataclasses.replace(point.subjects["broken"], median_us=1.0)
    result.points[0] = changed(point, subjects={**point.subjects, "broken": bad})


@pytest.mark.parametrize(
    ("sabotage", "words"),
    [
        (lambda r: r.machine.pop("git_sha"), "machine has no git_sha"),
        (lambda r: r.setting.pop("seed"), "setting has no seed"),
        (lambda r: r.points.clear(), "no point"),
        (lambda r: r.ceiling.clear(), "ceiling"),
        (lambda r: setattr(r, "schema", 99), "schema is 99"),
        (lambda r: setattr(r, "command", ""), "command is empty"),
        (_shift, "median_us does not follow from the samples"),
        (_claim, "the file claims slower"),
        (_floor, "floor does not follow from its active experts"),
        (_timed_failure, "has a time although it failed"),
        (lambda r: with_subject(r, gates={}), "no time without a passed gate"),
        (
            lambda r: with_subject(r, gates={"oracle_error": 1.0, "oracle_limit": 0.1}),
            "no time without a passed gate",
        ),
        (lambda r: r.points[0].ratios.clear(), "the times ask for"),
    ],
)
def test_a_result_that_was_touched_is_refused(tmp_path, sabotage, words):
    result = example()
    sabotage(result)
    assert any(words in problem for problem in validate(result)), validate(result)
    result.save(tmp_path / "r.json")
    with pytest.raises(InputError, match="not valid"):
        load(tmp_path / "r.json")


def test_what_is_no_result_is_named(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"a": 1}')
    with pytest.raises(InputError, match=r"r\.json is no benchmark result"):
        load(path)


def test_measurements_of_what_was_given_up_are_results_too():
    """They stand apart, so that no table of today's code takes a number from them."""
    kept = sorted((Path(__file__).parents[1] / report.RESULTS / "tried").glob("*.json"))
    assert kept
    assert all(load(path).points for path in kept)


LADDER_END = "<!-- ladder:end -->"


@pytest.fixture
def clone(tmp_path):
    """A repository with a README and one result."""
    (tmp_path / "stages").mkdir()
    blocks = "\n".join(f"<!-- {b}:begin -->\n<!-- {b}:end -->\n" for b in ("ladder", "against"))
    text = f"# epmoe\n\n{blocks}\nafter\n"
    (tmp_path / "README.md").write_text(text)
    example().save(tmp_path / report.RESULTS / "h200.json")
    return tmp_path


def ladder_rows(root):
    rows = re.findall(r"^\| *(?:\[)?(\d\d_\w+).*$", (root / "README.md").read_text(), re.M)
    lines = (root / "README.md").read_text().splitlines()
    return {name: next(line for line in lines if name in line) for name in rows}


def test_report_writes_once_and_then_has_nothing_to_do(clone):
    wrote = report.generate(clone)
    assert "README.md" in wrote
    assert f"{report.PAGES}/h200.md" in wrote
    assert f"{report.PAGES}/h200-floor.svg" in wrote
    assert report.generate(clone) == []
    assert report.generate(clone, check=True) == []
    assert (clone / "README.md").read_text().endswith("\nafter\n")


def test_ladder_takes_numbers_from_files_alone(clone):
    ledger = {"collectives": ["all_to_all"] * 2, "host_syncs": 0, "launches": 41}
    rows = [{"stage": "02_fixed_capacity", "rank": r, "ledger": ledger} for r in range(2)]
    (clone / report.RESULTS / report.LEDGER).write_text(json.dumps({"rows": rows}))
    report.generate(clone)
    found = ladder_rows(clone)
    assert found["02_fixed_capacity"].endswith("| 2 | 0 | 41 | 1.20 / 1.20 / 1.20 |")
    assert found["01_variable_a2a"].endswith(f"| {report.NOT_MEASURED} |")
    assert "1.2" not in found["01_variable_a2a"]


def test_ladder_prefers_the_newest_and_takes_no_other_machine(clone):
    folder = clone / report.RESULTS
    example(created="2026-03-01T00:00:00+00:00", speed=0.9).save(folder / "newer.json")
    example(device="cpu", created="2027-01-01T00:00:00+00:00", speed=0.1).save(folder / "cpu.json")
    report.generate(clone)
    assert "1.08 / 1.08 / 1.08" in ladder_rows(clone)["02_fixed_capacity"]


def test_all_times_of_the_ladder_come_from_one_run(clone):
    """The run with most stages, though an older one has a better number for one of them."""
    both = example(created="2025-01-01T00:00:00+00:00")
    for place, point in enumerate(both.points):
        one = point.subjects["02_fixed_capacity"]
        subjects = {**point.subjects, "01_variable_a2a": dataclasses.replace(one, mode="eager")}
        both.points[place] = dataclasses.replace(point, subjects=subjects)
    stages = ["01_variable_a2a", "02_fixed_capacity"]
    better = example(speed=0.9)
    assert report.ladder_result(stages, {"a": better, "b": both}) is both
    head, rows = report.ladder_table(clone, stages, {"a": better, "b": both}, "{}")
    assert head[-1] == "time / floor at T = 1 / 8 / 128, one H200 as one of 4 ranks"
    assert rows[0][-1] == "1.20 / 1.20 / 1.20, without a CUDA graph"
    assert rows[1][-1] == "1.20 / 1.20 / 1.20"
    assert report.ladder_result(["00_reference"], {"a": better}) is None


@pytest.mark.parametrize(
    "touched", ["README.md", "docs/ladder/h200.md", "docs/ladder/h200-floor.svg"]
)
def test_check_notices_what_is_stale_and_changes_nothing(clone, touched):
    report.generate(clone)
    path = clone / touched
    text = path.read_text()
    path.write_text(text.replace(LADDER_END, "x" + LADDER_END) if "README" in touched else "old\n")
    before = path.read_text()
    assert report.generate(clone, check=True) == [touched]
    assert path.read_text() == before
    assert report.generate(clone) == [touched]
    assert path.read_text() == text


def test_a_new_result_makes_pages_stale_and_an_old_page_goes(clone):
    report.generate(clone)
    example(speed=1.1).save(clone / report.RESULTS / "h200.json")
    stale = report.generate(clone, check=True)
    assert set(stale) == {
        "README.md",
        *(f"docs/ladder/h200{end}" for end in (".md", "-floor.svg", "-ratio.svg")),
    }
    (clone / report.RESULTS / "h200.json").unlink()
    report.generate(clone)
    assert not (clone / "docs/ladder/h200.md").exists()
    assert report.NOT_MEASURED in (clone / "docs/ladder/index.md").read_text()


def test_failures_and_refusals_are_on_the_page(clone):
    report.generate(clone)
    page = (clone / "docs/ladder/h200.md").read_text()
    assert "failed at T = 1: broken: GateError: wrong" in page
    assert "refused: vllm-tuned: no vLLM" in page
    assert "**0.923 [" in page  # 1.2 / 1.3, a claim
    assert "epmoe bench --loopback" in page


def test_readme_needs_its_markers(clone):
    (clone / "README.md").write_text("# epmoe\n")
    with pytest.raises(InputError, match="ladder:begin"):
        report.generate(clone)


def test_a_ratio_reads_both_ways():
    stored = [Ratio(of="a", to="b", median=0.8, low=0.5, high=1.0, claim="no difference")]
    point = Point(tokens=1, draws=[], subjects={}, ratios=stored)
    assert compared(point, "a", "b") == stored[0]
    turned = compared(point, "b", "a")
    assert turned == Ratio(of="b", to="a", median=1.25, low=1.0, high=2.0, claim="no difference")
    assert compared(point, "a", "c") is None


def test_a_floor_is_the_longer_of_reading_and_arithmetic():
    setting = example().setting
    expert = 3 * 4096 * 2048  # parameters
    reading, arithmetic = 9 * expert * 2 / 4.4e12, 2 * 9000 * expert / 989e12
    assert floor_us(setting, [9, 50], [9, 900]) == pytest.approx(reading * 1e6)
    assert floor_us(setting, [9, 50], [9000, 9]) == pytest.approx(arithmetic * 1e6)
    assert arithmetic > reading
    together = setting | {"loopback": False, "rank": None}  # then the slowest rank counts
    assert floor_us(together, [9, 50], [9, 900]) == pytest.approx(reading * 1e6 * 50 / 9)
    assert floor_us(setting, [9, 50], [9, 9], 2.2e12) == pytest.approx(2 * reading * 1e6)
    no_peak = setting | {"floor_operations_per_second": None}
    assert floor_us(no_peak, [9, 50], [9000, 9]) == pytest.approx(reading * 1e6)


def test_a_page_says_which_subjects_had_another_router():
    result, rows = example(tokens=(1,)), {}
    for name, fusions in (("03", ["pack", "router"]), ("03:-router", ["pack"]), ("other", None)):
        own = {"router": "the layer's own", "fusions": fusions} if fusions else {"router": "torch"}
        rows[name] = dataclasses.replace(
            result.points[0].subjects["02_fixed_capacity"], describe=own
        )
    point = changed(result.points[0], subjects=rows)
    result.points[0] = changed(point, ratios=ratios_of(timed_subjects(point)))
    page = pages.result_pages("r", result, "")["/r.md"]
    assert "NOT the same router: 03 routed in a kernel of their own, 03:-router, other with" in page


def test_committed_results_are_valid_and_say_where_they_come_from():
    measured, _ = report.read_results(ROOT)
    for name, result in measured.items():
        assert validate(result) == [], name
        assert re.fullmatch(r"[0-9a-f]{40}", result.machine["git_sha"]), name


def test_lines_of_a_plot_look_different_and_the_last_rung_is_blue():
    ablations = [f"03_fused_triton:-{n}" for n in ("router", "pack", "metadata", "gather", "merge")]
    names = ["02_fixed_capacity", "03_fused_triton", *ablations, "grouped_mm", "vllm-agrs"]
    found = plots.looks(names)
    assert list(found) == names
    assert len(set(found.values())) == len(names)
    assert found["03_fused_triton"] == plots.looks(["03_fused_triton"])["03_fused_triton"]
