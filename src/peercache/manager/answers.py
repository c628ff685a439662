"""What the prefix index answers: how much of a prompt lies on which node and GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from peercache.manager.gpu_blocks import OnGpu
from peercache.model.ids import name_of
from peercache.model.overlap import Overlap
from peercache.model.records import ON_DISK, RESIDENT


@attrs.frozen
class OnNode:
    """How much of a prompt one node has. A page may be in its memory and on its disk.

    node:          its HOST:PORT, or its incarnation where the view has not named it.
    incarnation:   16 hexadecimal digits.
    prefix_pages:  leading pages that it has, on any tier; prefix_tokens: the same in tokens, 0
                   where the question was about page hashes.
    memory_prefix_pages: leading pages that it has in memory.
    memory_pages, disk_pages: pages that it has, wherever in the prompt.
    """

    node: str
    incarnation: str
    prefix_pages: int
    prefix_tokens: int
    memory_prefix_pages: int
    memory_pages: int
    disk_pages: int


@attrs.frozen
class FoundPrefix:
    """How much of a prompt lies where, now: a hint, that promises no later read.

    pages:         whole pages of the prompt; page_tokens: tokens of each, 0 for page hashes.
    stored_pages:  leading pages that some node has, on any tier; stored_tokens: in tokens.
    memory_pages:  leading pages that some node has in memory.
    whole:         that what is not named is absent. False: a node that may know more was not heard.
    nodes:         those that have any page, the longest prefix first.
    engines:       every engine whose events are followed, in the order of the settings.
    """

    pages: int
    page_tokens: int
    stored_pages: int
    stored_tokens: int
    memory_pages: int
    whole: bool
    nodes: tuple[OnNode, ...]
    engines: tuple[OnGpu, ...]


def prefix_of(
    overlap: Overlap,
    *,
    page_tokens: int,
    named: Callable[[int], str],
    engines: Sequence[OnGpu] = (),
) -> FoundPrefix:
    """Return an answer. named: HOST:PORT of a member, "" where it is not known."""
    runs, in_memory = overlap.run().tolist(), overlap.run(RESIDENT).tolist()
    memory, disk = overlap.pages(RESIDENT).tolist(), overlap.pages(ON_DISK).tolist()
    nodes = [
        OnNode(
            named(holder) or name_of(holder),
            name_of(holder),
            runs[row],
            runs[row] * page_tokens,
            in_memory[row],
            memory[row],
            disk[row],
        )
        for row, holder in enumerate(overlap.holders)
        if memory[row] or disk[row]
    ]
    nodes.sort(key=lambda node: (-node.prefix_pages, -node.memory_prefix_pages, node.node))
    stored = overlap.stored()
    return FoundPrefix(
        overlap.flags.shape[1],
        page_tokens,
        stored,
        stored * page_tokens,
        overlap.stored(RESIDENT),
        overlap.whole,
        tuple(nodes),
        tuple(engines),
    )
