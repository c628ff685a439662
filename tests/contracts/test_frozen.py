"""What an earlier build wrote, this build still writes and reads.

The files in `frozen/` come from earlier builds. A failure here means that nodes of two
versions no longer understand each other, or that a user's data, scripts or dashboards break:

* messages: the control wire has changed. Keep it: the last release sends these bytes.
* disk: an existing `disk_path` is lost at the next update. Keep the format, or raise FORMAT_VERSION
  and read the old one too.
* segment: clients of the old build misread a new node's memory. Keep the layout, or raise
  LAYOUT_VERSION.
* public names: a program, a configuration file or a dashboard no longer works. Keep the name, or
  remove it in a version whose changes say so.

`python -m tests.contracts.frozen.record KIND` records what is new; it never replaces a version.
"""

from __future__ import annotations

import copy
import ctypes
import json
import lzma
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peercache.memory.attached import AttachedSegment
from peercache.memory.layout import LAYOUT_VERSION
from peercache.memory.published import PublishedSegment
from peercache.model.ids import Incarnation
from peercache.storage.check import stats_of
from peercache.storage.layout import FORMAT_VERSION, INDEX_NAME, LOCK_NAME
from peercache.wire.codec import decode, encode
from peercache.wire.envelope import MESSAGES, Envelope
from tests.contracts.frozen import public
from tests.contracts.frozen.record import (
    CLUSTER,
    FOLDER,
    SEGMENT_GRANULE,
    SEGMENT_INCARNATION,
    SEGMENT_PAGES,
    disk_keys,
    frozen_page,
    recorded_messages,
    segment_pages,
    segment_seals,
    segment_words,
    values_of,
)
from tests.pace import no_peer_is_taken_for_hung, wait_until
from tests.system.nodes import LocalCluster

FROZEN_MESSAGES = recorded_messages()
FROZEN_NAMES = json.loads((FOLDER / "public.json").read_text())
BOOT_ID = slice(40, 76)
"""Where a segment's header has the boot id, which is another on every machine."""


@pytest.mark.parametrize("frozen", FROZEN_MESSAGES, ids=lambda line: line["message"])
def test_message_has_the_bytes_of_the_earlier_build(frozen: dict[str, Any]) -> None:
    """The recorded bytes decode to the recorded values, and those encode to the same bytes."""
    raw = bytes.fromhex(frozen["hex"])

    found = decode(raw, cluster=CLUSTER)

    assert type(found.message) is MESSAGES[frozen["tag"]]
    assert (found.sender, found.target) == (frozen["sender"], frozen["target"])
    assert values_of(found.message) == frozen["values"]
    again = Envelope(found.sender, found.target, found.message)
    assert encode(again, cluster=CLUSTER) == raw


def test_every_message_is_recorded() -> None:
    """A message without recorded bytes could change unseen: `record messages` appends it."""
    assert [line["tag"] for line in FROZEN_MESSAGES] == sorted(3 * list(range(len(MESSAGES))))


