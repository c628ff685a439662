"""The documentation site in a browser, from a server and from files: `make docs-site` runs this.

Its search needs a worker, which a browser starts only for pages of a server: for pages that were
opened as files the site has one of its own (docs/assets/iframe-worker.js).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.system.test_dashboard import CHROMIUM, DESK, PHONE, Reader, browsing, expect

ROOT = Path(__file__).parents[2]
TIMEOUT_MS = 20_000
TABS = ["Start", "Engines", "Operate", "Understand", "Reference", "Contribute"]
WORDS = [("drain", "how-to/upgrade.html"), ("memlock", "how-to/enable-rdma.html")]
"""Words, and a page that must be among their results."""

WIDE = ["index.html", "explanation/performance.html", "reference/configuration.html",
        "reference/api/client.html", "tutorials/three-hosts.html"]  # fmt: skip
"""Pages with tables and pictures."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}"),
    pytest.mark.skipif(
        importlib.util.find_spec("mkdocstrings") is None, reason="mkdocs is missing: make docs-site"
    ),
]


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder, and logs nothing."""

    def log_message(self, *_: Any) -> None:
        """Do nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a built site: PEERCACHE_TEST_SITE names one."""
    if built := os.environ.get("PEERCACHE_TEST_SITE"):
        return Path(built).resolve()
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """Serve the site on loopback; return its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    """Start one browser for all tests of this file."""
    with browsing() as started:
        yield started


@pytest.mark.parametrize("origin", ["server", "files"])
@pytest.mark.parametrize("width", [DESK, PHONE])
def test_search_finds_pages(
    origin: str, width: int, site: Path, served: str, reader: Reader
) -> None:
    """From the home page and from a page below it; a result leads to its page.

    No result is a record of a decision: these are for contributors.
    """
    base = served if origin == "server" else site.as_uri()
    for start, (word, target) in zip(("index.html", "how-to/runbook.html"), WORDS, strict=True):
        with reader.at(f"{base}/{start}", width=width) as page:
            page.keyboard.press("/")
            page.locator(".md-search__input").press_sequentially(word)
            results = page.locator(".md-search-result__link")
            expect(results.first).to_be_visible(timeout=TIMEOUT_MS)
            links = results.evaluate_all("all => all.map(each => each.href)")
            assert any(link.startswith(f"{base}/{target}") for link in links), links
            assert not any(link.startswith(f"{base}/adr/") for link in links), links
            results.first.click()
            page.wait_for_url(links[0], timeout=TIMEOUT_MS)


def test_decisions_are_under_contribute_only(served: str, reader: Reader) -> None:
    """There are six tabs; a user who reads the first five sees no page for contributors."""
    with reader.at(f"{served}/index.html") as page:
        tabs = page.locator(".md-tabs__link")
        assert [text.strip() for text in tabs.all_inner_texts()] == TABS
        first_pages = tabs.evaluate_all("all => all.map(each => each.href)")
        for name, url in zip(TABS, first_pages, strict=True):
            page.goto(url)
            shown = page.locator(".md-sidebar--primary a[href]").evaluate_all(
                "all => all.filter(each => each.checkVisibility()).map(each => each.href)"
            )
            assert any("/adr/" in link for link in shown) == (name == "Contribute"), name


@pytest.mark.parametrize(("width", "scheme"), [(DESK, "light"), (PHONE, "dark")])
def test_pages_fit_a_screen(width: int, scheme: str, served: str, reader: Reader) -> None:
    """No page is wider than the screen: `reader.at` measures it."""
    for name in WIDE:
        with reader.at(f"{served}/{name}", width=width, scheme=scheme) as page:
            assert page.locator("h1").count() == 1
