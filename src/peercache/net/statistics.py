"""What nng counts of its own accord and tells in no other way."""

from __future__ import annotations

from typing import Any

import pynng
from pynng._nng import ffi, lib


def refused_handshakes() -> int:
    """Return how many connections the listeners of this process have refused in their handshake.

    No certificate, one of another authority, an expired one, clear text: nng ends the connection,
    and tells neither the peer nor the cause.
    """
    found = ffi.new("nng_stat **")
    pynng.check_err(lib.nng_stats_get(found))
    try:
        return _sum(found[0], in_listener=False)
    finally:
        lib.nng_stats_free(found[0])


def _sum(first: Any, *, in_listener: bool) -> int:
    total, node = 0, first
    while node != ffi.NULL:
        name = ffi.string(lib.nng_stat_name(node))
        if in_listener and name == b"auth":
            total += int(lib.nng_stat_value(node))
        child = lib.nng_stat_child(node)
        if child != ffi.NULL:
            total += _sum(child, in_listener=name == b"listener")
        node = lib.nng_stat_next(node)
    return total
