"""The limit explorer computes what epmoe.core.plan computes, and answers to mouse and keyboard in both schemes."""

import pytest

from epmoe.core.plan import plan
from epmoe.core.shape import SHAPES
from epmoe.core.traces.limits import explorer

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make docs").expect

COMPARE = """async ([base, cases, gpus]) => {
  const { limits } = await import(base + "assets/js/limits-model.js");
  return cases.map(({ input }) => {
    const r = limits(input, gpus[input.gpu]);
    return { local: r.local, active: r.active, resident_bytes: r.resident, assignments: r.assignments,
      memory_seconds: r.memory, compute_seconds: r.compute, floor_seconds: r.floor,
      wires: Object.fromEntries(Object.entries(r.wires).map(([k, w]) => [k, { dispatch_bytes: w.dispatch,
        combine_bytes: w.combine, peak_bytes: w.peak, rows_sent: w.sent, rows_needed: w.needed, row_bytes: w.row }])) };
  });
}"""


def start(page):
    page.goto("play/limits/")
    explorer_element = page.locator("moe-limits")
    expect(explorer_element).to_have_attribute("data-ready", "yes")
    return explorer_element


def test_formulas_are_the_library_s(open_context, site):
    page = open_context()
    start(page)
    data = explorer()
    found = page.evaluate(COMPARE, [site, data["reference"], data["gpus"]])
    assert len(found) == len(data["reference"]) > 100
    for case, answer in zip(data["reference"], found, strict=True):
        wires, wanted = answer.pop("wires"), dict(case["output"])
        for scheme, numbers in wanted.pop("wires").items():
            assert wires[scheme] == pytest.approx(numbers, rel=1e-9), (case["input"], scheme)
        assert answer == pytest.approx(wanted, rel=1e-9), case["input"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_sliders(open_context, scheme):
    page = open_context(scheme)
    limits = start(page)
    floor = float(limits.get_attribute("data-floor") or 0)
    assert floor == pytest.approx(plan(SHAPES["glm-5.3-flash"], 4, 8).floor_seconds)
    tokens = page.get_by_label("T, tokens per rank")
    tokens.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens).to_have_attribute("aria-valuetext", "16")
    assert float(limits.get_attribute("data-floor") or 0) > floor
    box = page.get_by_label("EP, ranks").bounding_box()
    assert box
    page.mouse.click(box["x"] + box["width"] - 6, box["y"] + box["height"] / 2)
    expect(page.get_by_label("EP, ranks")).to_have_attribute("aria-valuetext", "64")
    expect(page.locator(".limits-says")).to_contain_text("NVLink")


def test_models_and_own_sizes(open_context):
    page = open_context()
    start(page)
    page.select_option("#limits-model", "mixtral")
    expect(page.get_by_label("E, experts")).to_have_attribute("aria-valuetext", "8")
    page.get_by_label("K, experts per token").focus()
    page.keyboard.press("End")
    expect(page.get_by_label("K, experts per token")).to_have_attribute(
        "aria-valuetext", "8"
    )  # never above E
    expect(page.locator("#limits-model")).to_have_value("own")
    page.select_option("#limits-dtype", "float8")
    expect(page.locator(".limits-says")).to_contain_text("At best")
    assert page.locator(".limits-chart svg[aria-label]").count() == 3
