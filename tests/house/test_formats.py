"""The byte formats that the documentation shows are those of the code.

A table of a page has a row a field: | offset | field | type |. It is compared with the struct or
the dtype that packs the format.
"""

from __future__ import annotations

import re
import struct
from itertools import accumulate

import numpy as np
import pytest

from peercache.actors.disk.slabs import BLOCK_BYTES
from peercache.fabric.tcp import wire as tcp
from peercache.memory import layout as segment
from peercache.memory.layout import Layout
from peercache.model import records
from peercache.model.ids import Incarnation
from peercache.model.keys import Namespace, space_of
from peercache.model.seal import SEAL, SEAL_BYTES
from peercache.storage import layout as disk
from peercache.wire.codec import MESSAGE_BYTES_MAX
from peercache.wire.envelope import (
    ENVELOPE_VERSION,
    WIRE_VERSION,
    WIRE_VERSION_OLDEST,
    versions_spoken,
)
from tests.house.reference_pages import ROOT

WIRE = (ROOT / "docs/reference/wire-protocol.md").read_text()
DISK = (ROOT / "docs/explanation/disk-tier.md").read_text()
CONSISTENCY = (ROOT / "docs/explanation/consistency.md").read_text()

TABLE = re.compile(r"^\| offset \| field \| type \|.*\n\|[ |-]+\n((?:\|.*\n)+)", re.MULTILINE)
SIZES = {"u16": 2, "u32": 4, "u64": 8}

Field = tuple[int, int]
"""Where a field begins, and its bytes."""


def size_of(kind: str) -> int:
    """Return the bytes of a field's type as a page writes it."""
    return SIZES.get(kind) or int(kind.removesuffix(" bytes"))


def tables_of(text: str) -> list[tuple[list[Field], list[str]]]:
    """Return each table of a page: where its fields are, and what they are called."""
    found = []
    for block in TABLE.findall(text):
        rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in block.splitlines()]
        fields = [(int(row[0]), size_of(row[2])) for row in rows]
        found.append((fields, [row[1] for row in rows]))
    return found


def table_below(text: str, heading: str, which: int = 0) -> tuple[list[Field], list[str]]:
    """Return a table of the section under a heading."""
    section = re.search(
        rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL
    )
    assert section, heading
    return tables_of(section[2])[which]


def fields_of(*forms: struct.Struct | np.dtype[np.void]) -> list[Field]:
    """Return where the fields of packed forms lie that follow each other."""
    sizes: list[int] = []
    for form in forms:
        if isinstance(form, struct.Struct):
            parts = re.findall(r"\d*[a-zA-Z]", form.format.lstrip("<"))
            sizes += [struct.calcsize(f"<{part}") for part in parts]
        else:
            assert form.names is not None
            sizes += [form[name].itemsize for name in form.names]
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


FORMATS = [
    (WIRE, "Location record, 56 bytes", 0, (records.RECORD,)),
    (WIRE, "Drop, 24 bytes", 0, (records.DROP,)),
    (WIRE, "Seal, 40 bytes of 64", 0, (SEAL,)),
    (WIRE, "Greeting, 40 bytes", 0, (tcp.OPENING, tcp.REST)),
    (WIRE, "Answer, 8 bytes", 0, (tcp.ANSWER,)),
    (WIRE, "Request, 24 bytes and 24 a page", 0, (tcp.REQUEST,)),
    (WIRE, "Request, 24 bytes and 24 a page", 1, (tcp.ENTRY,)),
    (WIRE, "Segment header, 76 bytes", 0, (segment.HEADER,)),
    (DISK, "The files", 0, (disk.SLOT, disk.CHECK)),
    (DISK, "The files", 1, (disk.SLAB, disk.CHECK)),
]


@pytest.mark.parametrize(("page", "heading", "which", "forms"), FORMATS)
def test_table_shows_what_the_code_packs(
    page: str, heading: str, which: int, forms: tuple[struct.Struct | np.dtype[np.void], ...]
) -> None:
    """Each field at its offset, with its size; a size in the heading is that of the first table."""
    shown, names = table_below(page, heading, which)

    assert shown == fields_of(*forms)
    if which == 0 and (reported := re.search(r", (\d+) bytes", heading)):
        assert sum(size for _, size in shown) == int(reported[1])
    for form in forms:
        if isinstance(form, np.dtype):
            assert form.names is not None
            for name, shown_name in zip(form.names, names, strict=True):
                assert re.search(rf"\b{name}\b", shown_name), (name, shown_name)


def test_every_table_of_the_pages_is_compared() -> None:
    """A table that is added is not trusted unseen."""
    assert len(tables_of(WIRE)) + len(tables_of(DISK)) == len(FORMATS)


