"""The layout of a published segment: header | seals | page memory.

There is one aligned 64-byte seal per granule; a slot's seal is that of its first granule, `offset
// granule`, for all sizes of slots, so a record's seal never moves. Nothing here is ever resized.

Layout version history:
    1  the first: an 8-byte generation word a granule.
    2  a seal a granule.
    3  seals of 64 bytes, with 64 bits of the page's space.
"""

from __future__ import annotations

import re
import socket
import struct
from pathlib import Path

import attrs

from peercache.errors import Rejected
from peercache.model.ids import Incarnation, name_of
from peercache.model.seal import SEAL_BYTES

LAYOUT_VERSION = 3
HEADER_BYTES = 4096
GRANULE_BYTES_MIN = 4096
PAGE_MEMORY_BYTES_MAX = 2**50
"""A petabyte: no host has it, and sums of sizes below it cannot overflow."""

HUGE_PAGE_BYTES = 2 * 2**20
GIB_PAGE_BYTES = 2**30
SMALL_PAGE_BYTES = 4096

_MAGIC = b"peercach"
HEADER = struct.Struct("<8sIIQQQ36s")
_BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"
_BOOT_ID_CHARS = 36
_NAME = re.compile(r"peercache-(table-)?[0-9a-f]{16}", re.ASCII)

assert HEADER.size <= HEADER_BYTES, HEADER.size


@attrs.frozen
class Layout:
    """Offsets and sizes of one segment, in bytes.

    granule:      bytes for which a seal stands.
    page_bytes:   page memory, whole granules.
    seals_offset: offset of the seals in the file.
    pages_offset: offset of the page memory; aligned to a huge page unless the pool is smaller than
                  one.
    total_bytes:  size of the file.
    huge_page_bytes: size of the file's huge pages, 0 for normal pages.
    """

    granule: int
    page_bytes: int
    seals_offset: int
    pages_offset: int
    total_bytes: int
    huge_page_bytes: int = 0

    @classmethod
    def of(cls, page_bytes: int, granule: int, huge_page_bytes: int = 0) -> Layout:
        """Lay out `page_bytes` of page memory, rounded down to whole granules.

        With huge pages, it is rounded down to whole huge pages.
        """
        assert granule >= GRANULE_BYTES_MIN, granule
        assert granule & (granule - 1) == 0, granule
        assert granule <= page_bytes <= PAGE_MEMORY_BYTES_MAX, page_bytes
        assert page_bytes >= huge_page_bytes, page_bytes
        unit = max(granule, huge_page_bytes)
        whole = page_bytes // unit * unit
        alignment = HUGE_PAGE_BYTES if whole >= HUGE_PAGE_BYTES else SMALL_PAGE_BYTES
        alignment = huge_page_bytes or alignment
        seals_end = HEADER_BYTES + whole // granule * SEAL_BYTES
        pages_offset = -(-seals_end // alignment) * alignment
        total = pages_offset + whole
        return cls(granule, whole, HEADER_BYTES, pages_offset, total, huge_page_bytes)

    @property
    def seals_count(self) -> int:
        """Return the number of seals: one per granule."""
        return self.page_bytes // self.granule

    @property
    def seals_end(self) -> int:
        """Return the end of the seals in the file."""
        return self.seals_offset + self.seals_count * SEAL_BYTES

    @property
    def memory_bytes(self) -> int:
        """Return the memory of the file: a gap before aligned normal pages takes none."""
        if self.huge_page_bytes:
            return self.total_bytes
        return self.seals_end + self.page_bytes


@attrs.frozen
class Header:
    """The header of a segment."""

    incarnation: Incarnation
    granule: int
    page_bytes: int
    boot_id: str
    huge_page_bytes: int = 0


def pack_header(header: Header) -> bytes:
    """Return the bytes at the start of a segment."""
    return HEADER.pack(
        _MAGIC,
        LAYOUT_VERSION,
        header.huge_page_bytes,
        header.incarnation,
        header.granule,
        header.page_bytes,
        header.boot_id.encode("ascii").ljust(_BOOT_ID_CHARS),
    )


def parse_header(raw: bytes) -> Header:
    """Return the values of a header; raise Rejected, with the problem, for an invalid one."""
    if len(raw) < HEADER.size:
        raise Rejected("segment", f"{len(raw)} bytes, a header has {HEADER.size}")
    magic, version, huge, incarnation, granule, page_bytes, boot = HEADER.unpack_from(raw)
    if magic != _MAGIC:
        raise Rejected("segment", "not a published segment")
    if version != LAYOUT_VERSION:
        raise Rejected("segment", f"layout version {version}, ours is {LAYOUT_VERSION}")
    if incarnation == 0:
        raise Rejected("segment", "no node has the incarnation 0")
    if granule < GRANULE_BYTES_MIN or granule & (granule - 1):
        raise Rejected("segment", f"a granule of {granule} bytes")
    if not granule <= page_bytes <= PAGE_MEMORY_BYTES_MAX or page_bytes % granule:
        raise Rejected("segment", f"page memory of {page_bytes} bytes, granule {granule}")
    if huge not in (0, HUGE_PAGE_BYTES, GIB_PAGE_BYTES) or huge > page_bytes:
        raise Rejected("segment", f"huge pages of {huge} bytes")
    if not boot.isascii():
        raise Rejected("segment", "a boot id that is no ASCII")
    host = boot.decode("ascii").rstrip()
    return Header(Incarnation(incarnation), granule, page_bytes, host, huge)


def boot_id() -> str:
    """Return an id of this host, new at each boot: up to 36 ASCII characters.

    If the kernel has none, it is the host's name: two hosts with the same name are then
    distinguished by the segment, which cannot be opened on the wrong host.
    """
    try:
        found = Path(_BOOT_ID_PATH).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        found = "host-" + socket.gethostname().encode("ascii", "replace").decode("ascii")
    return found[:_BOOT_ID_CHARS]


def segment_name(incarnation: int) -> str:
    """Return the file name of a node's segment."""
    return f"peercache-{name_of(incarnation)}"


def table_name(incarnation: int) -> str:
    """Return the file name of a node's directory table."""
    return f"peercache-table-{name_of(incarnation)}"


def is_node_file(name: str) -> bool:
    """Return whether a file of this name is the segment or the directory table of some node."""
    return _NAME.fullmatch(name) is not None
