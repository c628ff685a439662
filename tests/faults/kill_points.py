"""Kill a node or a client before each system call that changes something, and look what is left.

    python -m tests.faults.kill_points --only disk --every 5

A library in front of the C library (kill_at.c) counts the calls of one process and kills it before
the n-th one. A story runs once for each n, up to the count of a run in which nothing was killed:

disk    a node with a disk: start, pages written, removed, evicted and read again, a graceful stop.
        Killed before the n-th call that changes a file of its folder or of its memory.
writer  an engine's process that stores pages and reads them. Before the n-th message.
giver   a node whose full pool moves pages to another node; then pages are removed, and it is
        drained. Before the n-th message.
taker   the same, and the other node is killed.

After each kill the survivors and a restarted node serve: no page has wrong bytes, what the index on
disk had is found, what was removed from it is not, no reservation is left, and new pages are
stored.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import attrs

from peercache import Client
from peercache.errors import PeerCacheError
from peercache.observability.log import LOGGER, get_logger
from peercache.storage.check import check, folders_in
from peercache.storage.index_file import read_index
from tests.pace import TIMEOUT_S, TimedOut, wait_until
from tests.system.nodes import (
    LocalCluster,
    NodeProcess,
    command,
    keys_of,
    pages_of,
    read,
)

FILES, MESSAGES = "files", "messages"
KEYS = keys_of("killed", 64)
POOL, BATCH = "4MiB", 16
"""A pool has 32 pages."""
AT_ONCE = 2
LOOKS = 20


@attrs.define
class Killer:
    """The process to be killed. number: before which call; 0: none, the calls are counted."""

    library: Path
    place: Path
    number: int = 0
    kind: str = FILES

    def __attrs_post_init__(self) -> None:
        """Make the file of the count."""
        self.counts.write_bytes(bytes(8))

    @property
    def counts(self) -> Path:
        """The file of the count."""
        return self.place / "count"

    def before(self, *folders: Path) -> list[str]:
        """Return what stands before the command of the process."""
        return [
            "env", f"LD_PRELOAD={self.library}", f"KILL_AT={self.number}", f"KILL_KIND={self.kind}",
            f"KILL_COUNT={self.counts}", f"KILL_FOLDERS={':'.join(map(str, folders))}",
        ]  # fmt: skip

    @property
    def count(self) -> int:
        """The calls so far."""
        return int.from_bytes(self.counts.read_bytes(), "little")


@attrs.define
class Known:
    """What is sure about the pages of a story.

    kept:    pages that must be found after the kill.
    removed: pages that must not.
    """

    kept: set[str] = attrs.field(factory=set)
    removed: set[str] = attrs.field(factory=set)


Story: TypeAlias = Callable[[Killer, LocalCluster], list[str]]


class Killed(Exception):
    """The process of the story has ended."""


def must_live(process: subprocess.Popen[str], for_s: float = 0.0) -> None:
    """Wait, and raise Killed as soon as a process has ended."""
    until = time.monotonic() + for_s
    while process.poll() is None:
        if time.monotonic() >= until:
            return
        time.sleep(0.02)
    raise Killed


def reaches_disk(pages: int, folder: Path, process: subprocess.Popen[str]) -> bool:
    """Wait until the index on disk has so many pages; raise Killed as soon as a process has ended.

    Return False if that takes too long.
    """
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until:
        must_live(process, 0.05)
        with contextlib.suppress(sqlite3.Error):
            for each in folders_in(str(folder)):
                with contextlib.closing(read_index(each)) as index:
                    if index.execute("SELECT count(*) FROM slots").fetchone() == (pages,):
                        return True
    return False


def start(cluster: LocalCluster, killer: Killer, *folders: Path, flags: list[str]) -> NodeProcess:
    """Start the node that is to be killed; raise Killed if that happens at once."""
    try:
        node = cluster.start("killed", pool=POOL, flags=flags, before=killer.before(*folders))
    except AssertionError as error:
        if killer.number == 0:
            raise
        raise Killed from error
    # It may end by SIGKILL.
    cluster.nodes.remove(node)
    return node


@contextlib.contextmanager
def ending(cluster: LocalCluster, node: NodeProcess) -> Iterator[Client]:
    """Yield a client of the node that is to be killed, and end with it; raises Killed."""
    try:
        with cluster.client(node, op_timeout_s=3.0, exists_timeout_s=3.0) as client:
            yield client
    except PeerCacheError as error:
        raise Killed from error
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.process.wait(TIMEOUT_S)
        status = node.process.poll()
        node.end()
        # Anything else than a kill or a graceful stop is a fault of its own.
        assert status in (0, -9), f"the node ended with {status}; None: it did not end"


def in_batches(keys: list[str]) -> Iterator[list[str]]:
    """Yield the keys in batches that fit into the pool."""
    for begin in range(0, len(keys), BATCH):
        yield keys[begin : begin + BATCH]


def found(client: Client, keys: list[str]) -> set[str]:
    """Return which pages are hits, each with its own bytes (`read` fails otherwise)."""
    return {
        key
        for batch in in_batches(keys)
        for key, hit in zip(batch, read(client, batch), strict=True)
        if hit
    }


def problems_at(client: Client, known: Known) -> list[str]:
    """Return what is wrong at a node that serves after the kill."""
    problems = []
    try:
        hits = found(client, KEYS)
        for _ in range(LOOKS):
            if known.kept <= hits:
                break
            # A get waits a tenth of a second for a disk, which goes on.
            time.sleep(0.2)
            hits |= found(client, sorted(known.kept))
    except AssertionError as error:
        return [str(error).splitlines()[0]]
    if known.kept - hits:
        problems.append(f"{len(known.kept - hits)} of {len(known.kept)} sure pages are lost")
    if known.removed & hits:
        problems.append(f"{len(known.removed & hits)} removed pages are back")
    fresh = keys_of("fresh", BATCH)
    try:
        # A full pool of pages that were used within this second may evict new ones first.
        wait_until(
            lambda: (
                all(client.batch_set(fresh, pages_of(fresh))) and found(client, fresh) == set(fresh)
            ),
            "new pages are stored and read",
        )
        wait_until(lambda: client.stats().get("home_pool_reservations") == 0, "no reservation")
    except (TimedOut, AssertionError) as error:
        problems.append(str(error).splitlines()[0])
    return problems


# --- the stories ----------------------------------------------------------------------------------


def disk(killer: Killer, cluster: LocalCluster) -> list[str]:
    """A node with a disk."""
    folder, memory = killer.place / "disk", killer.place / "memory"
    memory.mkdir()
    flags = ["--disk-enabled", "--disk-path", str(folder), "--disk-size", "16MiB",
             "--shm-dir", str(memory)]  # fmt: skip
    known = Known()
    with contextlib.suppress(Killed):
        node = start(cluster, killer, folder, memory, flags=flags)
        with ending(cluster, node) as client:
            stored = [k for batch in in_batches(KEYS[:32]) for k, is_stored in
                      zip(batch, client.batch_set(batch, pages_of(batch)), strict=True)
                      if is_stored]  # fmt: skip
            if not reaches_disk(len(stored), folder, node.process):
                return ["the pages were not written to disk"]
            known.kept = set(stored)
            removed = client.remove(KEYS[:8])
            known.kept -= set(KEYS[:8])
            # A slow disk may still delete them after the answer.
            if not reaches_disk(len(stored) - removed, folder, node.process):
                return ["the pages were not removed from disk"]
            known.removed = set(KEYS[:8])
            for batch in in_batches(KEYS[32:]):
                client.batch_set(batch, pages_of(batch))
            client.batch_exists(KEYS[8:32])
            found(client, KEYS[8:32])
            must_live(node.process)
            node.process.terminate()
    again = cluster.start("again", pool=POOL, flags=flags)
    client = cluster.client(again)
    problems = problems_at(client, known)
    client.close()
    cluster.clients.remove(client)
    left = sorted(path.name for path in memory.iterdir() if again.ready["node"] not in path.name)
    if left:
        problems.append(f"files are left in the folder of the memory: {left}")
    if again.terminate() != 0:
        problems.append("the node that was started again did not stop")
    for each in folders_in(str(folder)):
        result = check(each, lambda _: None, get_logger())
        if not result.is_whole:
            problems.append(f"the folder is not whole: {result}")
    return problems


WRITER = """
import sys
from peercache import Client
from tests.system.nodes import keys_of, pages_of, read
from tests.faults.kill_points import KEYS, in_batches
client = Client.open(cluster=sys.argv[1], home=sys.argv[2], op_timeout_s=20, exists_timeout_s=20)
for batch in in_batches(KEYS):
    client.batch_set(batch, pages_of(batch))
    client.batch_exists(batch)
    read(client, batch)
