"""Every page loads without an error and asks nobody else; what readers use works in both schemes and on a phone."""

import re
from pathlib import Path

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make docs").expect

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "site"
SHOTS = ROOT / "build" / "screenshots"
KEY_PAGES = {
    "home": "",
    "start": "start/",
    "moe": "ideas/moe/",
    "floor": "ideas/memory-floor/",
    "tokens": "play/tokens/",
    "limits": "play/limits/",
    "walkthrough": "stages/01_variable_a2a/walkthrough/",
    "changes": "stages/01_variable_a2a/changes/",
    "exercises": "stages/00_reference/exercises/",
    "results": "results/",
    "seam": "reference/seam/",
}

# of what is right it says no more than it must: on long pages that took most of the time
AXE_RUN = """axe.run(
  {exclude: ['.md-annotation']},
  {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'], resultTypes: ['violations']},
).then(found => found.violations)"""


def addresses() -> list[str]:
    """All pages that people wrote, and a few of the many that are made alike: sources, references, measurements."""
    if not SITE.is_dir():
        return ["the site is not built"]
    found = sorted(str(p.parent.relative_to(SITE)) for p in SITE.rglob("index.html"))
    alike: list[str] = []
    for kind in ("source/", "reference/", "ladder/"):
        of_kind = [name for name in found if name.startswith(kind)]
        found = [name for name in found if name not in of_kind]
        alike += of_kind[:: max(1, len(of_kind) // 3)]
    return found + alike


def visit(page, address: str) -> None:
    page.goto("" if address == "." else address.rstrip("/") + "/" if address else "")
    expect(page.locator("h1").first).to_be_visible()


@pytest.mark.timeout(300)
def test_every_page_is_quiet(open_context):
    page = open_context()
    for address in addresses():
        visit(page, address)
        assert page.title(), address


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_schemes(open_context, scheme):
    """Pages are as bright as their scheme says, and axe-core finds no serious violation of WCAG 2 A and AA."""
    axe = ROOT / ".cache" / "axe" / "axe.min.js"
    SHOTS.mkdir(parents=True, exist_ok=True)
    page = open_context(scheme)
    problems = []
    for name, address in KEY_PAGES.items():
        visit(page, address)
        page.wait_for_load_state("networkidle")
        page.screenshot(path=SHOTS / f"{name}-{scheme}.png")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        bright = sum(map(int, re.findall(r"\d+", background)[:3])) > 380
        assert bright == (scheme == "light"), f"{name}: {background} in {scheme}"
        if not axe.is_file():
            continue
        page.evaluate(axe.read_text())
        problems += [
            f"{name}: {v['id']}: {node['target']} {node.get('failureSummary', '')[:300]}"
            for v in page.evaluate(AXE_RUN)
            if v["impact"] in ("serious", "critical")
            for node in v["nodes"][:3]
        ]
    if not axe.is_file():
        pytest.skip("axe-core is not here: bash tools/vendor_assets.sh")
    assert not problems, "\n".join(problems)


def test_phone(open_context):
    """No page is wider than a phone, and the menu is there."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page = open_context(width=390)
    for name, address in KEY_PAGES.items():
        visit(page, address)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 391, f"{name} is {wide} pixels wide"
        page.screenshot(path=SHOTS / f"{name}-phone.png")
    expect(page.locator("label.md-header__button[for=__drawer]")).to_be_visible()


def test_mathematics_is_set(open_context):
    page = open_context()
    visit(page, "ideas/moe/")
    expect(page.locator(".katex").first).to_be_visible()
    assert page.locator(".arithmatex .katex-error").count() == 0
    assert not page.get_by_text("\\operatorname").locator("visible=true").count()
    font = page.evaluate("document.fonts.ready.then(() => document.fonts.check('16px KaTeX_Main'))")
    assert font


def test_diagrams_are_drawn(open_context):
    page = open_context()
    visit(page, "stages/")
    diagram = page.locator("div.mermaid").first
    expect(diagram).to_be_visible()
    page.wait_for_function(
        "document.querySelector('div.mermaid').getBoundingClientRect().height > 20"
    )


def test_search_finds(open_context, searched_site):
    page = open_context(at=searched_site)
    visit(page, "")
    page.locator("input.md-search__input").click()
    expect(page.locator(".md-search-result__meta")).not_to_have_text(re.compile("Initializing"))
    page.locator("input.md-search__input").press_sequentially("capacity")
    expect(page.locator(".md-search-result__item").first).to_be_visible()
    expect(page.locator(".md-search-result__list")).to_contain_text("capacity", ignore_case=True)


def test_theme_is_kept(open_context):
    page = open_context("light")
    visit(page, "start/")
    page.locator("label[title='Switch to dark']").click()
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
    visit(page, "ideas/moe/")
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")


def test_from_home_through_every_stage(open_context):
    """A reader can walk on by the footer's next link, from the first stage to the last page of the last one."""
    page = open_context()
    visit(page, "stages/")
    stages = sorted(p.name for p in (SITE / "stages").iterdir() if p.is_dir())
    met = []
    for _ in range(4 * len(stages) + 1):
        target = page.locator("a.md-footer__link--next").get_attribute("href")
        page.goto(page.evaluate("href => new URL(href, document.baseURI).href", target))
        met.append(page.url)
        if "/results/" in page.url:
            break
    for stage in stages:
        assert any(f"/{stage}/walkthrough/" in url for url in met), f"{stage} was not met"


def test_glossary_words_explain_themselves(open_context):
    page = open_context()
    visit(page, "ideas/expert-parallelism/")
    word = page.locator("abbr", has_text="owner rank").first
    expect(word).to_be_visible()
    assert "expert lives" in word.evaluate(
        "e => e.title || e.getAttribute('title') || e.dataset.mdTitle || ''"
    )
