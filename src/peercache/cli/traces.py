"""Request traces: which blocks of their prompts the requests of a served model asked for, and when.

A trace has one request a line, as JSON: `timestamp` (ms) and `hash_ids`, an id for each block of
the prompt, chained, so equal ids are equal prefixes. Mooncake publishes such files.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import attrs


class TraceError(ValueError):
    """A trace cannot be read, or a line of it is no request."""


@attrs.frozen
class Prompt:
    """One line of a trace. at: seconds since its begin; blocks: ids, each once."""

    at: float
    blocks: list[int]


def requests_of(path: Path, most: int | None = None) -> list[Prompt]:
    """Return the first requests of a trace, at most so many, in the order of their times.

    Raise TraceError with the number of the line that is no request.
    """
    requests: list[Prompt] = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            at = float(fields["timestamp"]) / 1000
            blocks = list(dict.fromkeys(int(block) for block in fields["hash_ids"]))
        except (ValueError, TypeError, KeyError) as error:
            detail = "a request has timestamp (ms) and hash_ids (a list of numbers)"
            raise TraceError(f"{path}, line {number}: {detail}") from error
        requests.append(Prompt(at, blocks))
    requests.sort(key=lambda request: request.at)
    first = requests[0].at if requests else 0.0
    return [attrs.evolve(request, at=request.at - first) for request in requests[:most]]


class Cache(Protocol):
    """What holds blocks."""

    def ask(self, request: Prompt) -> int:
        """Read the leading run of blocks that is here, store the rest; return the run's length."""
        ...


@attrs.define
class LRU:
    """Least recently used goes first, block by block. is_deepest_first: from the prompt's end.

    room: in blocks.
    """

    room: int
    is_deepest_first: bool = False
    held: OrderedDict[int, None] = attrs.field(factory=OrderedDict)

    def ask(self, request: Prompt) -> int:
        """Read and store."""
        run = next((n for n, one in enumerate(request.blocks) if one not in self.held), None)
        for one in reversed(request.blocks) if self.is_deepest_first else request.blocks:
            self.held[one] = None
            self.held.move_to_end(one)
            if not self.is_deepest_first and len(self.held) > self.room:
                self.held.popitem(last=False)
        while len(self.held) > self.room:
            self.held.popitem(last=False)
        return len(request.blocks) if run is None else run


def hit_rate(requests: Sequence[Prompt], cache: Cache) -> float:
    """Return the share of all blocks that were hits; 0 for a trace without blocks."""
    asked = sum(len(request.blocks) for request in requests)
    return sum(map(cache.ask, requests)) / asked if asked else 0.0
