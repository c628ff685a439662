"""Record what the build of this checkout writes, for `tests/contracts/test_frozen.py`.

    python -m tests.contracts.frozen.record messages    after a message was appended
    python -m tests.contracts.frozen.record public      after a public name was added
    python -m tests.contracts.frozen.record disk        after FORMAT_VERSION was raised
    python -m tests.contracts.frozen.record segment     after LAYOUT_VERSION was raised

Never record again to make a test pass: a changed format needs a new version number, and a file of
its own in addition to the old one.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from peercache.memory.layout import LAYOUT_VERSION
from peercache.memory.published import PublishedSegment
from peercache.model.ids import Incarnation
from peercache.model.member import Member
from peercache.model.seal import SEAL, Seals
from peercache.storage.layout import FORMAT_VERSION
from peercache.wire.codec import encode
from peercache.wire.envelope import MESSAGES, WIRE_VERSION, WIRE_VERSION_OLDEST, Envelope
from tests.contracts.frozen import public
from tests.pace import wait_until
from tests.system.nodes import LocalCluster, Page, keys_of

FOLDER = Path(__file__).parent
CLUSTER = "frozen"

SEGMENT_INCARNATION = 0x1122334455667788
SEGMENT_GRANULE = 16 * 2**10
SEGMENT_PAGES = 16
"""Slots of one granule each in the segment; every second one is committed."""

DISK_SIZES = (8 * 2**10, 64 * 2**10, 100_000, 256 * 2**10)
"""Bytes of the pages on disk: three size classes, and a length that fills no block."""
DISK_PAGES_EACH = 6

U64_MAX = 2**64 - 1
UNITS = {
    "keys": 16, "records": 56, "drops": 24, "lengths": 8, "offsets": 8, "checksums": 8, "ages": 8,
    "calls": 5, "regions": 24, "changes": 24, "held": 24,
}  # fmt: skip
"""Bytes of one item, for the fields that pack several."""


def values_of(message: Any) -> str:
    """Return a message's field values as text, without the names of its classes and fields."""
    return repr(attrs.astuple(message))


def sample(kind: type[Any], turn: int) -> Any:
    """Return a message with small values (turn 0), large ones (turn 1), or empty ones (turn 2)."""

    def bytes_of(name: str, at: int) -> bytes:
        count = UNITS.get(name, 3) * (2, 5, 0)[turn]
        return bytes((at * 37 + i * 11) % 256 for i in range(count))

    def value(field: attrs.Attribute[Any], at: int) -> Any:
        match str(field.type):
            case "int":
                return (at + 2, U64_MAX - at, 0)[turn]
            case "Tag":
                return (at + 2, 2**96 - 1 - at, 0)[turn]
            case "bool":
                return turn == 1
            case "float":
                return (0.25 * (at + 1), 1e300, 0.0)[turn]
            case "str":
                return (f"text {at}", "größer → 0123456789 " * 2, "")[turn]
            case "bytes":
                return bytes_of(field.name, at)
            case "Member":
                return member(at)
            case "tuple[int, ...]":
                return ((1, 23, 24, 255, 256), (U64_MAX, 65_535, 65_536, 2**32), ())[turn]
            case "tuple[Member, ...]":
                return ((member(1),), (member(2), member(3)), ())[turn]
            case "dict[str, int | float | str]":
                return ({"hits": 3, "share": 0.5}, {"a": -1, "b": 2**63, "c/d e": "text"}, {})[turn]
            case other:
                raise TypeError(f"no sample of {other}")

    def member(at: int) -> Member:
        said = {field.name: value(field, at + i) for i, field in enumerate(attrs.fields(Member))}
        return Member(**{**said, "incarnation": at + 1, "state": turn, "head_rank": at})

    return kind(**{field.name: value(field, i) for i, field in enumerate(attrs.fields(kind))})


def recorded_messages() -> list[dict[str, Any]]:
    """Return the recorded messages of every wire version that this build speaks, by tag."""
    versions = range(WIRE_VERSION_OLDEST, WIRE_VERSION + 1)
    paths = [FOLDER / f"messages-{version}.json" for version in versions]
    return [line for path in paths if path.exists() for line in json.loads(path.read_text())]


