"""What is fuzzed: each target takes any bytes, and fails if its reader raises what it must not.

Where a checksum would keep all but honest bytes out, the target makes it right, so that what is
behind it sees any fields.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import struct
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import msgspec
import numpy as np
import trio
import trio.testing

from peercache.actors.directory.table import DirectoryTable
from peercache.actors.disk.index import DiskIndex
from peercache.actors.disk.slabs import BLOCK_BYTES
from peercache.actors.ports import DISK_ENTRY
from peercache.errors import Rejected, RemoteProtocolError
from peercache.events import blocks
from peercache.fabric.tcp import wire
from peercache.http.access import HttpClient
from peercache.http.history import Watching
from peercache.http.pages import Pages
from peercache.http.server import LONG_BODIES, HttpExchange
from peercache.memory.layout import Header, pack_header, parse_header
from peercache.memory.published import TableFile
from peercache.memory.table_reading import AttachedTable, Unusable
from peercache.model.ids import Incarnation
from peercache.model.keys import tag_of
from peercache.observability.metrics import Metrics
from peercache.storage.index_file import load_entries
from peercache.storage.layout import (
    CHECK,
    SLAB,
    SLOT,
    SlabHeader,
    SlotHeader,
    checksum_of,
    pack_slab,
    pack_slot,
    parse_slab,
    parse_slot,
)
from peercache.storage.slab_files import consistent
from peercache.wire import codec
from tests.contracts.fabric_suite import GRANULE, INCARNATION
from tests.contracts.fakes import PlainMemory
from tests.fuzz import tls
from tests.pace import TIMEOUT_S
from tests.unit.actors.record_cluster import key_of, records_of
from tests.unit.fabric.serving import CLUSTER, PageServer
from tests.unit.http.http_node import OK, OWN, alone
from tests.unit.http.test_prefix import PROMPT, Nodes, ask

CORPUS = Path(__file__).parent / "corpus"
"""Inputs that once failed, in a folder for each target, and short ones that reach much."""
MESSAGES = Path(__file__).parents[1] / "contracts/frozen/messages-4.json"
SLAB_BYTES, SLABS = 2**20, 8
RING, NOW_S = 77, 1000.0


@attrs.frozen
class Target:
    """A reader of bytes. seeds: honest inputs."""

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]


# --- messages and frames --------------------------------------------------------------------------


def codec_of(data: bytes) -> None:
    """A message of the control plane: refused, or one that is encoded again as it was."""
    try:
        envelope = codec.decode(data, cluster="frozen")
    except RemoteProtocolError:
        return
    again = codec.decode(codec.encode(envelope, cluster="frozen"), cluster="frozen")
    assert again == envelope, "another message"


def messages() -> Iterator[bytes]:
    """Yield one of each message."""
    for row in json.loads(MESSAGES.read_text()):
        yield bytes.fromhex(row["hex"])


@cache
def _server() -> PageServer:
    memory = PlainMemory.of(2**20, GRANULE)
    memory.seals["word"] = 2 * np.arange(len(memory.seals)) + 2
    memory.seals["length"] = len(memory.pages)
    return PageServer(memory, incarnation=INCARNATION, granule=GRANULE)


def _greeting() -> bytes:
    return wire.encode_greeting(
        wire.greet(cluster=CLUSTER, granule=GRANULE, incarnation=INCARNATION)
    )


def tcp_requests(data: bytes) -> None:
    """What a client sends to the data port after its greeting: answered, or the connection ends."""
    for greeting in (_greeting(), b""):
        with (
            socket.create_connection(("127.0.0.1", _server().port), 10.0) as client,
            contextlib.suppress(ConnectionError),
        ):
            client.sendall(greeting + data)
            client.shutdown(socket.SHUT_WR)
            while client.recv(2**20):
                pass
    assert _server()._thread.is_alive(), "the server has ended"


def honest_requests() -> Iterator[bytes]:
    """Yield requests for one page, and for many."""
    for count in (1, 7):
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(GRANULE)
        lengths = np.full(count, 64, np.uint64)
        yield wire.encode_request(offsets, lengths, offsets * 0 + np.uint64(2), INCARNATION)


# --- files and memory -----------------------------------------------------------------------------


def slots(data: bytes) -> None:
    """The header block of a slot, and of a slab, with a checksum that is right."""
    for form, parse in ((SLOT, lambda raw: parse_slot(raw, 8)), (SLAB, parse_slab)):
        parse(data)
        body = data[: form.size].ljust(form.size, b"\0")
        parse((body + CHECK.pack(checksum_of(body))).ljust(BLOCK_BYTES, b"\0"))


def honest_slots() -> Iterator[bytes]:
    """Yield a header of each."""
    yield pack_slot(SlotHeader(bytes(16), tag_of(5, 0), 100, 8, 1, 2, 3))
    yield pack_slab(SlabHeader(3, 25, SLAB_BYTES))


def index_rows(data: bytes) -> None:
    """Rows of a disk's index: refused as damage, or pages of slabs that the index takes."""
    size = DISK_ENTRY.itemsize
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(
            "CREATE TABLE slots (place INTEGER PRIMARY KEY, entry BLOB NOT NULL, used NOT NULL)"
        )
        for at in range(0, min(len(data), 64 * size), size):
            blob = data[at : at + size]
            used = int.from_bytes(blob[:8], "little", signed=True)
            value: Any = (used, blob.decode("latin1"), float(used))[len(blob) % 3]
            connection.execute("INSERT INTO slots VALUES (?, ?, ?)", (at, blob, value))
        try:
            entries = load_entries(connection)
        except sqlite3.DatabaseError:
            return
    files: Any = SimpleNamespace(
        folder=SimpleNamespace(slab_bytes=SLAB_BYTES),
        blocks_of={number: 1 + number * 5 for number in range(SLABS)},
    )
    kept = consistent(entries, files, SLABS)
    index = DiskIndex(capacity_bytes=SLABS * SLAB_BYTES, slab_bytes=SLAB_BYTES)
    index.load(kept)


