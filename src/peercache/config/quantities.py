"""How settings are written: sizes, addresses, seconds, switches.

Each function takes what a flag, a TOML file, the environment or a JSON map holds, and returns the
value that the configuration keeps; it raises ValueError or TypeError with what is allowed.
`written_size` goes the other way, for people.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

DEFAULT_CONTROL_PORT = 31998

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6,
    "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_size(text: int | str) -> int:
    """Return bytes from 1048576, "4GiB", "100gb" or "1.5 MiB"; raise ValueError otherwise."""
    if isinstance(text, bool):
        raise ValueError("wants a size: bytes, or '4GiB', '100gb'")
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text), re.ASCII)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("wants a size: bytes, or '4GiB', '100gb'")
    number, unit = match[1], _UNITS[match[2].lower()]
    # A whole number stays exact: a float would round a size above 8 PiB.
    return int(float(number) * unit) if "." in number else int(number) * unit


def written_size(size_bytes: float) -> str:
    """Return bytes as people read them, in the unit that fits."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 2**power:
            return f"{size_bytes / 2**power:.1f} {unit}"
    return f"{size_bytes:.0f} bytes"


def parse_address(text: str, *, default_port: int | None = None) -> tuple[str, int]:
    """Return (host, port) from "host:port", "[::1]:port" or, with a default port, "host"."""
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]*))(?::(\d{1,5}))?", text.strip(), re.ASCII)
    if match is None or (match[3] is None and default_port is None):
        raise ValueError(f"{text!r} is not HOST:PORT (IPv6: [::1]:PORT)")
    port = int(match[3]) if match[3] is not None else int(default_port or 0)
    if port > 65_535:
        raise ValueError(f"{text!r}: a port is at most 65535")
    return match[1] or match[2], port


def format_address(host: str, port: int) -> str:
    """Return HOST:PORT, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def size(value: Any) -> int:
    """Convert a size."""
    return parse_size(value)


def addresses(value: Any) -> tuple[str, ...]:
    """Convert a list of addresses, or one string with commas; each names a host and a port."""
    if isinstance(value, str):
        items = value.split(",")
    elif isinstance(value, (list, tuple)):
        items = [str(item) for item in value]
    else:
        raise TypeError("wants HOST:PORT, or several of them")
    return tuple([_reachable(item.strip()) for item in items if item.strip()])


def _reachable(text: str) -> str:
    host, port = parse_address(text, default_port=DEFAULT_CONTROL_PORT)
    if not host or not port:
        raise ValueError(f"{text!r} names no host and port that one can connect to")
    return format_address(host, port)


def whole(value: Any) -> int:
    """Convert a whole number."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError("wants a whole number")
    try:
        return int(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise ValueError("wants a whole number") from error


def seconds(value: Any) -> float:
    """Convert a number of seconds; infinity and NaN are none."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise ValueError("wants a number of seconds") from error
    if not math.isfinite(number):
        # A deadline of NaN compares false with everything, so it would never come.
        raise ValueError("wants a finite number of seconds")
    return number


def text(value: Any) -> str:
    """Convert a string or a path."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError("wants a string")
    return str(os.fspath(value))


def switch(value: Any) -> bool:
    """Convert a switch: true, false, on, off, yes, no, 1 or 0."""
    words = {"true": True, "on": True, "yes": True, "1": True}
    words |= {"false": False, "off": False, "no": False, "0": False}
    found = words.get(str(value).strip().lower())
    if found is None:
        raise ValueError("wants true or false")
    return found


def share(value: Any) -> float:
    """Convert a share of a whole, from 0 to 1."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise ValueError("wants a share from 0 to 1") from error
    if not 0 <= number <= 1:  # Nor is NaN.
        raise ValueError("wants a share from 0 to 1")
    return number


def names(value: Any) -> tuple[str, ...]:
    """Convert a list of names, or one string with commas."""
    if isinstance(value, str):
        items = value.split(",")
    elif isinstance(value, (list, tuple)):
        items = [str(item) for item in value]
    else:
        raise TypeError("wants a name, or several of them")
    return tuple([item.strip() for item in items if item.strip()])
