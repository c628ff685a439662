"""Parsing and formatting of values: sizes, addresses, seconds, switches, names.

A parser takes the value of a flag, a TOML file, the environment or a JSON map, and returns the
value for the configuration. It raises a ValueError or TypeError that explains what is allowed.
`format_address`, `exact_size` and `written_size` are the inverse.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from typing import Any

DEFAULT_CONTROL_PORT = 31998
DEFAULT_DATA_PORT = 31999

AUTO = "auto"

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6,
    "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip

_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}

_SWITCHES = {
    "true": True, "on": True, "yes": True, "1": True,
    "false": False, "off": False, "no": False, "0": False,
}  # fmt: skip


_LOOPBACK = tuple(map(ipaddress.ip_network, ("127.0.0.0/8", "::1", "::ffff:127.0.0.0/104")))
"""The last one is IPv4 as IPv6 sockets show it."""


def parse_size(value: Any) -> int:
    """Return bytes from 1048576, "4GiB", "100gb" or "1.5 MiB"."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value), re.ASCII)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("must be a size: bytes, or '4GiB', '100gb'")
    number, unit = match[1], _UNITS[match[2].lower()]
    # A whole number stays exact: a float rounds sizes above 8 PiB.
    return int(float(number) * unit) if "." in number else int(number) * unit


def parse_power_of_two(value: Any) -> int:
    """Return a size that is a power of two."""
    size = parse_size(value)
    if size < 1 or size & (size - 1):
        raise ValueError("must be a power of two")
    return size


def written_size(size_bytes: float) -> str:
    """Return bytes in the unit that fits, rounded: 1.5 GiB."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 2**power:
            return f"{size_bytes / 2**power:.1f} {unit}"
    return f"{size_bytes:.0f} bytes"


def exact_size(size_bytes: int) -> str:
    """Return bytes in the largest unit that divides them, so that `parse_size` reads them back."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("GB", 10**9), ("KiB", 2**10)):
        if size_bytes and size_bytes % size == 0:
            return f"{size_bytes // size}{unit}"
    return str(size_bytes)


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
    """Return HOST:PORT, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_listen(value: Any) -> str:
    """Return the text of an address to listen on; "" means every interface."""
    text = parse_text(value)
    if text:
        parse_address(text, default_port=DEFAULT_CONTROL_PORT)
    return text


def parse_names(value: Any, *, of: str = "a name") -> tuple[str, ...]:
    """Return names, from a list or from one string with commas."""
    if isinstance(value, str):
        items = value.split(",")
    elif isinstance(value, (list, tuple)):
        items = [str(item) for item in value]
    else:
        raise TypeError(f"must be {of}, or several of them")
    return tuple([item.strip() for item in items if item.strip()])


def parse_networks(value: Any) -> tuple[str, ...]:
    """Return addresses and networks of IPv4, from a list or from one string with commas."""
    names = parse_names(value, of="an IPv4 address or network")
    return tuple(str(ipaddress.IPv4Network(name, strict=False)) for name in names)


def is_loopback(host: str) -> bool:
    """Return whether an address, or the name localhost, can be reached only from this host."""
    try:
        number = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    return any(number in network for network in _LOOPBACK)


def parse_users(value: Any) -> tuple[str, ...]:
    """Return users, each by name or number, from a list or from one string with commas."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    users = parse_names(value, of="a user's name or number")
    for user in users:
        if not re.fullmatch(r"[0-9]+|[A-Za-z_][A-Za-z0-9_.-]*\$?", user, re.ASCII):
            raise ValueError(f"{user!r} is no user's name or number")
    return users


def parse_ipc(value: Any) -> str:
    """Return the text of an address on this host, ipc://PATH; "" if there is no address."""
    text = parse_text(value)
    path = text.removeprefix("ipc://")
    if text and (path == text or not path):
        raise ValueError("must be ipc://PATH")
    # sockaddr_un holds 108 bytes with the closing zero.
    if len(os.fsencode(path)) > 100:
        raise ValueError("must be a path of at most 100 bytes")
    return text


def parse_text(value: Any) -> str:
    """Return a string, or a path as one."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError("must be a string")
    return str(os.fspath(value))


def parse_whole(value: Any) -> int:
    """Return a whole number."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError("must be a whole number")
    try:
        return int(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise ValueError("must be a whole number") from error


def parse_replicas(value: Any) -> int | str:
    """Return a whole number, or "auto"."""
    if value == AUTO:
        return AUTO
    try:
        return parse_whole(value)
    except ValueError as error:
        raise ValueError(f"must be a whole number, or '{AUTO}'") from error


def parse_seconds(value: Any) -> float:
    """Return seconds from 90, "90s", "15m", "10d" or "250ms"."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]+)\s*", str(value), re.ASCII)
    if match is None or match[2] not in _SECONDS:
        return _finite(value, "a finite number of seconds, or a duration such as '90s', '15m'")
    number = _finite(match[1], "a duration such as '90s', '15m' or '10d'")
    return number * _SECONDS[match[2]]


def parse_milliseconds(value: Any) -> float:
    """Return milliseconds from 67, or from a duration such as "67ms"."""
    if isinstance(value, str) and value.strip()[-1:].isalpha():
        return 1000 * parse_seconds(value)
    return _finite(value, "a finite number of milliseconds, or a duration such as '67ms'")


def written_duration(seconds: float) -> str:
    """Return seconds in the largest unit that divides them, so that `parse_seconds` reads them."""
    for unit in ("d", "h", "m"):
        if seconds >= _SECONDS[unit] and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:.12g}{unit}"
    return f"{seconds:.12g}s"


def parse_share(value: Any) -> float:
    """Return a share of a whole, from 0 to 1."""
    wanted = "a share from 0 to 1"
    number = _finite(value, wanted)
    if not 0 <= number <= 1:
        raise ValueError(f"must be {wanted}")
    return number


def _finite(value: Any, wanted: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise ValueError(f"must be {wanted}") from error
    if not math.isfinite(number):
        # A deadline of NaN never passes: NaN compares false with every time.
        raise ValueError(f"must be {wanted}")
    return number


def parse_switch(value: Any) -> bool:
    """Return a bool from true, false, on, off, yes, no, 1 or 0, in any case."""
    found = _SWITCHES.get(str(value).strip().lower())
    if found is None:
        raise ValueError("must be true or false")
    return found