client.remove(KEYS[:8])
client.close()
"""


def writer(killer: Killer, cluster: LocalCluster) -> list[str]:
    """An engine's process."""
    nodes = [cluster.start(pool="16MiB"), cluster.start(pool="16MiB")]
    cluster.wait_for_members(nodes[0], 2)
    done = subprocess.run(
        [*killer.before(), sys.executable, "-c", WRITER, cluster.name, nodes[0].ready["home"]],
        check=False, timeout=2 * TIMEOUT_S,
    )  # fmt: skip
    if done.returncode not in (0, -9):
        return [f"the writer ended with {done.returncode}"]
    return [f"node {at}: {problem}" for at, node in enumerate(nodes)
            for problem in problems_at(cluster.client(node), Known())]  # fmt: skip


def moving(killer: Killer, cluster: LocalCluster, *, dies: str) -> list[str]:
    """Pages move from a full node to an idle one, and one of the two is killed."""
    flags = ["--spill", "--placement-min-age", "0", "--drain-s", "10"]
    first = cluster.start(pool="64MiB" if dies == "giver" else POOL, flags=flags)
    joins = ["--discovery-addr", first.ready["control"]]
    try:
        second = start(cluster, killer, flags=[*flags, *joins])
    except Killed:
        return problems_at(cluster.client(first), Known())
    giver = second if dies == "giver" else first
    with contextlib.suppress(Killed), ending(cluster, second):
        client = cluster.client(giver, op_timeout_s=3.0)
        for batch in in_batches(KEYS):
            client.batch_set(batch, pages_of(batch))
            time.sleep(0.3)
        client.remove(KEYS[:8])
        found(client, KEYS[8:])
        at = (giver.ready["control"], "--cluster", cluster.name)
        command("drain", *at, limit_s=2 * TIMEOUT_S)
        second.process.terminate()
    if dies == "taker":
        # A node that was drained takes no pages.
        first.terminate()
        first = cluster.start("after", pool=POOL, flags=flags)
    return problems_at(cluster.client(first), Known())