def record_messages() -> None:
    """Append the bytes of each message that has none yet; leave the others as they are.

    A message stands in the file of the wire version that brought it.
    """
    path = FOLDER / f"messages-{WIRE_VERSION}.json"
    found = json.loads(path.read_text()) if path.exists() else []
    known = {line["tag"] for line in recorded_messages()}
    for tag, kind in enumerate(MESSAGES):
        for turn in range(3):
            if tag in known:
                continue
            message = sample(kind, turn)
            sender, target = ((5, 7), (U64_MAX, U64_MAX - 1), (0, 0))[turn]
            raw = encode(Envelope(sender, target, message), cluster=CLUSTER)
            found.append(
                {
                    "tag": tag,
                    "message": kind.__name__,
                    "sender": sender,
                    "target": target,
                    "values": values_of(message),
                    "hex": raw.hex(),
                }
            )
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def disk_keys() -> list[tuple[str, int]]:
    """Return the keys of the recorded disk folder, each with the bytes of its page."""
    return [(key, size) for size in DISK_SIZES for key in keys_of(f"{size}", DISK_PAGES_EACH)]


def frozen_page(key: str, size: int) -> Page:
    """Return the bytes of a key: every KiB has a line of its own, repeated, so that they pack."""
    lines = [hashlib.sha256(f"{key}/{at}".encode()).digest() * 32 for at in range(0, size, 1024)]
    return np.frombuffer(b"".join(lines)[:size], np.uint8)


def record_disk() -> None:
    """Write pages through a node with a disk, stop it, and pack its folder."""
    with tempfile.TemporaryDirectory(prefix="frozen-") as folder, LocalCluster() as cluster:
        cluster.name = CLUSTER
        path = Path(folder) / "disk"
        flags = ["--disk-enabled", "true", "--disk-path", str(path), "--disk-size", "16MiB"]
        node = cluster.start("one", pool="16MiB", flags=flags)
        client = cluster.client(node)
        wait_until(lambda: client.stats().get("home_disk_open") == 1)
        named = disk_keys()
        pages = [frozen_page(key, size) for key, size in named]
        assert all(client.batch_set([key for key, _ in named], pages))
        wait_until(lambda: client.stats().get("home_disk_pages", 0) >= len(named))
        client.close()
        assert node.terminate() == 0
        packed_path = FOLDER / f"disk-{FORMAT_VERSION}.zip"
        with zipfile.ZipFile(packed_path, "w", zipfile.ZIP_LZMA) as packed:
            for file in sorted(path.rglob("*")):
                packed.write(file, file.relative_to(folder))


def record_segment() -> None:
    """Publish a small segment, commit every second slot, and pack the file."""
    size = SEGMENT_PAGES * SEGMENT_GRANULE
    with tempfile.TemporaryDirectory(prefix="frozen-") as folder:
        segment = PublishedSegment.create(
            folder,
            incarnation=Incarnation(SEGMENT_INCARNATION),
            page_bytes=size,
            granule=SEGMENT_GRANULE,
        )
        assert segment.populate(size) == size
        for slot, page in enumerate(segment_pages()):
            segment.pages[slot * SEGMENT_GRANULE :][:SEGMENT_GRANULE] = page
        segment.store_words(np.arange(SEGMENT_PAGES), segment_words(), segment_seals())
        packed = lzma.compress(segment.path.read_bytes())
        (FOLDER / f"segment-{LAYOUT_VERSION}.xz").write_bytes(packed)
        segment.close()


def segment_pages() -> list[Page]:
    """Return the pages of the recorded segment."""
    return [frozen_page(key, SEGMENT_GRANULE) for key in keys_of("segment", SEGMENT_PAGES)]


def segment_words() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return the generation words of the recorded segment: even for a committed slot."""
    return np.array([2 * n + 40 + n % 2 for n in range(SEGMENT_PAGES)], np.uint64)


def segment_seals() -> Seals:
    """Return the seals of the recorded segment."""
    seals = np.zeros(SEGMENT_PAGES, SEAL)
    seals["word"] = segment_words()
    names = [hashlib.sha256(key.encode()).digest()[:16] for key in keys_of("seal", SEGMENT_PAGES)]
    seals["key"] = np.frombuffer(b"".join(names), "V16")
    seals["space"] = 0xC0FFEE00 + np.arange(SEGMENT_PAGES)
    seals["length"] = SEGMENT_GRANULE - np.arange(SEGMENT_PAGES)
    return seals


def record_public() -> None:
    """Write the public names down."""
    names = json.dumps(public.names(), indent=1, ensure_ascii=False, sort_keys=True)
    (FOLDER / "public.json").write_text(names + "\n")


if __name__ == "__main__":
    {
        "messages": record_messages,
        "disk": record_disk,
        "segment": record_segment,
        "public": record_public,
    }[sys.argv[1]]()
