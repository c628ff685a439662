"""The parts of LMCache that the adapter imports, where LMCache is not installed."""

from __future__ import annotations

import ctypes
import os
import select
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import pytest


class Bitmap:
    """One bit a place."""

    def __init__(self, size: int) -> None:
        """Begin with no bit set."""
        self.bits = [False] * size

    def set(self, place: int) -> None:
        """Set a bit."""
        self.bits[place] = True


class L2StoreResult(int):
    """LMCache's: the bytes, or -1 for a failure."""

    def __new__(cls, success: bool, bytes_transferred: int) -> L2StoreResult:
        """Encode success and bytes."""
        return super().__new__(cls, bytes_transferred if success else -1)


@attrs.frozen
class AdapterUsage:
    """Bytes used, and of how many."""

    total_bytes_used: int
    total_capacity_bytes: int
    bytes_by_cache_salt: Any = attrs.field(factory=dict)


class L2AdapterInterface:
    """The base class: what it is notified of."""

    def __init__(self, max_capacity_bytes: int = 0) -> None:
        """Note what is reported."""
        self.stored: list[tuple[Any, int]] = []
        self.accessed: list[Any] = []
        self.deleted: list[Any] = []
        self.sizes: dict[Any, int] = {}
        """Of what is stored, by the notifications."""

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.stored += zip(keys, sizes, strict=True)
        self.sizes.update(zip(keys, sizes, strict=True))

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None:
        self.deleted += keys
        for key, size in zip(keys, sizes, strict=True):
            assert self.sizes.pop(key, 0) == size


class Notifier:
    """A descriptor that becomes readable."""

    def __init__(self) -> None:
        """Open it."""
        self.number = os.eventfd(0, os.EFD_NONBLOCK) if hasattr(os, "eventfd") else -1

    def fileno(self) -> int:
        """Return the descriptor."""
        return self.number

    def notify(self) -> None:
        """Make it readable."""
        os.eventfd_write(self.number, 1)

    def close(self) -> None:
        """Close it."""
        os.close(self.number)


@attrs.frozen
class ObjectKey:
    """LMCache's key of an object."""

    chunk_hash: bytes
    model_name: str = "a/model"
    kv_rank: int = 0x01000100
    object_group_id: int = 0
    cache_salt: str = ""

    def to_encoded_object_key(self) -> EncodedObjectKey:
        """Return the form that is written as JSON."""
        rest = (self.model_name, self.kv_rank, self.object_group_id, self.cache_salt)
        return EncodedObjectKey(self.chunk_hash.hex(), *rest)


@attrs.frozen
class EncodedObjectKey:
    """A key as JSON has it."""

    chunk_hash_hex: str
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""

    def to_object_key(self) -> ObjectKey:
        """Return the key."""
        rest = (self.model_name, self.kv_rank, self.object_group_id, self.cache_salt)
        return ObjectKey(bytes.fromhex(self.chunk_hash_hex), *rest)


@attrs.frozen
class KeyEntry:
    """A key of a list, and its size."""

    key: EncodedObjectKey
    size_bytes: int


@attrs.frozen
class KeyListPage:
    """A part of a list of keys."""

    entries: tuple[KeyEntry, ...]
    next_page_token: str | None


class L2AdapterConfigBase:
    """The base class of configurations."""


class MemoryObject:
    """Memory of an object, as LMCache's allocator gives it."""

    def __init__(self, data: bytes, dtype: str = "bfloat16") -> None:
        """Hold a copy of `data`, said to be of a type."""
        self.memory = ctypes.create_string_buffer(data, len(data))
        self.meta = layout(len(data), dtype)

    @property
    def data_ptr(self) -> int:
        """Where it is."""
        return ctypes.addressof(self.memory)

    def get_size(self) -> int:
        """Its bytes."""
        return len(self.memory)

    @property
    def data(self) -> bytes:
        """What it holds now."""
        return self.memory.raw


def layout(size: int, dtype: str = "bfloat16") -> SimpleNamespace:
    """Return a layout of that many bytes, as LMCache describes a group's."""
    return SimpleNamespace(shapes=[(2, size // 4)], dtypes=[dtype])


def readable(descriptor: int) -> bool:
    """Return whether a descriptor is signalled within a moment; take the signal."""
    ready, _, _ = select.select([descriptor], [], [], 30)
    if ready:
        os.eventfd_read(descriptor)
    return bool(ready)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-ins where the adapter imports them from."""
    parts = {
        "lmcache": {},
        "lmcache.lmcache_native": {"Bitmap": Bitmap},
        "lmcache.v1": {},
        "lmcache.v1.platform": {"create_event_notifier": Notifier},
        "lmcache.v1.distributed": {},
        "lmcache.v1.distributed.api": {
            "EncodedObjectKey": EncodedObjectKey,
            "KeyEntry": KeyEntry,
            "KeyListPage": KeyListPage,
        },
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": L2StoreResult},
        "lmcache.v1.distributed.l2_adapters": {},
        "lmcache.v1.distributed.l2_adapters.config": {"L2AdapterConfigBase": L2AdapterConfigBase},
        "lmcache.v1.distributed.l2_adapters.base": {
            "L2AdapterInterface": L2AdapterInterface,
            "AdapterUsage": AdapterUsage,
        },
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    forget()


def forget() -> None:
    """Have the next test import the adapter again."""
    for name in [name for name in sys.modules if name.startswith("peercache.lmcache")]:
        del sys.modules[name]
