"""The one import of pyverbs, from version 44 on; a host without pyverbs gets the reason.

Keeps   `import peercache` never needs pyverbs: `load` returns the reason if it is missing. The
        logging of the engine does not change, although `import pyverbs` configures the root logger.
        No code reads a property of a closed pyverbs object, which is a segmentation fault: its
        owner drops the reference before the close. A forked child destroys nothing: the kernel
        objects belong to its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

COMPLETION_CHANNEL = "anon_inode:[infinibandevent]"
"""The kernel's name of the descriptor of a completion channel."""


NAMES = {
    "Context": "device.Context",
    "PD": "pd.PD",
    "CompChannel": "cq.CompChannel",
    "CQ": "cq.CQ",
    "QPEx": "qp.QPEx",
    "QPCap": "qp.QPCap",
    "QPInitAttrEx": "qp.QPInitAttrEx",
    "QPAttr": "qp.QPAttr",
    "AHAttr": "addr.AHAttr",
    "GlobalRoute": "addr.GlobalRoute",
    "GID": "addr.GID",
    "SGE": "wr.SGE",
    "Error": "pyverbs_error.PyverbsError",
    "device_list": "device.get_device_list",
}
"""The modules of pyverbs with the names that this package uses."""


class Verbs(SimpleNamespace):
    """The objects in NAMES, and `enums`, the module of constants."""


Absent: TypeAlias = str
"""The reason why this host has no verbs, as a sentence for operators."""

_lock = threading.Lock()
_loaded: list[Verbs | Absent] = []


def load() -> Verbs | Absent:
    """Return pyverbs, or the reason why it is missing. The first answer is kept."""
    with _lock:
        if not _loaded:
            _loaded.append(_load())
        return _loaded[0]


def _load() -> Verbs | Absent:
    try:
        with logging_unchanged():
            return _names()
    except ImportError as error:
        # pyverbs is missing, or libibverbs is, or its version is not the one pyverbs was built for.
        return f"pyverbs cannot be imported: {error}"
    except AttributeError as error:
        # A build with an unsupported Cython lacks the constants of whole modules.
        return f"pyverbs is incomplete: {error}"


def _names() -> Verbs:
    enums = enums_module()
    _ = enums.IBV_MTU_4096  # A broken build is known to lack this constant.
    found = {}
    for name, place in NAMES.items():
        module, _, attribute = place.partition(".")
        found[name] = getattr(importlib.import_module(f"pyverbs.{module}"), attribute)
    return Verbs(enums=enums, **found)


def enums_module() -> Any:
    """Return the module of constants; its name differs between versions."""
    try:
        return importlib.import_module("pyverbs.libibverbs_enums")
    except ImportError:
        return importlib.import_module("pyverbs.enums")


@contextlib.contextmanager
def logging_unchanged() -> Iterator[None]:
    """Restore the root logger after the block: pyverbs calls logging.basicConfig."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        for handler in [added for added in root.handlers if added not in handlers]:
            root.removeHandler(handler)
        root.setLevel(level)


def completion_channel(verbs: Verbs, context: Any) -> tuple[Any, int]:
    """Return a new completion channel and its descriptor.

    Before version 59 pyverbs hides the descriptor; then it is the one that is new in /proc.
    The function compares links, not numbers: listing the folder opens a descriptor itself.
    """
    with _lock:  # No other channel may appear between the two listings.
        known = _channel_descriptors()
        channel = verbs.CompChannel(context)
        descriptor = getattr(channel, "fd", None)
        if descriptor is None:
            (descriptor,) = _channel_descriptors() - known
        return outlives_fork(channel), int(descriptor)


def open_context(verbs: Verbs, name: str) -> Any:
    """Open a device. Raises verbs.Error.

    The lock is needed because the device's event descriptor looks like a completion channel's.
    """
    with _lock:
        return outlives_fork(verbs.Context(name=name))


def outlives_fork(thing: Any) -> Any:
    """Return the object; a forked child will never destroy it.

    pyverbs destroys an object when Python collects it, and a child's copy names a kernel object
    of its parent.
    """
    _alive.add(thing)
    return thing


def _never_collect() -> None:
    for thing in list(_alive):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


_alive: weakref.WeakSet[Any] = weakref.WeakSet()
os.register_at_fork(after_in_child=_never_collect)


def _channel_descriptors() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # The listing has closed its own descriptor.
            if str(entry.readlink()) == COMPLETION_CHANNEL:
                found.add(int(entry.name))
    return found
