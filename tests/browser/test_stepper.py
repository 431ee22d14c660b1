"""The stepper shows what its trace says, by mouse and by keyboard, in both schemes."""

import itertools
import json
from pathlib import Path

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make docs").expect

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT / "site" / "assets" / "data" / "traces"
STEPS = ["route", "counts", "pack", "exchange", "experts", "return", "combine"]
SHOTS = ROOT / "build" / "screenshots"


def trace(stage: str, name: str) -> dict:
    return json.loads((TRACES / stage / f"{name}.json").read_text())


def start(page):
    page.goto("play/tokens/")
    stepper = page.locator("moe-stepper")
    expect(stepper).to_have_attribute("data-trace", "01_variable_a2a/toy")
    return stepper


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_mouse(open_context, scheme):
    page = open_context(scheme)
    stepper = start(page)
    SHOTS.mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(STEPS):
        stepper.locator(".play-step").nth(number).click()
        expect(stepper).to_have_attribute("data-step", step)
        expect(stepper.locator(".play-step[aria-current=step]")).to_contain_text(step.capitalize())
        stepper.screenshot(path=SHOTS / f"stepper-{step}-{scheme}.png")
    expect(stepper.locator(".play-caption")).to_contain_text("oracle")
    stepper.get_by_role("button", name="Back one step").click()
    expect(stepper).to_have_attribute("data-step", "return")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_keyboard(open_context, scheme):
    page = open_context(scheme)
    stepper = start(page)
    stepper.locator(".play-frame").focus()
    for step in STEPS[1:]:
        page.keyboard.press("ArrowRight")
        expect(stepper).to_have_attribute("data-step", step)
    page.keyboard.press("Home")
    expect(stepper).to_have_attribute("data-step", "route")
    page.keyboard.press("3")
    expect(stepper.locator("#stepper-follow")).to_have_value("3")
    page.keyboard.press("Escape")
    expect(stepper.locator("#stepper-follow")).to_have_value("")


def test_play_ends_by_itself(open_context):
    page = open_context()
    page.clock.install()
    stepper = start(page)
    stepper.get_by_role("button", name="Play all steps").click()
    expect(stepper.get_by_role("button", name="Pause")).to_be_visible()
    page.clock.run_for(16_000)
    expect(stepper).to_have_attribute("data-step", "combine")
    expect(stepper.get_by_role("button", name="Play all steps")).to_be_visible()


def test_every_choice_has_its_trace(open_context):
    """All stages with a few of the routings; the table of a step has the rows of the trace."""
    page = open_context()
    stepper = start(page)
    stages = sorted(p.name for p in TRACES.iterdir())
    choices = [
        ("uniform", "2", "4", "1"),
        ("hot_expert", "4", "8", "2"),
        ("one_rank", "3", "4", "2"),
    ]
    for stage, (routing, ranks, experts, topk) in itertools.product(stages, choices):
        page.select_option("#stepper-stage", stage)
        page.select_option("#stepper-routing", routing)
        for key, value in (("ranks", ranks), ("experts", experts), ("topk", topk)):
            page.select_option(f"#stepper-{key}", value)
        name = f"{routing}-r{ranks}-e{experts}-k{topk}"
        expect(stepper).to_have_attribute("data-trace", f"{stage}/{name}")
        data = trace(stage, name)
        for number, rows in ((0, data["tokens"]), (3, data["out"]), (6, data["results"])):
            stepper.locator(".play-step").nth(number).click()
            expect(stepper.locator(".play-table tbody tr")).to_have_count(len(rows))
        crossing = sum(m["from"] != m["to"] for m in data["out"])
        stepper.locator(".play-step").nth(3).click()
        expect(stepper.locator(".play-caption")).to_contain_text(f"{crossing} row")


def test_rows_are_drawn_where_they_lie(open_context):
    """At the exchange every message of the trace is one visible chip, and following a token dims the others."""
    page = open_context()
    stepper = start(page)
    page.select_option("#stepper-stage", "02_fixed_capacity")
    expect(stepper).to_have_attribute("data-trace", "02_fixed_capacity/toy")
    stepper.locator(".play-step").nth(3).click()
    data = trace("02_fixed_capacity", "toy")
    shown = stepper.locator(".play-chip:not(.away):not(.token)")
    expect(shown).to_have_count(len(data["out"]))
    page.select_option("#stepper-follow", "1")
    same = sum(m["token"] == 1 for m in data["out"])
    expect(stepper.locator(".play-chip:not(.away):not(.token):not(.dim)")).to_have_count(same)


def test_less_motion(open_context):
    page = open_context(motion="reduce")
    stepper = start(page)
    duration = stepper.locator(".play-chip").first.evaluate(
        "e => getComputedStyle(e).transitionDuration"
    )
    assert duration in ("0s", "0s, 0s")
    moving = open_context(motion="no-preference")
    duration = (
        start(moving)
        .locator(".play-chip")
        .first.evaluate("e => getComputedStyle(e).transitionDuration")
    )
    assert duration.startswith("0.75s")


def test_after_instant_navigation(open_context):
    """Coming from another page without a reload, it works as well."""
    page = open_context()
    page.goto("play/limits/")
    expect(page.locator("moe-limits")).to_have_attribute("data-ready", "yes")
    page.evaluate("window.stayed = true")
    page.locator("a.md-footer__link--prev").click()
    stepper = page.locator("moe-stepper")
    expect(stepper).to_have_attribute("data-trace", "01_variable_a2a/toy")
    assert page.evaluate("window.stayed") is True
    stepper.locator(".play-step").nth(4).click()
    expect(stepper).to_have_attribute("data-step", "experts")


def test_a_trace_of_one_s_own(open_context, tmp_path):
    """What `epmoe trace --stepper` writes is played; anything else is told, and what was shown stays."""
    stepper = start(open_context())
    own = trace("02_fixed_capacity", "uniform-r3-e8-k2")
    (tmp_path / "own.json").write_text(json.dumps(own))
    stepper.locator("#stepper-file").set_input_files(tmp_path / "own.json")
    expect(stepper).to_have_attribute("data-trace", "02_fixed_capacity/uniform-r3-e8-k2")
    expect(stepper.locator(".play-rank")).to_have_count(3)
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    stepper.locator("#stepper-file").set_input_files(tmp_path / "other.json")
    expect(stepper.locator(".play-caption")).to_contain_text("other.json could not be read")
    expect(stepper).to_have_attribute("data-trace", "02_fixed_capacity/uniform-r3-e8-k2")