def honest_rows() -> Iterator[bytes]:
    """Yield two pages of a slab."""
    rows = np.zeros(2, DISK_ENTRY)
    for number, row in enumerate(rows):
        row["key"] = bytes([number + 1]) * 16
        row["place"] = BLOCK_BYTES * (1 + number)
        row["length"], row["sequence"], row["slot"] = 100, number + 1, 1
    yield rows.tobytes()


def segment(data: bytes) -> None:
    """The header of a segment: the same values again, or refused."""
    try:
        header = parse_header(data)
    except Rejected:
        return
    assert parse_header(pack_header(header)) == header


def honest_segment() -> Iterator[bytes]:
    """Yield the header of a node's segment."""
    yield pack_header(Header(Incarnation(7), 16384, 2**20, "boot"))


@cache
def _table() -> tuple[int, list[tuple[int, bytes]]]:
    """Return a copy of a table in memory, and the place and bytes of each word that is not zero."""
    with tempfile.TemporaryDirectory(prefix="peercache-", dir="/dev/shm") as folder:
        file = TableFile.create(folder, Incarnation(7), None)
        table = DirectoryTable(
            bytes(range(16)), answer_max=64, rows_max=1024, slots_min=64, file=file.file,
            incarnation=7,
        )  # fmt: skip
        assert table.begin(11, is_served=True) == 0
        table.put(0, records_of(11, list(range(1, 10)), [10] * 9).tobytes())
        table.grant(RING.to_bytes(8, "little"))
        table.tick(NOW_S)
        raw = Path(file.path).read_bytes()
        file.close()
    words = np.frombuffer(raw, "<u8")
    known = [(8 * at, words[at].tobytes()) for at in np.flatnonzero(words).tolist()]
    copy = os.memfd_create("table")
    os.ftruncate(copy, len(raw))
    for at, word in known:
        os.pwrite(copy, word, at)
    return copy, known


def table(data: bytes) -> None:
    """A directory table whose words any owner wrote: records, or refused; read in both ways."""
    copy, known = _table()
    spoilt: dict[int, bytes] = {}
    for begin in range(0, len(data) - 11, 12):
        at, word = known[int.from_bytes(data[begin : begin + 4], "little") % len(known)]
        os.pwrite(copy, data[begin + 4 : begin + 12], at)
        spoilt[at] = word
    _look(copy)
    for at, word in spoilt.items():
        os.pwrite(copy, word, at)


def _look(copy: int) -> None:
    for by_kernel in (True, False):
        try:
            reader = AttachedTable(os.dup(copy), Incarnation(7), by_kernel=by_kernel)
        except (Unusable, Rejected):
            continue
        with contextlib.suppress(Unusable):
            reader.look(b"".join(map(key_of, range(1, 12))), RING, NOW_S, 0)
        reader.close()


def honest_words() -> Iterator[bytes]:
    """Yield words of the header as they are, for a fuzzer to change."""
    _, known = _table()
    for first in range(0, len(known), 8):
        yield b"".join(
            struct.pack("<I", number) + word
            for number, (_, word) in enumerate(known[first : first + 8], first)
        )


# --- events and questions -------------------------------------------------------------------------


