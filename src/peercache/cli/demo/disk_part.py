"""The steps of the demo with disks: more pages than memory, and restarts.

Two nodes have small pools and a disk each. Twice as many pages are published as both pools hold.
Then every node is stopped and started again, with nothing in memory, and everything is read back
from disk, at each node and over each fabric, every byte checked.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from peercache import Client
from peercache.cli.demo.reading import batches
from peercache.cli.demo.report import Reading
from peercache.cli.demo.story import FABRICS, Clients, Story
from peercache.errors import DeadlineExceeded

NODES = ("D", "E")
POOL_BYTES = 32 * 2**20
PAGES = 2 * len(NODES) * POOL_BYTES // 2**20
DISK_BYTES = 512 * 2**20
NEEDS_BYTES = 3 * DISK_BYTES
"""Of the temporary folder, for both disks with room to spare."""

STOP_S = 60.0


def tell_of_disks(story: Story) -> None:
    """Run these steps, or say that the temporary folder has no room for them."""
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    if free_bytes < NEEDS_BYTES:
        story.screen.say(
            f"the part with disks is left out: {tempfile.gettempdir()} has "
            f"{free_bytes // 2**20} MiB free, and it wants {NEEDS_BYTES // 2**20}"
        )
        return
    with tempfile.TemporaryDirectory(prefix="peercache-demo-disk-") as folder:
        part = _DiskPart(story, Path(folder))
        try:
            part.start()
            part.publish()
            part.restart()
            part.read_everything()
        finally:
            part.stop()


class _DiskPart:
    """Two nodes with disks, and a client for each of them over each fabric."""

    def __init__(self, story: Story, folder: Path) -> None:
        self._story = story
        self._folder = folder
        self._clients: Clients = {}
        self._pages = {
            name: range(at * PAGES // len(NODES), (at + 1) * PAGES // len(NODES))
            for at, name in enumerate(NODES, start=10)
        }

    def start(self) -> None:
        """Start the nodes, and attach clients."""
        story = self._story
        with story.screen.step("starting two nodes with disks", None):
            self._launch()
            self._clients = story.open_clients(NODES, self._cluster())
            self._await_disks()
        story.screen.say("two nodes with small pools serve, each with a disk of its own")

    def publish(self) -> None:
        """Set more than both pools hold; wait until all of it is on disk."""
        story = self._story
        for name, pages in self._pages.items():
            client = self._clients[name, FABRICS[0]]
            with story.screen.step(f"publishing through {name}", len(pages)) as advance:
                for done, keys in enumerate(batches(story.keys(pages)), start=1):
                    story.publish_batch(client, name, keys)
                    self._await_written(client, name, min(done * len(keys), len(pages)))
                    advance(len(keys))
        fit = len(NODES) * POOL_BYTES // 2**20
        story.screen.say(f"{PAGES} pages of 1 MiB published, of which {fit} fit in memory")

    def _await_written(self, client: Client, name: str, pages: int) -> None:
        def are_on_disk() -> bool:
            return int(client.stats().get("home_disk_pages", 0)) >= pages

        self._story.await_(f"node {name} to have {pages} pages on disk", are_on_disk)

    def restart(self) -> None:
        """Stop every node, and start all of them again on what is on their disks."""
        story = self._story
        with story.screen.step("starting both nodes again", None):
            self.stop()
            started = time.monotonic()
            self._launch()
            self._await_disks()
            took_s = time.monotonic() - started
        story.screen.say(f"both nodes stopped, and serving again after {took_s:.1f} s, from disk")

    def stop(self) -> None:
        """Stop the nodes, and wait until they have closed their disks."""
        running = [self._story.running[name] for name in NODES if name in self._story.running]
        for node in running:
            node.process.terminate()
        for node in running:
            node.process.wait(STOP_S)

    def read_everything(self) -> None:
        """Read all pages at each node over each fabric: every one must be a hit."""
        story = self._story
        pages = range(self._pages[NODES[0]].start, self._pages[NODES[-1]].stop)
        for fabric in FABRICS:
            reading = Reading("restarted, from disk", fabric, len(NODES) * PAGES, 0)
            story.report.readings.append(reading)
            with story.screen.step(f"reading over {fabric}", len(NODES) * PAGES) as advance:
                for name in NODES:
                    story.read(self._clients[name, fabric], pages, reading, advance)
        story.screen.say(f"restarted: {len(NODES) * PAGES} pages read from disk over each fabric")

    def _launch(self) -> None:
        story = self._story
        first = NODES[0]
        for name in NODES:
            folder = self._folder / name
            folder.mkdir(exist_ok=True)
            others = {} if name == first else {"discovery": story.running[first].ready["control"]}
            settings = {
                **story.settings,
                "cluster": self._cluster(),
                "pool-size": str(POOL_BYTES),
                "disk-enabled": "true",
                "disk-path": str(folder),
                "disk-size": str(DISK_BYTES),
                "disk-free-floor": "0",
                **others,
            }
            story.running[name] = story.nodes.launch(name, settings)
            story.nodes.await_ready(story.running[name], check=story.clock.check)

    def _cluster(self) -> str:
        return f"{self._story.settings['cluster']}-disks"

    def _await_disks(self) -> None:
        """Wait until each client sees both nodes, and its own with an open disk."""
        for (name, _), client in self._clients.items():
            node = self._story.running[name].ready["node"]

            def is_well(client: Client = client, node: str = node) -> bool:
                stats = client.stats()
                if stats.get("home_disk_problem") not in ("", None, "it is being opened"):
                    raise DeadlineExceeded(f"the disk: {stats['home_disk_problem']}", 0.0)
                return (
                    stats["members"] == len(NODES)
                    and stats.get("home_node") == node
                    and stats.get("home_disk_open") == 1
                )

            self._story.await_(f"the disk of node {name}", is_well)