def giver(killer: Killer, cluster: LocalCluster) -> list[str]:
    """The node with the full pool dies."""
    return moving(killer, cluster, dies="giver")


def taker(killer: Killer, cluster: LocalCluster) -> list[str]:
    """The other node dies."""
    return moving(killer, cluster, dies="taker")


STORIES: dict[str, tuple[Story, str]] = {
    "disk": (disk, FILES),
    "writer": (writer, MESSAGES),
    "giver": (giver, MESSAGES),
    "taker": (taker, MESSAGES),
}


def compiled(folder: Path) -> Path:
    """Compile the library that kills."""
    made = folder / "kill_at.so"
    source = Path(__file__).with_name("kill_at.c")
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", made, source, "-ldl"]
    subprocess.run(command, check=True)
    return made


def run(name: str, number: int, library: Path) -> tuple[int, list[str]]:
    """Run a story; return how many calls there were, and what is wrong afterwards."""
    story, kind = STORIES[name]
    with tempfile.TemporaryDirectory(prefix="peercache-") as place, LocalCluster() as cluster:
        killer = Killer(library, Path(place), number, kind)
        problems = story(killer, cluster)
        if number == 0 and killer.count == 0:
            problems.append("no call was counted: the process did not start")
        return killer.count, problems


def main() -> int:
    """Run the stories, print a line for each, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kill_points")
    parser.add_argument("--only", action="append", choices=list(STORIES), default=[])
    parser.add_argument("--every", type=int, default=1, help="before every n-th call only")
    parser.add_argument("--at", type=int, help="before this call only")
    asked = parser.parse_args()
    # Clients of killed nodes have much to log.
    logging.getLogger(LOGGER).setLevel(logging.ERROR)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="peercache-") as folder:
        library = compiled(Path(folder))
        for name in asked.only or STORIES:
            began = time.monotonic()
            count, problems = run(name, 0, library)
            if problems:
                print(f"{name}, nothing killed: {problems}")
                return 1
            numbers = [asked.at] if asked.at else range(1, count + 1, asked.every)
            with ThreadPoolExecutor(AT_ONCE) as pool:
                results = pool.map(lambda n, of=name: (n, *run(of, n, library)), numbers)
                for number, calls, found_problems in results:
                    for problem in found_problems:
                        failed += 1
                        print(f"{name}, killed before call {number} of {calls}: {problem}")
            seconds = time.monotonic() - began
            print(f"{name}: {count} calls, killed before {len(numbers)} of them, {seconds:.0f} s")
    return min(failed, 1)


if __name__ == "__main__":
    raise SystemExit(main())
