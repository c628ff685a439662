"""What `engine_events` names: engines that publish which blocks they have on their GPU."""

from __future__ import annotations

import re
from typing import Any

import attrs

from peercache.config.quantities import parse_names

ENGINES_MAX = 64
"""Engines whose events one process follows."""

_ENTRY = re.compile(r"([A-Za-z0-9_.:-]{1,64})=([^+\s]+)(?:\+([^+\s]+))?", re.ASCII)
_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})|ipc:///\S{1,100}")


@attrs.frozen
class EngineEvents:
    """Where an engine publishes its KV events.

    name:     for answers and logs. endpoint: of its publisher, tcp://HOST:PORT or ipc:///PATH.
    replay:   where it sends events again; "" where it has no such endpoint.
    """

    name: str
    endpoint: str
    replay: str = ""

    def __str__(self) -> str:
        """Return it as the setting has it."""
        return f"{self.name}={self.endpoint}{self.replay and '+' + self.replay}"


def parse_engines(value: Any) -> tuple[EngineEvents, ...]:
    """Return engines, from a list or a string with commas; raise ValueError."""
    if isinstance(value, tuple) and all(isinstance(one, EngineEvents) for one in value):
        return value
    entries = [_engine(text) for text in parse_names(value, of="NAME=ENDPOINT")]
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        raise ValueError("names an engine twice")
    if len(entries) > ENGINES_MAX:
        raise ValueError(f"names more than {ENGINES_MAX} engines")
    return tuple(entries)


def written_engines(value: tuple[EngineEvents, ...]) -> str:
    """Return the setting as `parse_engines` reads it."""
    return ",".join(map(str, value))


def _engine(text: str) -> EngineEvents:
    found = _ENTRY.fullmatch(text)
    if found is None or not all(map(_is_endpoint, filter(None, found.group(2, 3)))):
        raise ValueError(
            f"has {text!r:.80}: an engine is NAME=tcp://HOST:PORT, or with the endpoint that "
            "sends events again NAME=tcp://HOST:PORT+tcp://HOST:PORT"
        )
    return EngineEvents(found[1], found[2], found[3] or "")


def _is_endpoint(text: str) -> bool:
    found = _ENDPOINT.fullmatch(text)
    return found is not None and (not found[2] or 0 < int(found[2]) < 2**16)
