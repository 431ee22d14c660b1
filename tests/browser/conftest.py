"""The built site, served on localhost, in a real browser that can reach nothing else."""

import functools
import http.server
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "site"
INDEX = "search/search_index.json"
SCREENSHOTS = Path(os.environ.get("EPMOE_SCREENSHOTS", ROOT / "build" / "screenshots"))
CHROMIUM = (
    os.environ.get("EPMOE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
)

try:
    from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
except ImportError:  # the tests beside this file skip, each with the reason
    pass
else:
    expect.set_options(timeout=15_000)


class Served(http.server.SimpleHTTPRequestHandler):
    """The site as it would be at its address, with or without what its search knows.

    Answered here and not by Playwright's routes: with those a browser keeps nothing that it has loaded before.
    """

    protocol_version = "HTTP/1.1"

    def __init__(self, *args, search: bool, **kwargs):
        self.search = search
        super().__init__(*args, **kwargs)

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        if self.path.endswith("/sitemap.xml"):
            home = f"<loc>http://{self.headers['Host']}/"
            text = re.sub(r"<loc>[^<]*?//[^/<]*/", home, (SITE / "sitemap.xml").read_text())
            self._answer(text, "application/xml")
        elif self.path.endswith(f"/{INDEX}") and not self.search:
            known = json.loads((SITE / INDEX).read_text()) | {"docs": []}
            self._answer(json.dumps(known), "application/json")
        else:
            super().do_GET()

    def _answer(self, text: str, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


def serve(search: bool) -> Iterator[str]:
    if not (SITE / "index.html").is_file():
        pytest.skip("the site is not built: make docs")
    handler = functools.partial(Served, directory=str(SITE), search=search)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    """The address of the built site.

    Every page indexes the whole site for its search, which takes longer than all the rest of it: here it finds nothing
    to index.
    """
    yield from serve(search=False)


@pytest.fixture(scope="session")
def searched_site() -> Iterator[str]:
    """The same, with all that its search knows."""
    yield from serve(search=True)


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium, or set EPMOE_CHROMIUM")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield found
        found.close()


class Watch:
    """What a page must not do: errors on its console, failed requests, requests to anywhere else."""

    def __init__(self, site: str):
        self.site, self.problems = site, []

    def on(self, page: "Page") -> None:
        page.on(
            "console", lambda m: m.type == "error" and self.problems.append(f"console: {m.text}")
        )
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("requestfailed", lambda r: self._failed(r))
        page.on(
            "response", lambda r: r.status >= 400 and self.problems.append(f"{r.status} {r.url}")
        )
        page.on("request", lambda r: self._request(r.url))

    def _failed(self, request) -> None:
        if "ERR_ABORTED" not in (request.failure or ""):  # a page was left while it loaded
            self.problems.append(f"failed: {request.url}")

    def _request(self, url: str) -> None:
        if not url.startswith((self.site, "data:", "blob:", "about:")):
            self.problems.append(f"asked elsewhere: {url}")


@pytest.fixture
def open_context(browser: "Browser", site: str):
    """Make a context: scheme "light" or "dark", width in pixels, `at` the address of the site."""
    made: list[tuple[BrowserContext, Watch]] = []

    def new(
        scheme: str = "light", width: int = 1280, motion: str = "reduce", at: str = site
    ) -> "Page":
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,  # pyright: ignore[reportArgumentType]
            reduced_motion=motion,  # pyright: ignore[reportArgumentType]
            base_url=at,
        )
        page, watch = context.new_page(), Watch(at)
        watch.on(page)
        made.append((context, watch))
        return page

    yield new
    problems = [problem for _, watch in made for problem in watch.problems]
    for context, _ in made:
        context.close()
    assert not problems, "\n".join(problems)
