"""The one place that imports pyverbs, of any version from 44 on, where there is one.

Keeps   importing peercache never needs pyverbs, and never fails for the lack of it: `load` says
        why there is none.
        An engine's logging stays as it was: `import pyverbs` sets up the root logger.
        No property of a closed object of pyverbs is ever touched, which is a segmentation fault;
        so whoever closes one drops his reference first.
        A forked child destroys nothing: kernel objects are its parent's, over a shared descriptor.
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
from typing import Any, TypeAlias

import attrs

COMPLETION_CHANNEL = "anon_inode:[infinibandevent]"
"""What the kernel calls the descriptor of a completion channel."""


@attrs.frozen(eq=False)
class Verbs:
    """What we use of pyverbs, by its own names. enums: the module of constants."""

    enums: Any
    Context: Any
    PD: Any
    CompChannel: Any
    CQ: Any
    QPEx: Any
    QPCap: Any
    QPInitAttrEx: Any
    QPAttr: Any
    AHAttr: Any
    GlobalRoute: Any
    GID: Any
    SGE: Any
    Error: Any
    device_list: Any


Absent: TypeAlias = str
"""Why there are no verbs here, for a person."""

_lock = threading.Lock()
_loaded: list[Verbs | Absent] = []


def load() -> Verbs | Absent:
    """Return pyverbs, or why there is none. The answer is remembered."""
    with _lock:
        if not _loaded:
            _loaded.append(_load())
        return _loaded[0]


def _load() -> Verbs | Absent:
    try:
        with logging_unchanged():
            return _names()
    except ImportError as error:
        # libibverbs missing, of another version than pyverbs was built for, or no pyverbs at all.
        return f"pyverbs cannot be imported: {error}"
    except AttributeError as error:
        # Built with a Cython that it is not made for: whole modules lack their constants.
        return f"pyverbs is incomplete: {error}"


def _names() -> Verbs:
    addr, cq, device, pd, qp, wr, errors = (
        importlib.import_module(f"pyverbs.{name}")
        for name in ("addr", "cq", "device", "pd", "qp", "wr", "pyverbs_error")
    )
    enums = enums_module()
    _ = enums.IBV_MTU_4096  # The constant that is known to be lost in a broken build.
    return Verbs(
        enums=enums,
        Context=device.Context,
        PD=pd.PD,
        CompChannel=cq.CompChannel,
        CQ=cq.CQ,
        QPEx=qp.QPEx,
        QPCap=qp.QPCap,
        QPInitAttrEx=qp.QPInitAttrEx,
        QPAttr=qp.QPAttr,
        AHAttr=addr.AHAttr,
        GlobalRoute=addr.GlobalRoute,
        GID=addr.GID,
        SGE=wr.SGE,
        Error=errors.PyverbsError,
        device_list=device.get_device_list,
    )


def enums_module() -> Any:
    """Return the module of constants, which has had two names."""
    try:
        return importlib.import_module("pyverbs.libibverbs_enums")
    except ImportError:
        return importlib.import_module("pyverbs.enums")


@contextlib.contextmanager
def logging_unchanged() -> Iterator[None]:
    """Put the root logger back as it was before the block: pyverbs calls logging.basicConfig."""
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

    Before 59 pyverbs does not tell the descriptor; then it is the one that was not there before.
    Links are compared, not numbers, because the listing itself opens one that is used again.
    """
    with _lock:  # Nobody else's channel may appear between the two looks.
        known = _channel_descriptors()
        channel = verbs.CompChannel(context)
        descriptor = getattr(channel, "fd", None)
        if descriptor is None:
            (descriptor,) = _channel_descriptors() - known
        return outlives_fork(channel), int(descriptor)


def open_context(verbs: Verbs, name: str) -> Any:
    """Open a device; its descriptor for events looks like a completion channel's, hence the lock.

    Raises verbs.Error.
    """
    with _lock:
        return outlives_fork(verbs.Context(name=name))


def outlives_fork(thing: Any) -> Any:
    """Return an object of pyverbs that a forked child will never destroy.

    pyverbs destroys what is collected, and the child's copy of an object names the parent's.
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
        with contextlib.suppress(OSError):  # The listing's own descriptor is closed by now.
            if str(entry.readlink()) == COMPLETION_CHANNEL:
                found.add(int(entry.name))
    return found
