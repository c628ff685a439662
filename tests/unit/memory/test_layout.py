"""What lies where in a segment, and that nothing but a header is taken for one."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.errors import Rejected
from peercache.memory.layout import (
    HEADER_BYTES,
    Header,
    Layout,
    boot_id,
    is_node_file,
    pack_header,
    parse_header,
    segment_name,
)
from peercache.model.ids import Incarnation

HEADER = Header(Incarnation(0xABCDEF), 16384, 64 * 16384, "0" * 36)


@given(st.integers(0, 12), st.integers(1, 5000), st.integers(0, 4095))
def test_layout_gives_each_granule_its_seal_and_overlaps_nothing(
    shift: int, granules: int, rest: int
) -> None:
    """Header, seals and pages follow each other, pages aligned, for every size."""
    granule = 4096 << shift

    layout = Layout.of(granules * granule + rest, granule)

    assert layout.page_bytes == granules * granule
    assert layout.seals_count == granules
    assert layout.seals_offset >= HEADER_BYTES
    assert layout.pages_offset >= layout.seals_offset + 64 * granules
    assert layout.total_bytes == layout.pages_offset + layout.page_bytes
    assert layout.pages_offset % (2 * 2**20 if layout.page_bytes >= 2 * 2**20 else 4096) == 0
    assert layout.seals_offset % 64 == 0


def test_header_survives_a_round_trip() -> None:
    """What was packed is what is parsed."""
    raw = pack_header(HEADER)

    assert parse_header(raw) == HEADER
    assert parse_header(raw.ljust(HEADER_BYTES, b"\0")) == HEADER


def test_every_truncation_of_a_header_is_rejected() -> None:
    """A file that ends within its header is no segment."""
    raw = pack_header(HEADER)

    for size in range(len(raw)):
        with pytest.raises(Rejected):
            parse_header(raw[:size])


@pytest.mark.parametrize(
    ("offset", "replacement", "reason"),
    [
        (0, b"PEERCACH", "not a published segment"),
        (8, struct.pack("<I", 1), "layout version 1"),
        (16, struct.pack("<Q", 0), "incarnation 0"),
        (24, struct.pack("<Q", 0), "granule of 0"),
        (24, struct.pack("<Q", 2048), "granule of 2048"),
        (24, struct.pack("<Q", 16385), "granule of 16385"),
        (32, struct.pack("<Q", 0), "page memory of 0"),
        (32, struct.pack("<Q", 16384 + 1), "page memory of 16385"),
        (32, struct.pack("<Q", 2**63), "page memory of 9223372036854775808"),
        (40, b"\xff", "boot id"),
    ],
)
def test_header_with_a_wrong_field_is_rejected_with_its_reason(
    offset: int, replacement: bytes, reason: str
) -> None:
    """Each field that cannot be is named."""
    raw = bytearray(pack_header(HEADER))
    raw[offset : offset + len(replacement)] = replacement

    with pytest.raises(Rejected, match=reason):
        parse_header(bytes(raw))


@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_rejected_and_never_crashes(garbage: bytes, begins_well: bool) -> None:
    """Arbitrary bytes raise Rejected, or are a header that could have been packed."""
    raw = pack_header(HEADER)[:12] + garbage if begins_well else garbage

    try:
        header = parse_header(raw)
    except Rejected:
        return

    assert parse_header(pack_header(header)) == header


def test_boot_id_fits_a_header() -> None:
    """The boot id of this host comes back from a header as it went in."""
    header = Header(Incarnation(1), 4096, 4096, boot_id())

    assert 0 < len(boot_id()) <= 36
    assert parse_header(pack_header(header)) == header


def test_only_segment_names_are_segment_names() -> None:
    """Other files of the folder are never taken for ours."""
    assert segment_name(0xABC) == "peercache-0000000000000abc"
    assert is_node_file(segment_name(2**64 - 1))
    for name in ("peercache-", "peercache-xyz", segment_name(1) + "~", "a" + segment_name(1),
                 segment_name(1) + "\n", segment_name(10).upper()):  # fmt: skip
        assert not is_node_file(name)
