"""One page as a file: its header, its chunks, and what makes a file a page.

    block 0     header of HEADER_BYTES: magic, version, codec, chunk size, key, length of the page,
                then stored length and xxh3_64 of each chunk, and the xxh3_64 of all that
    then        each chunk of the page, as the codec stores it, from a multiple of BLOCK on

Checksums are those of the page's own bytes, so they also prove a decompression right. Blocks suit
O_DIRECT. Numbers are little-endian.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Any, Protocol, final

import attrs
import numpy as np
import xxhash

from peercache.errors import ConfigError
from peercache.memory.copying import Pieces, Side, scatter
from peercache.model.runs import U64

BLOCK = 4096
"""Of O_DIRECT: no device wants more."""

MAGIC = b"PCkv"
VERSION = 1
_FIXED = struct.Struct("<4sHHI16sQ")
_CHUNK = struct.Struct("<IQ")
HEADER_BYTES = BLOCK
CHUNKS_MAX = (HEADER_BYTES - _FIXED.size - 8) // _CHUNK.size
CHUNK_BYTES = 4 * 2**20
PAGE_BYTES_MAX = CHUNKS_MAX * CHUNK_BYTES

RAW, ZSTD = 0, 1
"""Codecs."""

WORTH = 15 / 16
"""Of a page's bytes: what compresses to more is stored as it is, and read without a codec."""


class NoPage(Exception):
    """A file is no page, or not this one. is_damaged: it never will be one again."""

    def __init__(self, problem: str, *, is_damaged: bool) -> None:
        """Say what is wrong."""
        super().__init__(problem)
        self.is_damaged = is_damaged


class Codec(Protocol):
    """Compresses chunks; used by one thread at a time."""

    def compress(self, raw: memoryview) -> bytes:
        """Return a chunk as it is stored."""

    def decompress(self, stored: memoryview, length: int) -> bytes:
        """Return the chunk of `length` bytes. Raises what the library raises."""


@final
class Zstd:
    """The codec of the extra `zstd`."""

    def __init__(self, level: int) -> None:
        """Make one. ConfigError: the library is missing."""
        try:
            import zstandard  # noqa: PLC0415 - only a folder that compresses needs it
        except ImportError as error:
            raise ConfigError(
                "zstd_level", "zstandard is not installed: pip install 'peercache-kv[zstd]'"
            ) from error
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=False)
        self._decompressor = zstandard.ZstdDecompressor()
        self._length_of = zstandard.frame_content_size

    def compress(self, raw: memoryview) -> bytes:
        """Return a chunk as it is stored."""
        compressed: bytes = self._compressor.compress(raw)
        return compressed

    def decompress(self, stored: memoryview, length: int) -> bytes:
        """Return the chunk of `length` bytes. Raises what the library raises."""
        # The library makes room for what the frame says, whatever is allowed.
        if self._length_of(stored) != length:
            raise ValueError("the frame has another length")
        raw: bytes = self._decompressor.decompress(stored)
        return raw


@final
class Room:
    """Aligned memory of one thread, for a chunk on its way between a file and the engine."""

    def __init__(self) -> None:
        """Map it: a chunk, and the header."""
        self._map = mmap.mmap(-1, CHUNK_BYTES + HEADER_BYTES)
        self.chunk = memoryview(self._map)[:CHUNK_BYTES]
        self.header = memoryview(self._map)[CHUNK_BYTES:]
        self.chunk_address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


@attrs.frozen(eq=False)
class EnginePage:
    """A page in the engine's memory: (runs,) addresses and sizes."""

    addresses: U64
    sizes: U64

    @property
    def length(self) -> int:
        """The bytes of the page."""
        return int(self.sizes.sum())


def write_page(fd: int, key: bytes, place: EnginePage, room: Room, codec: Codec | None) -> int:
    """Write a page into an empty file; return the file's bytes. Raises OSError.

    A page that does not get smaller is stored as it is, whatever the codec.
    """
    length = place.length
    if not 0 < length <= PAGE_BYTES_MAX:
        raise NoPage(f"a page of {length} bytes, at most {PAGE_BYTES_MAX}", is_damaged=False)
    side = Side(place.addresses, place.sizes)
    chunks, end = _write_chunks(fd, side, length, room, codec)
    used = RAW if codec is None else ZSTD
    if used == ZSTD and (not chunks or sum(stored for stored, _ in chunks) > length * WORTH):
        os.ftruncate(fd, 0)
        chunks, end = _write_chunks(fd, side, length, room, None)
        used = RAW
    header = _FIXED.pack(MAGIC, VERSION, used, CHUNK_BYTES, key, length)
    header += b"".join(_CHUNK.pack(*chunk) for chunk in chunks)
    header = header.ljust(HEADER_BYTES - 8, b"\0")
    room.header[:] = header + struct.pack("<Q", xxhash.xxh3_64_intdigest(header))
    _write_all(fd, room.header, 0)
    return end


def page_length(fd: int) -> int:
    """Return the bytes of the page that a file says it has, unverified; 0 of what is no page."""
    raw = os.pread(fd, _FIXED.size, 0)
    if len(raw) < _FIXED.size or not raw.startswith(MAGIC):
        return 0
    length: int = _FIXED.unpack(raw)[5]
    return length