def test_a_table_that_is_wrong_is_found() -> None:
    """Offset, size and order matter."""
    page = "## X\n\n| offset | field | type | why |\n| --- | --- | --- | --- |\n| 0 | a | u32 | |\n"

    assert table_below(page + "| 4 | b | 16 bytes | |\n", "X") == (
        fields_of(struct.Struct("<I16s")),
        ["a", "b"],
    )
    assert table_below(page + "| 8 | b | u64 | |\n", "X")[0] != fields_of(struct.Struct("<IQ"))


def test_magic_words_are_those_that_are_packed() -> None:
    """What a person looks for in a capture or in a file."""
    greeting = tcp.encode_greeting(tcp.greet(cluster="c", granule=1, incarnation=1))
    none = np.zeros(1, np.uint64)
    packed = [
        greeting[:4],
        tcp.encode_answer("")[:4],
        tcp.encode_status("")[:4],
        tcp.encode_request(none, none, none, 1)[:4],
        segment.pack_header(segment.Header(Incarnation(1), 4096, 4096, "b"))[:8],
    ]
    for magic in packed:
        assert f"`{magic.decode()}`" in WIRE
    slot = disk.pack_slot(disk.SlotHeader(bytes(16), 1, 1, 1, 1, 1, 1))
    slab = disk.pack_slab(disk.SlabHeader(1, 1, 4096))
    for magic in (slot[:8], slab[:8]):
        assert f"`{magic.decode().encode('unicode_escape').decode()}`" in DISK
    assert f"| 6 | bytes that follow: {tcp.GREETING_REST_BYTES} |" in WIRE


def test_versions_are_those_of_the_code() -> None:
    """The newest version of each history, and what the pages say in a sentence."""
    history = re.findall(r"^\* Version (\d+):", WIRE, re.MULTILINE)
    changes = (ROOT / "CHANGELOG.md").read_text()

    assert [int(version) for version in history] == list(range(4, WIRE_VERSION + 1))
    assert WIRE_VERSION - WIRE_VERSION_OLDEST <= 1, "no more than N and N-1 are tested"
    assert f"This build speaks wire version {versions_spoken()}." in WIRE
    assert f"The first number of an envelope is {ENVELOPE_VERSION}" in WIRE
    assert f"Version {tcp.TCP_WIRE_VERSION} of the data port." in WIRE
    assert f"Layout version {segment.LAYOUT_VERSION}." in WIRE
    assert f"in disk format {disk.FORMAT_VERSION}:" in DISK
    assert f"The wire has version {WIRE_VERSION}." in changes
    assert f"Segments in shared memory have layout {segment.LAYOUT_VERSION}:" in changes
    assert f"The disk tier has format {disk.FORMAT_VERSION}:" in changes


def test_limits_are_those_of_the_code() -> None:
    """A sentence has no table, so each is looked for."""
    assert f"A message has at most {MESSAGE_BYTES_MAX // 1024} KiB;" in WIRE
    assert f"pages, at most {tcp.COUNT_MAX} |" in WIRE
    assert f"bytes of all pages, at most {tcp.REQUEST_BYTES_MAX // 2**30} GiB |" in WIRE
    portion = f"at most {tcp.PORTION_PAGES_MAX} pages and {tcp.PORTION_BYTES_MAX // 2**20} MiB"
    assert portion in WIRE
    assert f"a header in the first {segment.HEADER_BYTES} bytes" in WIRE
    assert f"one header block of {BLOCK_BYTES // 1024} KiB" in DISK
    assert f"*seals_address* + {SEAL_BYTES} × (offset ÷ *granule*)" in WIRE
    small, large = Layout.of(2**20, 4096), Layout.of(2**24, 4096)
    assert (small.pages_offset % 4096, large.pages_offset % 2**21) == (0, 0)


def test_refusals_of_the_data_port_are_listed_with_their_codes() -> None:
    """The reasons, in the order of their numbers."""
    codes = re.search(r"^\| code \|(.*)\n\|[ |-]+\n\| reason \|(.*)", WIRE, re.MULTILINE)
    assert codes
    listed = [cell.strip(" `") for cell in codes[2].strip("| ").split("|")]

    assert [int(cell) for cell in codes[1].strip("| ").split("|")] == list(
        range(1, len(tcp.REASONS))
    )
    assert listed == list(tcp.REASONS[1:])


def test_the_seal_of_the_argument_is_the_one_that_is_stored() -> None:
    """consistency.md names its fields without offsets."""
    rows = re.findall(r"^\| (\w+) \| (\d+) \|", CONSISTENCY, re.MULTILINE)

    assert SEAL.names is not None
    assert rows == [(name, str(SEAL[name].itemsize)) for name in SEAL.names]
    assert (
        space_of(Namespace("a").tag())
        == Namespace("a").space_tag()
        < 2 ** (8 * SEAL["space"].itemsize)
    )
