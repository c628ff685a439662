"""The format of the files of a page store, byte by byte.

A slab file begins with one block that names its slot size. A slot is one header block and the page,
padded to whole blocks. Every header carries its own place and a checksum of itself, so content that
was not written to a place is always detected.
"""

from __future__ import annotations

import re
import struct
from typing import Final

import attrs
import xxhash

from peercache.actors.disk.slabs import BLOCK_BYTES
from peercache.model.keys import Tag, parts_of, tag_of

FORMAT_VERSION: Final = 3
"""Version of superblock, slabs, slots and index. Other versions are not read, and are overwritten.

History:
    1  the first; its namespace tags do not identify the space of a page's seal.
    2  namespace tags whose low 32 bits are the space.
    3  namespace tags of 96 bits, whose low 64 bits are the space.
"""

SUPERBLOCK_NAME: Final = "store.json"
LOCK_NAME: Final = "lock"
INDEX_NAME: Final = "index.sqlite"

SLOT = struct.Struct("<8sII16sQQQQII")
SLAB = struct.Struct("<8sIIQQ")
CHECK = struct.Struct("<Q")
_SLOT_MAGIC = b"PCSLOT\r\n"
SLOT_FORMAT: Final = struct.pack("<8sI", _SLOT_MAGIC, FORMAT_VERSION)
"""How each slot begins."""
_SLAB_MAGIC = b"PCSLAB\r\n"
_SLAB_NAME = re.compile(r"slab-(\d{6})\.pcs", re.ASCII)

assert SLOT.size + CHECK.size <= BLOCK_BYTES
assert SLAB.size + CHECK.size <= BLOCK_BYTES


@attrs.frozen
class SlotHeader:
    """The header of a slot. written: unix seconds."""

    key: bytes
    namespace: Tag
    length: int
    place: int
    sequence: int
    checksum: int
    written: int


@attrs.frozen
class SlabHeader:
    """The header of a slab. blocks: its slot size."""

    number: int
    blocks: int
    slab_bytes: int


def checksum_of(view: memoryview | bytes) -> int:
    """Return the xxh3_64; computed without the GIL."""
    return int(xxhash.xxh3_64_intdigest(view))


def pack_slot(header: SlotHeader) -> bytes:
    """Return the beginning of a header block; the rest of it is ignored."""
    space, variant = parts_of(header.namespace)
    packed = SLOT.pack(
        _SLOT_MAGIC,
        FORMAT_VERSION,
        header.length,
        header.key,
        space,
        header.place,
        header.sequence,
        header.checksum,
        header.written,
        variant,
    )
    return packed + CHECK.pack(checksum_of(packed))


def parse_slot(block: memoryview | bytes, place: int) -> SlotHeader | None:
    """Return the header of the slot at `place`, or None if it is invalid, or of another place."""
    if not _is_whole(block, SLOT):
        return None
    magic, version, length, key, space, at, sequence, checksum, written, variant = SLOT.unpack_from(
        block
    )
    if magic != _SLOT_MAGIC or version != FORMAT_VERSION or at != place or not length:
        return None
    return SlotHeader(key, tag_of(space, variant), length, place, sequence, checksum, written)


def pack_slab(header: SlabHeader) -> bytes:
    """Return the first block of a slab."""
    packed = SLAB.pack(_SLAB_MAGIC, FORMAT_VERSION, header.blocks, header.number, header.slab_bytes)
    return (packed + CHECK.pack(checksum_of(packed))).ljust(BLOCK_BYTES, b"\0")


def parse_slab(block: memoryview | bytes) -> SlabHeader | None:
    """Return the header of a slab, or None if it is not a slab of this format."""
    if not _is_whole(block, SLAB):
        return None
    magic, version, blocks, number, slab_bytes = SLAB.unpack_from(block)
    if magic != _SLAB_MAGIC or version != FORMAT_VERSION or not blocks:
        return None
    return SlabHeader(number, blocks, slab_bytes)


def slab_name(number: int) -> str:
    """Return the file name of a slab."""
    return f"slab-{number:06d}.pcs"


def slab_number(name: str) -> int | None:
    """Return the number of a slab file, None for a file that is not a slab of ours."""
    found = _SLAB_NAME.fullmatch(name)
    return int(found[1]) if found else None


def _is_whole(block: memoryview | bytes, form: struct.Struct) -> bool:
    if len(block) < form.size + CHECK.size:
        return False
    (check,) = CHECK.unpack_from(block, form.size)
    return bool(check == checksum_of(bytes(block[: form.size])))
