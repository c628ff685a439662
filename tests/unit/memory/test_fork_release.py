"""A forked child that lives on keeps nothing of its parent's segments and tables."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import numpy as np

from peercache.actors.directory.table import DirectoryTable
from peercache.memory.attached import AttachedSegment
from peercache.memory.layout import is_node_file, segment_name, table_name
from peercache.memory.published import PublishedSegment, TableFile, remove_leftovers
from peercache.memory.table_reading import AttachedTable
from peercache.model.ids import Incarnation
from tests.children import fork, in_child
from tests.pace import wait_until
from tests.system.nodes import free_port, script

GRANULE = 4096
OWN, OTHER = Incarnation(0x11), Incarnation(0x12)
OTHERS_FILE_BYTES = 64


class Opened:
    """What a node and a client of one process have open."""

    def __init__(self, folder: Path) -> None:
        self.segment = PublishedSegment.create(
            folder, incarnation=OWN, page_bytes=16 * GRANULE, granule=GRANULE
        )
        self.segment.populate(16 * GRANULE)
        self.segment.pages[:4] = np.frombuffer(b"page", np.uint8)
        self.table_file = TableFile.create(folder, OWN, None)
        self.table = DirectoryTable(
            bytes(16), answer_max=8, rows_max=1000, file=self.table_file.file, incarnation=OWN,
            loads_ahead=True,
        )  # fmt: skip
        self.attached = AttachedSegment.open(self.segment.path, incarnation=OWN, writable=True)
        self.attached_table = AttachedTable.open(folder, incarnation=OWN)

    def close(self) -> None:
        self.attached_table.close()
        self.attached.close(1.0)
        del self.table
        gc.collect()
        self.table_file.close()
        self.segment.close()


def held(pid: int) -> list[str]:
    """Return the files of nodes that a process has open or mapped."""
    process = Path(f"/proc/{pid}")
    paths = []
    for each in (process / "fd").iterdir():
        # What lists them here is one of them, and gone.
        with suppress(OSError):
            paths.append(str(each.readlink()))
    paths += [line.rpartition(" /")[2] for line in (process / "maps").read_text().splitlines()]
    names = [path.removesuffix(" (deleted)").rpartition("/")[2] for path in paths]
    return [name for name in names if is_node_file(name)]


def test_a_child_that_lives_on_holds_no_file_of_its_parents_node(tmp_path: Path) -> None:
    """Neither open nor mapped; the parent has all of it as before."""
    opened = Opened(tmp_path)
    # Other tests of this process may have left some to the collector.
    own = {segment_name(OWN), table_name(OWN)}

    def held_here() -> list[str]:
        return sorted(name for name in held(os.getpid()) if name in own)

    before = held_here()
    child = fork(signal.pause)
    try:
        wait_until(lambda: held(child) == [])
        assert held_here() == before
        assert set(before) == own
        assert bytes(opened.segment.pages[:4]) == b"page"
        opened.segment.pages[:4] = np.frombuffer(b"next", np.uint8)
        with opened.attached.in_use():
            assert ctypes.string_at(opened.attached.pages_address, 4) == b"next"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    opened.close()


def test_a_child_that_closes_what_its_parent_had_closes_nothing_else(tmp_path: Path) -> None:
    """What it opens and maps itself has other numbers and addresses; its standard input stays."""
    opened = Opened(tmp_path)

    def act() -> bool:
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(16)]
        memory = [np.ones(OTHERS_FILE_BYTES * GRANULE, np.uint8) for _ in range(16)]
        opened.attached_table.close()
        opened.attached.close(1.0)
        opened.segment.close()
        opened.table_file.close()
        opened.__dict__.clear()
        gc.collect()
        for file in (0, *files):
            os.fstat(file)
        return all(int(each.sum()) == each.size for each in memory)

    assert in_child(act) == 0
    assert opened.segment.path.exists()
    opened.close()


FORKS = """
import os, signal, sys
from peercache import Client
ports = [int(port) for port in sys.argv[2:]]
client = Client.open(
    embedded=True, pool_size="16MiB", shm_dir=sys.argv[1], cluster="forks", insecure=True,
    metrics_port=ports[2], listen=f"127.0.0.1:{ports[0]}", data_port=ports[1],
)
worker = os.fork()
if worker:
    print(worker, flush=True)
signal.pause()
"""


def test_a_dead_engines_memory_is_removed_though_its_worker_lives(tmp_path: Path) -> None:
    """The next start takes the node for dead, and has its room and its ports."""
    ports = [free_port() for _ in range(3)]
    with script(FORKS, str(tmp_path), *ports) as engine:
        assert engine.stdout is not None
        worker = int(engine.stdout.readline())
        try:
            wait_until(lambda: held(worker) == [])
            engine.kill()
            engine.wait()
            os.kill(worker, 0)

            assert len(remove_leftovers(tmp_path)) == 2
            for port in ports:
                socket.create_server(("127.0.0.1", int(port))).close()
        finally:
            os.kill(worker, signal.SIGKILL)
