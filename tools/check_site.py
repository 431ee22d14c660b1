"""What mkdocs does not see in the built site: raw HTML links, anchors, assets, ids twice, alt texts, outside requests.

python -m tools.check_site [site]        # prints every problem, exits 1 if there is one
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADS = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}
_NOT_LOADED = {"canonical", "prev", "next", "alternate"}


class Page(HTMLParser):
    """Ids, links, loads and problems of one page."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.problems: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        have = dict(attrs)
        name = have.get("id")
        if name:
            if name in self.ids:
                self.problems.append(f"id {name!r} twice")
            self.ids.add(name)
        if tag == "a" and have.get("href"):
            self.links.append(have["href"] or "")
        if tag == "img" and have.get("alt") is None:
            self.problems.append(f"img {have.get('src')} has no alt text")
        if tag == "svg" and have.get("role") == "img" and not have.get("aria-label"):
            self.problems.append("an svg with role img has no label")
        for loader, attribute in _LOADS:
            rel = set((have.get("rel") or "").split())
            if tag == loader and have.get(attribute) and not rel & _NOT_LOADED:
                self.loads.append(have[attribute] or "")


def check(site: Path) -> list[str]:
    """Every problem of a built site, with the page that has it."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    if not pages:
        return [f"{site}: no page is there; build the site first"]
    problems = []
    for path, page in pages.items():
        name = path.relative_to(site)
        problems += [f"{name}: {problem}" for problem in page.problems]
        for link in dict.fromkeys(page.links):
            problems += [f"{name}: {p}" for p in _link(site, path, link, pages)]
        for load in dict.fromkeys(page.loads):
            problems += [f"{name}: {p}" for p in _load(site, path, load)]
    return problems + _foreign_styles(site)


def _link(site: Path, path: Path, link: str, pages: dict[Path, Page]) -> list[str]:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return []
    target = _target(site, path, parts.path)
    if target is None or not target.exists():
        return [f"link to {link}, which is not there"]
    anchor = unquote(parts.fragment)
    known = pages.get(target)
    if anchor and known and anchor not in known.ids and not anchor.startswith("__"):
        return [f"link to {link}, whose anchor is not there"]
    return []


def _load(site: Path, path: Path, load: str) -> list[str]:
    parts = urlsplit(load)
    if parts.scheme == "data":
        return []
    if parts.scheme or parts.netloc:
        return [f"loads {load} from elsewhere"]
    target = _target(site, path, parts.path)
    return [] if target and target.is_file() else [f"loads {load}, which is not there"]


def _target(site: Path, path: Path, link: str) -> Path | None:
    if not link:
        return path
    start = site if link.startswith("/") else path.parent
    target = (start / unquote(link).lstrip("/")).resolve()
    if not target.is_relative_to(site.resolve()):
        return None
    target = site / target.relative_to(site.resolve())
    return target / "index.html" if target.is_dir() else target


def _foreign_styles(site: Path) -> list[str]:
    return [
        f"{path.relative_to(site)}: a style loads something from elsewhere"
        for path in sorted(site.rglob("*.css"))
        if any(mark in path.read_text() for mark in ("url(http", 'url("http', "url(//", "@import"))
    ]


if __name__ == "__main__":
    found = check(Path(sys.argv[1] if len(sys.argv) > 1 else "site"))
    print("\n".join(found) or "site: no problem")
    sys.exit(bool(found))