@pytest.mark.parametrize("has_index", [True, False], ids=["with its index", "slabs only"])
def test_disk_folder_of_the_earlier_build_is_served(
    has_index: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that starts on the recorded folder returns every page of it, byte for byte."""
    no_peer_is_taken_for_hung(monkeypatch)
    with zipfile.ZipFile(FOLDER / f"disk-{FORMAT_VERSION}.zip") as packed:
        packed.extractall(tmp_path)
    # The cluster and the uid of the recording are in its lock file: this node adopts the folder.
    (tmp_path / "disk" / "0" / LOCK_NAME).write_text("")
    flags = ["--disk-enabled", "true", "--disk-path", str(tmp_path / "disk"), "--disk-size"]
    named = disk_keys()
    if has_index:
        reported = stats_of(tmp_path / "disk" / "0")
        assert (reported.index, reported.pages) == ("ok", len(named))
    else:
        (tmp_path / "disk" / "0" / INDEX_NAME).unlink()

    with LocalCluster() as cluster:
        client = cluster.client(cluster.start(flags=[*flags, "16MiB"]))
        wait_until(lambda: client.stats().get("home_disk_pages", 0) == len(named))
        buffers = [np.zeros(size, np.uint8) for _, size in named]
        # On a busy machine a get may end before its pages are loaded; the next one has them.
        wait_until(lambda: all(client.batch_get([key for key, _ in named], buffers)))

    for (key, size), buffer in zip(named, buffers, strict=True):
        assert np.array_equal(buffer, frozen_page(key, size)), key


def frozen_segment(folder: Path) -> Path:
    """Unpack the recorded segment file under its own name."""
    folder.mkdir(exist_ok=True)
    path = folder / f"peercache-{SEGMENT_INCARNATION:016x}"
    path.write_bytes(lzma.decompress((FOLDER / f"segment-{LAYOUT_VERSION}.xz").read_bytes()))
    return path


def test_segment_of_the_earlier_build_is_attached_and_read(tmp_path: Path) -> None:
    """Words and pages of the recorded segment are where this build looks for them."""
    segment = AttachedSegment.open(
        frozen_segment(tmp_path), incarnation=Incarnation(SEGMENT_INCARNATION), writable=False
    )
    offsets = np.arange(SEGMENT_PAGES, dtype=np.uint64) * np.uint64(SEGMENT_GRANULE)

    with segment.in_use():
        words, seals = segment.words(offsets), segment.seals(offsets)
        pages = [
            ctypes.string_at(segment.pages_address + int(offset), SEGMENT_GRANULE)
            for offset in offsets
        ]
    segment.close(1.0)

    assert (segment.granule, segment.page_bytes) == (SEGMENT_GRANULE, 16 * SEGMENT_GRANULE)
    assert words.tolist() == segment_words().tolist()
    assert seals.tobytes() == segment_seals().tobytes()
    assert pages == [page.tobytes() for page in segment_pages()]


def test_segment_of_this_build_is_laid_out_as_the_earlier_one(tmp_path: Path) -> None:
    """A file with the same content is the same file, the boot id apart."""
    earlier = bytearray(frozen_segment(tmp_path / "earlier").read_bytes())
    size = SEGMENT_PAGES * SEGMENT_GRANULE
    segment = PublishedSegment.create(
        tmp_path,
        incarnation=Incarnation(SEGMENT_INCARNATION),
        page_bytes=size,
        granule=SEGMENT_GRANULE,
    )
    segment.populate(size)
    segment.pages[:] = np.concatenate(segment_pages())
    segment.store_words(np.arange(SEGMENT_PAGES), segment_words(), segment_seals())

    today = bytearray(segment.path.read_bytes())
    segment.close()

    assert struct.unpack_from("<8sI", earlier) == (b"peercach", LAYOUT_VERSION)
    earlier[BOOT_ID] = today[BOOT_ID] = bytes(36)
    assert today == earlier


@pytest.mark.parametrize("kind", FROZEN_NAMES)
def test_public_names_are_still_there(kind: str) -> None:
    """Nothing that a user may refer to has gone, or has other parameters, defaults or labels."""
    today = public.names()[kind]
    frozen = FROZEN_NAMES[kind]

    if isinstance(frozen, list):
        assert set(frozen) <= set(today)
    elif kind == "commands":
        missing = {name: set(flags) - set(today[name]) for name, flags in frozen.items()}
        assert not any(missing.values()), missing
    elif kind == "classes":
        # A further keyword breaks no caller.
        for name, methods in frozen.items():
            for method, parameters in methods.items():
                assert set(parameters) <= set(today[name][method]), f"{name}.{method}"
    else:
        assert {name: today.get(name) for name in frozen} == frozen


def test_public_name_that_has_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting with another default, a command without a flag, a method without a parameter."""
    fewer = copy.deepcopy(public.names())
    fewer["settings"]["granule"] = ["--granule", "PEERCACHE_GRANULE", "4KiB"]
    fewer["commands"]["version"] = []
    fewer["classes"]["Operator"]["status"] = []
    monkeypatch.setattr(public, "names", lambda: fewer)

    for kind in ("settings", "commands", "classes"):
        with pytest.raises(AssertionError):
            test_public_names_are_still_there(kind)
