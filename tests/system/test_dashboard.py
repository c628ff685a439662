"""The dashboard in a browser: real nodes that live, drain away and die, and states made for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from peercache.http.history import STEP_S, Watching
from peercache.model.status import MemberStatus
from peercache.wire.messages.membership import CancelDrain, DrainNode
from tests.pace import TIMEOUT_S, wait_until
from tests.system.nodes import LocalCluster, free_port, keys_of, pages_of, read
from tests.system.test_draining import operating, reported
from tests.unit.http.http_node import served
from tests.unit.http.statuses import cluster, dead, disk_full, draining, member

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip
PHONE, DESK = 375, 1280
TIMEOUT_MS = TIMEOUT_S * 1000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}"),
]


class Reader:
    """A person at a browser. Whatever the browser complains about is kept."""

    def __init__(self, browser: Any) -> None:
        """Use a browser of playwright."""
        self._browser = browser
        self.complaints: list[str] = []

    @contextmanager
    def at(self, url: str, *, width: int = DESK, scheme: str = "light") -> Iterator[Any]:
        """Open a page for the length of a block; at its end it must have asked its node only."""
        # A browser that does not know the cluster's authority is asked to go on.
        context = self._browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, ignore_https_errors=True
        )
        page, asked = context.new_page(), []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: self.complaints.append(said.text))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url, wait_until="load")
        yield page
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        own = "/".join(url.split("/")[:3]) + "/"
        assert [url for url in asked if not url.startswith(own)] == []
        assert self.complaints == []
        context.close()


@contextmanager
def browsing() -> Iterator[Reader]:
    """Start a browser for the length of a block."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=list(FLAGS))
        yield Reader(browser)
        browser.close()


def test_dashboard_follows_real_nodes(tmp_path: Path) -> None:
    """All three live, one dies, one leaves; the page renews itself and keeps what is open."""
    with LocalCluster() as nodes, browsing() as reader:
        first, second, third = [
            # A node that does not answer stays a target of the drain below.
            nodes.start(
                flags=("--metrics-port", free_port(), "--suspect-s", "30", "--dead-s", "60")
            )
            for _ in range(3)
        ]
        nodes.wait_for_members(first, 3)
        client = nodes.client(first)
        keys = keys_of("seen", 8)
        assert all(client.batch_set(keys, pages_of(keys)))
        assert all(read(client, keys))
        url = f"http://{first.ready['http']}"
        name = first.ready["control"]

        with reader.at(f"{url}/") as page:
            expect(page.locator("td .state.ok")).to_have_count(3, timeout=TIMEOUT_MS)
            assert page.locator(".attention").count() == 0
            expect(page.locator(".tiles")).to_contain_text("100 %", timeout=TIMEOUT_MS)
            assert page.get_by_role("heading", name="Engines").count() == 1
            assert page.locator("main").get_by_role("table").count() >= 2
            page.screenshot(path=tmp_path / "healthy.png", full_page=True)

            # Keys alone lead to a node's page and back.
            page.keyboard.press("Tab")
            assert _focused(page) == "Skip to the figures"
            page.locator("td a", has_text=name).first.focus()
            _refresh(page)
            assert _focused(page) == name
            page.keyboard.press("Enter")
            page.wait_for_url(f"{url}/nodes/*")

            page.locator("#d-settings summary").press("Enter")
            _refresh(page)
            assert page.locator("#d-settings").get_attribute("open") is not None
            assert "pool_size" in page.locator("#d-settings").inner_text()
            assert page.locator("#d-threads tbody tr").count() > 1
            page.locator("nav a", has_text="Cluster").press("Enter")
            page.wait_for_url(f"{url}/")

            # The hand-over waits for targets that do not answer: eight seconds for each.
            second.pause()
            third.pause()
            with operating(nodes, first) as operator:
                assert reported(operator, DrainNode(3, 60.0))["state"] == "handing_over"
                drained = page.locator("td .state", has_text="draining")
                _renew_until(page, drained, 1)
                assert reported(operator, CancelDrain(4))["state"] == "serving"
            second.resume()
            third.resume()
            _renew_until(page, page.locator("td .state.ok"), 3)

            third.kill()
            trouble = page.locator(".attention li.bad", has_text=third.ready["control"])
            _renew_until(page, trouble, 1)
            page.screenshot(path=tmp_path / "dead.png", full_page=True)

            assert second.terminate() == 0
            gone = page.locator("td .state", has_text="left")
            _renew_until(page, gone, 1)
            page.locator("#pause").press("Enter")
            assert page.locator("#pause").get_attribute("aria-pressed") == "true"

        with reader.at(f"{url}/nodes/{name}", width=PHONE, scheme="dark") as page:
            page.screenshot(path=tmp_path / "phone.png", full_page=True)
            # A node that stops is said to be gone, and its last figures stay.
            reader.complaints = Ignored()
            first.terminate()
            expect(page.locator("#trouble")).to_be_visible(timeout=TIMEOUT_MS)
            assert name in page.locator("h1").inner_text()


class Ignored(list[str]):
    """Complaints about a node that a test has stopped."""

    def append(self, _: str) -> None:
        """Forget it."""