def events(data: bytes) -> None:
    """A batch of block events of an engine: refused, or events that are encoded again."""
    try:
        batch = blocks.decode(data)
    except RemoteProtocolError:
        return
    for event in batch.events:
        blocks.check(event)
    again = blocks.decode(blocks.encode(blocks.EventBatch(1.0, batch.events, None)))
    assert again.events == batch.events, "other events"


def honest_events() -> Iterator[bytes]:
    """Yield a batch of each kind."""
    stored = blocks.BlockStored((1, 2), None, tuple(PROMPT[:12]), 6)
    removed = blocks.BlockRemoved((1,))
    yield blocks.encode(blocks.EventBatch(1.0, (stored, removed, blocks.AllBlocksCleared()), 0))
    fields = {"type": "BlockStored", "block_hashes": [b"a" * 32], "token_ids": [1, 2],
              "block_size": 2, "parent_block_hash": None}  # fmt: skip
    yield msgspec.msgpack.encode([1.0, [fields]])


async def _hinted(*_: object) -> dict[str, int]:
    return {"retained": 1}


@cache
def _application() -> Any:
    """Return all that a node serves."""
    index = attrs.evolve(Nodes().index(), hint=_hinted)
    return Pages(Metrics().registry, lambda: OK, lambda: OWN, Watching(alone), index).application()


def questions(data: bytes) -> None:
    """The body of a question or hint: answered, or refused with a status of 400 to 422."""
    for path in LONG_BODIES:
        status, _ = trio.run(ask, _application(), path, data)
        assert status in (200, 400, 422), f"{path}: status {status}"


def requests(data: bytes) -> None:
    """What a client sends to the HTTP port: one answer, and not that the node has a bug."""
    answer = trio.run(_exchange, data)
    assert not answer or answer.startswith(b"HTTP/1.1 "), "no answer of HTTP"
    assert b" 500 " not in answer.partition(b"\r\n")[0], answer


async def _exchange(data: bytes) -> bytes:
    ours, theirs = trio.testing.memory_stream_pair()
    await ours.send_all(data)
    await ours.send_eof()
    client = HttpClient(("127.0.0.1", 1), ("127.0.0.1", 2))
    with trio.fail_after(TIMEOUT_S):
        await HttpExchange(theirs, client).run(_application(), lambda *_: "")
    await theirs.aclose()
    return b"".join([part async for part in ours])


def honest_http() -> Iterator[bytes]:
    """Yield a request of each path, one with a body, and one in chunks."""
    paths = ("/?range=3600&sort=name", f"/nodes/{OWN}", "/api/v1/status", "/api/v1/status/n%20",
             "/metrics", "/healthz", "/files/dashboard.js", "/api/v1/prefix/engines")  # fmt: skip
    for path in paths:
        yield f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n".encode()
    post = "POST /api/v1/prefix/hashes HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    yield f'{post}Content-Length: 13\r\n\r\n{{"hashes":[]}}'.encode()
    chunked = "Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    yield f"{post}{chunked}".encode()


def honest_questions() -> Iterator[bytes]:
    """Yield a question of each kind."""
    space = {"name": "n", "geometry": "", "coordinates": "", "weights": ""}
    known = {"model": "m", "dtype": "bfloat16", "page_tokens": 6, "namespace": space}
    yield json.dumps({**known, "tokens": list(PROMPT[:12])}).encode()
    yield json.dumps({"hashes": ["ab" * 32], "namespace": space}).encode()
    yield json.dumps({"hashes": ["a"], "hint": "retain", "seconds": 1.5}).encode()


TARGETS = {
    "codec": Target(codec_of, messages),
    "tcp": Target(tcp_requests, honest_requests),
    "slots": Target(slots, honest_slots),
    "index": Target(index_rows, honest_rows),
    "segment": Target(segment, honest_segment),
    "table": Target(table, honest_words),
    "events": Target(events, honest_events),
    "questions": Target(questions, honest_questions),
    "http": Target(requests, honest_http),
    "handshake": Target(tls.handshake, tls.honest_handshakes),
    "tls": Target(tls.session, tls.honest_sessions),
    "answers": Target(tls.answers, tls.honest_answers),
    "certificate": Target(tls.certificate, tls.honest_names),
}


def kept(name: str) -> Path:
    """Return the file of short inputs of a target that reach much."""
    return CORPUS / f"{name}.hex"


def corpus(name: str) -> Iterator[bytes]:
    """Yield the honest inputs of a target, and those that are kept."""
    yield from TARGETS[name].seeds()
    if kept(name).is_file():
        yield from map(bytes.fromhex, kept(name).read_text().split())
    folder = CORPUS / name
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            yield path.read_bytes()
