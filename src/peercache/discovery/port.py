"""The port of all sources of addresses, and what every one of them is held to.

A source only gives addresses. Membership tries them, and decides what is a member: so a source that
fails, or that gives wrong ones, changes nothing for a cluster that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import attrs

from peercache.config.quantities import format_address, parse_address

ADDRESSES_MAX = 16_384
"""Addresses kept of one source: the members of the largest cluster."""

ADDRESS_CHARACTERS_MAX = 270
"""The longest name of DNS, a port, and brackets."""

PROBLEM_CHARACTERS_MAX = 200
"""What a server says about its refusal: a line of the log."""

Tell: TypeAlias = Callable[[Iterable[str]], None]


class SourceFailed(Exception):
    """A source cannot give addresses now. Its text says which setting, why, and what to do."""


class AddressSource(Protocol):
    """Gives addresses of nodes, each HOST:PORT.

    text: the entry of `discovery_addr` that names it.
    """

    @property
    def text(self) -> str:
        """The entry of `discovery_addr`."""

    async def follow(self, tell: Tell) -> None:
        """Tell all addresses, and all of them again when they change; raise SourceFailed."""


@attrs.frozen
class Cleaned:
    """The addresses of an answer that can be dialled. dropped: how many others there were."""

    addresses: frozenset[str]
    dropped: int


def cleaned(raw: Iterable[str]) -> Cleaned:
    """Return the addresses that are HOST:PORT, and no more than ADDRESSES_MAX of them."""
    kept: set[str] = set()
    dropped = 0
    for text in raw:
        address = _address(text)
        if address and (len(kept) < ADDRESSES_MAX or address in kept):
            kept.add(address)
        else:
            dropped += 1
    return Cleaned(frozenset(kept), dropped)


def _address(text: object) -> str:
    """Return an address as every node writes it, "" for what is none."""
    if not isinstance(text, str) or not text.isascii() or len(text) > ADDRESS_CHARACTERS_MAX:
        return ""
    try:
        host, port = parse_address(text)
    except ValueError:
        return ""
    is_host = host and all(c.isalnum() or c in "-_.:%" for c in host)
    return format_address(host, port) if is_host and port else ""


@contextmanager
def reading(text: str, whose: str) -> Iterator[None]:
    """Take any answer that has not the expected shape for a failure of the source."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SourceFailed(
            f"discovery_addr: {text}: {whose} answers what it should not ({printable(error)}): "
            "is it the server that you mean?"
        ) from error


def printable(said: object) -> str:
    """Return what another program said, as a short text of one line."""
    line = "".join(c if c.isprintable() else " " for c in str(said)[: 4 * PROBLEM_CHARACTERS_MAX])
    return " ".join(line.split())[:PROBLEM_CHARACTERS_MAX] or type(said).__name__
