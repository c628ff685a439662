"""A new user's two hosts with SGLang: the commands of README and of the page, as they stand.

README's node and server run on host 1, the page's on "every other host", with all defaults: the
addresses of node and server, and the socket at which they find each other. Then the page's own
check shows that the two share pages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.sglang_hosts import FOR_A_NODE, Site
from tests.pace import paced, wait_until
from tests.shown import blocks_of, commands_of
from tests.system.separate_hosts import separate_hosts, skip_reason

# Two servers are six processes that import SGLang.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "hosts can be made"),
]

PAGE = "docs/how-to/run-with-sglang.md"
NODE, SERVER = "peercache node", "python -m sglang.launch_server"
CHECK = "## Verify that pages are shared"
PAGES = 960 // 64
"""Of the page's prompt: the whole ones among its 1,000 tokens."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Yield what both hosts have."""
    site = Site(tmp_path)
    try:
        yield site
    finally:
        site.end()


def test_a_server_reads_what_the_server_of_another_host_has_computed(site: Site) -> None:
    """With nothing but what the pages show, and by the way in which the page shows it."""
    (server,), (other_server,) = commands_of("README.md", SERVER), commands_of(PAGE, SERVER)
    (node,), (_, other_node) = commands_of("README.md", NODE), commands_of(PAGE, NODE)
    asks, shows, counts, empties = (text for _, text in blocks_of(PAGE, CHECK))
    with separate_hosts("host-1", "host-2") as ((first, second), _):
        for host, typed in ((first, node), (second, other_node)):
            site.starts(host, f"{typed} {FOR_A_NODE}")
            wait_until(lambda host=host: "cluster trial" in site.types(host, "peercache status"))
        for host, typed in ((first, server), (second, other_server)):
            site.starts(host, f"{typed} {site.for_a_server}")
        for host in (first, second):
            site.serves(host)

        computed = site.types(first, asks)

        def both(pause_s: float) -> str:
            time.sleep(pause_s)
            found = site.types(second, asks)
            if found != shows:
                # A server that is slow to store or to read: the page shows how to go on.
                for host in (first, second):
                    site.types(host, empties)
                site.types(first, asks)
            return found

        found = paced(both, lambda found: found == shows)
        assert computed == ""
        assert found == shows, site.logs()

        def counted() -> float:
            lines = site.types(second, counts).splitlines()
            return sum(float(line.rpartition(" ")[2]) for line in lines)

        # The engine reports what it counts from time to time.
        wait_until(lambda: counted() >= PAGES)