def read_page(fd: int, key: bytes, place: EnginePage, room: Room, codec: Codec | None) -> None:
    """Read a page into its place, chunk by chunk, each verified before it is copied.

    NoPage: this file is not the page of that key and length. Raises OSError.
    """
    length = place.length
    used, chunks = _header(fd, key, length, room)
    if used == ZSTD and codec is None:
        raise NoPage("it is compressed, and zstandard is not here", is_damaged=False)
    side = Side(place.addresses, place.sizes)
    offset = HEADER_BYTES
    for number, (stored, checksum) in enumerate(chunks):
        begin = number * CHUNK_BYTES
        size = min(CHUNK_BYTES, length - begin)
        wanted = room.chunk[: _blocks(stored)]
        if _read_all(fd, wanted, offset) < stored:
            raise NoPage("the file is too short", is_damaged=True)
        offset += len(wanted)
        raw: Any = room.chunk[:stored]
        if used == ZSTD and codec is not None:
            raw = _decompressed(codec, raw, size)
        if len(raw) != size or xxhash.xxh3_64_intdigest(raw) != checksum:
            raise NoPage("the checksum is wrong", is_damaged=True)
        copied = _copy(side, begin, size, raw, room, to_engine=True)
        if copied != size:
            raise NoPage("the engine's memory is not there", is_damaged=False)


def _header(fd: int, key: bytes, length: int, room: Room) -> tuple[int, list[tuple[int, int]]]:
    """Return the codec, and (stored bytes, checksum) of each chunk of a page that fits."""
    if _read_all(fd, room.header, 0) < HEADER_BYTES:
        raise NoPage("the header is too short", is_damaged=True)
    raw = bytes(room.header)
    (checksum,) = struct.unpack_from("<Q", raw, HEADER_BYTES - 8)
    if xxhash.xxh3_64_intdigest(raw[:-8]) != checksum:
        raise NoPage("the header's checksum is wrong", is_damaged=True)
    magic, version, used, chunk_bytes, of_key, of_length = _FIXED.unpack_from(raw)
    if (magic, version, chunk_bytes) != (MAGIC, VERSION, CHUNK_BYTES) or used not in {RAW, ZSTD}:
        raise NoPage("it has another format", is_damaged=False)
    if of_key != key:
        raise NoPage("it is the page of another key", is_damaged=True)
    if of_length != length:
        raise NoPage(f"it has {of_length} bytes, {length} are asked for", is_damaged=False)
    count = -(-length // CHUNK_BYTES)
    chunks = [_CHUNK.unpack_from(raw, _FIXED.size + i * _CHUNK.size) for i in range(count)]
    if any(stored > CHUNK_BYTES for stored, _ in chunks):
        raise NoPage("a chunk is too long", is_damaged=True)
    return used, chunks


def _write_chunks(
    fd: int, side: Side, length: int, room: Room, codec: Codec | None
) -> tuple[list[tuple[int, int]], int]:
    """Return (stored bytes, checksum) of each chunk, and where the file ends.

    No chunks: one of them does not get smaller.
    """
    chunks, offset = [], HEADER_BYTES
    for begin in range(0, length, CHUNK_BYTES):
        size = min(CHUNK_BYTES, length - begin)
        raw = room.chunk[:size]
        if _copy(side, begin, size, raw, room, to_engine=False) != size:
            raise NoPage("the engine's memory is not there", is_damaged=False)
        checksum = xxhash.xxh3_64_intdigest(raw)
        stored = size
        # What grows does not fit in the room; the whole page is then stored as it is.
        if codec is not None and len(compressed := codec.compress(raw)) <= size:
            stored = len(compressed)
            room.chunk[:stored] = compressed
        elif codec is not None:
            return [], 0
        blocks = _blocks(stored)
        room.chunk[stored:blocks] = bytes(blocks - stored)
        _write_all(fd, room.chunk[:blocks], offset)
        chunks.append((stored, checksum))
        offset += blocks
    return chunks, offset


def _decompressed(codec: Codec, stored: memoryview, size: int) -> bytes:
    try:
        return codec.decompress(stored, size)
    except Exception as error:  # The library's own class, and MemoryError for absurd lengths.
        raise NoPage(f"it does not decompress: {error}", is_damaged=True) from error


def _copy(side: Side, begin: int, size: int, raw: Any, room: Room, *, to_engine: bool) -> int:
    """Copy a chunk between the engine and the room, or from `raw` bytes; return the bytes."""
    address = room.chunk_address
    if isinstance(raw, bytes):
        address = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
    ours: Pieces = np.array([[address, size]], np.uint64)
    return scatter(side.cut(begin, begin + size), ours, to_segment=not to_engine)


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _read_all(fd: int, into: memoryview, offset: int) -> int:
    """Return the bytes read, fewer than asked for at the file's end."""
    total = 0
    while into:
        count = os.preadv(fd, [into], offset)
        total += count
        if count % BLOCK or not count:
            break
        into, offset = into[count:], offset + count
    return total
