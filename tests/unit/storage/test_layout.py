"""Headers: what was written is read, and nothing else is."""

from __future__ import annotations

import pytest

from peercache.storage import layout
from peercache.storage.layout import (
    SlabHeader,
    SlotHeader,
    pack_slab,
    pack_slot,
    parse_slab,
    parse_slot,
    slab_name,
    slab_number,
)

SLOT = SlotHeader(b"k" * 16, 5, 1000, 8192, 77, 2**63 + 1, 1_800_000_000)
SLAB = SlabHeader(3, 257, 256 * 2**20)


def test_headers_are_read_as_they_were_written() -> None:
    """With whatever else the block holds."""
    assert parse_slot(pack_slot(SLOT) + b"rest of the block", 8192) == SLOT
    assert parse_slab(pack_slab(SLAB)) == SLAB


def test_every_flipped_bit_of_a_header_is_seen() -> None:
    """Its checksum covers all of it, the checksum included."""
    for packed, parse in (
        (pack_slot(SLOT), lambda block: parse_slot(block, 8192)),
        (pack_slab(SLAB)[:48], parse_slab),
    ):
        length = len(packed.rstrip(b"\0"))
        for bit in range(8 * length):
            damaged = bytearray(packed)
            damaged[bit // 8] ^= 1 << bit % 8
            assert parse(bytes(damaged)) is None


def test_every_header_that_is_cut_short_is_seen() -> None:
    """What a truncated file has left of it."""
    for end in range(len(pack_slot(SLOT))):
        assert parse_slot(pack_slot(SLOT)[:end], 8192) is None


def test_header_of_another_place_or_format_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each whole in itself."""
    with monkeypatch.context() as patch:
        patch.setattr(layout, "FORMAT_VERSION", 99)
        slot, slab = pack_slot(SLOT), pack_slab(SLAB)

    assert parse_slot(pack_slot(SLOT), 4096) is None
    assert parse_slot(slot, 8192) is None
    assert parse_slab(slab) is None
    assert parse_slot(pack_slab(SLAB), 8192) is None


def test_only_our_own_names_are_slabs() -> None:
    """What is removed is looked for by name."""
    assert slab_number(slab_name(123)) == 123
    for name in ("slab-12.pcs", "slab-000123.pcs.bak", "xslab-000123.pcs", "slab-00012x.pcs"):
        assert slab_number(name) is None