def expect(what: Any) -> Any:
    """Return what waits; the page itself evaluates nothing, as its policy forbids that."""
    return pytest.importorskip("playwright.sync_api").expect(what)


def _focused(page: Any) -> str:
    return str(page.evaluate("document.activeElement.textContent"))


def _refresh(page: Any) -> None:
    """Let the page renew its figures now.

    A call while the page is renewing them by itself does nothing, so it is repeated.
    """
    shown = page.locator("main > *").first.element_handle()

    def is_gone() -> bool:
        page.evaluate("refresh()")
        return not shown.evaluate("each => each.isConnected")

    wait_until(is_gone, "fresh figures")


def _refresh_is_left_out(page: Any) -> None:
    """Renew the page, which must not happen while its reader types."""
    shown = page.locator("main > *").first.element_handle()
    page.evaluate("refresh()")
    assert shown.evaluate("each => each.isConnected")


def _renew_until(page: Any, what: Any, count: int) -> None:
    """Let the page renew its figures until something is there so often.

    By itself it does so each five seconds, which the first test of the figures waits for.
    """

    def renewed() -> bool:
        _refresh(page)
        return bool(what.count() == count)

    wait_until(renewed)


STATES: dict[str, tuple[Callable[[int], Sequence[MemberStatus]], str]] = {
    "dead": (lambda step: [member(0, 2, step=step), dead(member(1, 2))], "gives no answer"),
    "draining": (lambda step: [draining(member(0, 2, step=step))], "of 190.0 k pages"),
    "disk full": (lambda step: [disk_full(member(0, 2, step=step))], "No space left on device"),
    "moved": (lambda step: cluster(3, step=step), "Pages moved between nodes"),
    "64 nodes": (lambda step: cluster(64, step=step), "10.0.0.64:31998"),
}


async def test_states_are_shown_dark_and_light_on_desk_and_phone(tmp_path: Path) -> None:
    """Nothing is wider than a phone, nothing comes from elsewhere, and no script complains."""
    now: Sequence[MemberStatus] = ()

    async def gather(*, detail: bool = False) -> Sequence[MemberStatus]:
        return now

    def look(reader: Reader, address: str, state: str, wanted: str) -> None:
        views = [(DESK, "light", "/"), (PHONE, "dark", "/")]
        if state in ("disk full", "moved"):
            views.append((PHONE, "light", "/nodes/10.0.0.1:31998"))
        for width, scheme, path in views:
            with reader.at(f"http://{address}{path}", width=width, scheme=scheme) as page:
                assert wanted in page.locator("main").inner_text()
                page.screenshot(path=tmp_path / f"{state}-{width}-{scheme}.png", full_page=True)

    def choose(reader: Reader, address: str) -> None:
        """Point at a chart, choose another time, search and sort."""
        with reader.at(f"http://{address}/") as page:
            figure = page.locator("#chart-hits")
            box = figure.locator("svg").bounding_box()
            assert figure.locator(".to").inner_text() == "now"
            page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 20)
            assert figure.locator(".to").inner_text() == "1.5 min ago"
            assert 93 < float(figure.locator(".legend b").inner_text().removesuffix(" %")) < 96
            reads = page.locator("#chart-reads")
            reads.locator("svg").hover()
            assert figure.locator(".to").inner_text() == "now"
            median = reads.locator(".legend b").first.inner_text()
            assert 4 < float(median.removesuffix(" ms")) < 5
            page.locator("#chart-bytes").scroll_into_view_if_needed()
            mark = page.locator("#chart-bytes .event").bounding_box()
            page.mouse.move(mark["x"], mark["y"] + 20)
            assert "stopped answering" in page.locator("#chart-bytes .to").inner_text()
            page.screenshot(path=tmp_path / "hover.png", full_page=True)
            page.mouse.move(1, 1)

            page.get_by_role("link", name="5 min", exact=True).click()
            expect(page.locator("#chart-hits .from")).to_have_text("5 min ago")
            page.locator("#search").fill("gpu-001")
            _refresh_is_left_out(page)
            page.keyboard.press("Enter")
            expect(page.locator(".nodes tbody tr")).to_have_count(1)
            assert "range=5m" in page.url
            page.locator(".nodes th a", has_text="Memory").click()
            expect(page.locator("th[aria-sort=descending]")).to_have_text("Memory")
            page.evaluate("refresh()")
            assert page.locator("#search").input_value() == "gpu-001"

    def look_at_all(addresses: dict[str, str]) -> None:
        with browsing() as reader:
            for state, address in addresses.items():
                nonlocal now
                make, wanted = STATES[state]
                now = make(200)
                look(reader, address, state, wanted)
                if state == "dead":
                    choose(reader, address)

    async with AsyncExitStack() as stack:
        addresses = {}
        for state, (make, _) in STATES.items():
            watching = Watching(gather)
            for step in range(100):
                # The first half of the time was a good one.
                lively = cluster(2, step=100 + step) if state == "dead" else make(100 + step)
                watching.take(step * STEP_S, lively if step < 50 else make(100 + step))
            addresses[state] = await stack.enter_async_context(served(watching=watching))
        await trio.to_thread.run_sync(look_at_all, addresses)
