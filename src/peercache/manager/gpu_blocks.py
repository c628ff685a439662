"""Which blocks of tokens are in the GPU memory of which engines, according to their events.

Engines name blocks by hashes of their own, so blocks are found by their tokens: one tree of token
blocks for all engines. Each node of the tree has the engines with this block after this prefix, as
bits of a number: one bit for each separate group of layers of an engine. One walk gives the answer
for all engines with the same block size.

Owns    the tree, and each engine's hashes of its blocks.
Keeps   an engine is known only while none of its events was missed: otherwise its blocks are
        dropped, and the reason is shown until it has cleared its cache or is followed from its
        start.
Limits  BLOCKS_MAX blocks, and as many hashes of an engine; ENGINES_MAX engines, GROUPS_MAX groups
        of layers of each. The lock is never held for more than PART blocks.

Engines with several kinds of layers (hybrid models) have a group of blocks for each kind, and evict
them separately. A prefix is usable if every group has the blocks that the next token reads: all
blocks for full attention, the last ones for a sliding window, the last one for a recurrent state.
The rules are those of vLLM 0.32 (`find_longest_cache_hit` of its `HybridKVCacheCoordinator`).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.errors import InvalidRequest
from peercache.model.ids import name_of
from peercache.model.keys import PageKeys, Tag
from peercache.model.prefix import Mask, Overlap, ends_of, leading_columns
from peercache.model.records import ON_DISK, RESIDENT

if TYPE_CHECKING:
    # Part of the extra `events`, which a process that follows no engine may not have.
    from peercache.events.blocks import BlockStored


ALL = 2**62
"""Tokens of a prefix that are read: all of them."""

_READ = {
    "": ALL,
    "full_attention": ALL,
    "mla_attention": ALL,
    "sink_full_attention": ALL,
    "mamba": 1,
}
"""By the kind in an event; events of engines with one group have no kind."""

_WINDOWS = frozenset({"sliding_window", "sliding_window_mla"})


def tokens_read(kind: str, window: int) -> int | None:
    """Return how many tokens before it the next token reads; None: no rule is known for this kind.

    window: tokens of a sliding window, which includes the next token.
    """
    if kind in _WINDOWS:
        return window - 1 if window > 0 else None
    return _READ.get(kind)


@attrs.frozen
class HeldBlocks:
    """The blocks of a prompt that a group has.

    held:         (blocks,) bool, from the first block of the prompt on; later blocks are absent.
    block_tokens: tokens in a block. read: tokens at the end of a prefix that the next token reads.
    """

    read: int
    block_tokens: int
    held: Mask


def usable_tokens(groups: Sequence[HeldBlocks]) -> int:
    """Return the longest prefix, in tokens, after which all groups can continue.

    It ends where a block of every group ends.
    """
    step = math.lcm(*(group.block_tokens for group in groups))
    count = min(len(group.held) * group.block_tokens for group in groups) // step
    enough = np.ones(count + 1, np.bool_)
    for group in groups:
        ends = ends_of(group.held, -(-group.read // group.block_tokens))
        enough &= ends[:: step // group.block_tokens][: count + 1]
    return int(np.flatnonzero(enough)[-1]) * step


BLOCKS_MAX = 2**20
"""Different blocks of all engines: about 300 MB with blocks of 16 tokens."""

ENGINES_MAX = 64

GROUPS_MAX = 64

PART = 4096
"""Blocks that are changed at a time under the lock: a few milliseconds."""

TOKENS_IN = np.dtype("<u4")

_Root: TypeAlias = tuple[int, str]
"""(tokens of a block, LoRA adapter): the root of the prompts."""

_Hashed: TypeAlias = tuple[int, int]
"""(tokens of a block, tokens after it that its hash also covers)."""

_Key: TypeAlias = "tuple[_Block | _Root, bytes, str]"
"""(the previous block or a root, token ids, what else the block depends on).

The token ids are those of the block, and those after it that its hash also covers.
"""


@attrs.define(eq=False)
class _Block:
    """A node of the tree. held_by: one bit per group. children: the blocks after it, of any
    group.
    """

    key: _Key
    held_by: int = 0
    children: int = 0


@attrs.define(eq=False)
class _Group:
    """A group of layers of an engine.

    read:  tokens of a prefix that the next token reads.
    ahead: tokens after a block that its hash also covers.
    is_sparse: an event of it did not show which blocks of its tokens it keeps.
    blocks: by the engine's own hash; None: the position of the block in a prompt is unknown.
    copies: further copies of blocks, each of which is removed by an event of its own.
    names:  further hashes of blocks: SGLang gives the blocks of an adapter new hashes when it loads
            the adapter again.
    """

    bit: int
    read: int = ALL
    block_tokens: int = 0
    ahead: int = 0
    is_sparse: bool = False
    blocks: dict[Hashable, _Block | None] = attrs.field(factory=dict)
    copies: dict[Hashable, int] = attrs.field(factory=dict)
    names: dict[_Block, int] = attrs.field(factory=dict)

    @property
    def place(self) -> int:
        """Return the position of its bit."""
        return self.bit.bit_length() - 1

    @property
    def hashed(self) -> _Hashed:
        """Return the tokens that one of its hashes covers."""
        return self.block_tokens, self.ahead


@attrs.define(eq=False)
class _Engine:
    why: str
    """Why it is unknown; "" while it is known."""
    groups: dict[int, _Group] = attrs.field(factory=dict)
    bits: dict[int, int] = attrs.field(factory=dict)
    """The bits of all groups that it ever had."""

    @property
    def block_tokens(self) -> int:
        """Return the tokens of a block of the first group, 0 before its first one."""
        return next((group.block_tokens for group in self.groups.values()), 0)


@attrs.frozen
class OnGpu:
    """How much of a prompt an engine has on its GPU.

    engine:       its name in the settings.
    state:        "known", or "unknown" or "away" with the reason in `why`.
    prefix_tokens: leading tokens that it need not compute, in whole blocks; 0 if it is unknown.
    block_tokens: tokens of one of its blocks; 0 before its first block.
    blocks:       the number of all its blocks, of all groups of layers.
    """

    engine: str
    state: str
    why: str
    prefix_tokens: int
    block_tokens: int
    blocks: int


KNOWN = "known"
UNKNOWN = "unknown"
AWAY = "away"


@final
class GpuBlocks:
    """The blocks of some engines. Thread-safe."""

    def __init__(self, engines: Iterable[str], *, blocks_max: int = BLOCKS_MAX) -> None:
        """Start with no known state of these engines."""
        names = tuple(dict.fromkeys(engines))
        if len(names) > ENGINES_MAX:
            raise ValueError(f"{len(names)} engines, at most {ENGINES_MAX} are followed")
        self._engines = {name: _Engine("it was not reached yet") for name in names}
        self._bits = 0
        """Bits that are assigned to groups."""
        self._away = set(names)
        self._tree: dict[_Key, _Block] = {}
        self._blocks_max = blocks_max
        self._lock = Lock()

    def __len__(self) -> int:
        """Return how many different blocks are held."""
        return len(self._tree)

    # --- calls of the follower of an engine's events ----------------------------------------------

    def begin(self, name: str) -> None:
        """Follow an engine from its start: before, it may have had another model."""
        self._drop(name)
        with self._lock:
            self._engines[name].groups.clear()
        self.clear(name)

    def clear(self, name: str) -> None:
        """Follow an engine from a point at which its cache is empty."""
        self._drop(name)
        with self._lock:
            self._engines[name].why = ""
            self._away.discard(name)

    def lose(self, name: str, why: str, *, is_away: bool = False) -> None:
        """Mark an engine as unknown from now on. is_away: it cannot be reached."""
        with self._lock:
            self._engines[name].why = why
            (self._away.add if is_away else self._away.discard)(name)
        self._drop(name)

    def is_known(self, name: str) -> bool:
        """Return whether no event of this engine was missed."""
        return not self._engines[name].why

    def why(self, name: str) -> str:
        """Return why an engine is unknown; "" while it is known."""
        return self._engines[name].why

    def store(self, name: str, event: BlockStored) -> None:
        """Note consecutive blocks that an engine has stored.

        vLLM, which names groups, reports each copy of a block that it has computed more than once.
        """
        engine = self._engines[name]
        if engine.why:
            return
        hashes, tokens, block_tokens = event.hashes, event.tokens, event.block_tokens
        if block_tokens < 1 or len(tokens) % block_tokens:
            self.lose(name, "one of its events has another number of tokens than its blocks have")
            return
        try:
            packed = np.asarray(tokens, TOKENS_IN).tobytes()
            behind = [np.asarray(some, TOKENS_IN).tobytes() for some in event.ahead]
        except (OverflowError, TypeError, ValueError):
            self.lose(name, "one of its events has tokens that are no token ids")
            return
        into = self._group(engine, event)
        if isinstance(into, str):
            self.lose(name, into)
            return
        if hashes:
            into.ahead = len(event.ahead[0]) if event.ahead else 0
        is_whole = len(tokens) == len(hashes) * block_tokens
        into.is_sparse |= bool(hashes) and not is_whole
        # A block that ends within a block of its group, too, is the end of a block of another
        # group.
        is_placed = is_whole and block_tokens == into.block_tokens
        size = block_tokens * TOKENS_IN.itemsize
        why, parent, extra = "", event.parent, event.extra
        for begin in range(0, len(hashes), PART):
            with self._lock:
                end = min(begin + PART, len(hashes))
                if sum(len(one.blocks) for one in engine.groups.values()) >= self._blocks_max:
                    why = f"it has more than {self._blocks_max} blocks"
                before = _before(into, parent, event.lora) if is_placed else None
                for at in range(begin, end):
                    if len(self._tree) >= self._blocks_max:
                        why = f"the engines have more than {self._blocks_max} different blocks"
                    if why:
                        break
                    if hashes[at] in into.blocks:
                        into.copies[hashes[at]] = into.copies.get(hashes[at], 0) + 1
                    if before is None:
                        self._hold(engine, into, hashes[at])
                        continue
                    also = repr(extra[at]) if extra and at < len(extra) and extra[at] else ""
                    covered = packed[at * size : (at + 1) * size] + (behind[at] if behind else b"")
                    before = self._note(engine, into, hashes[at], (before, covered, also))
                parent = hashes[end - 1]
            if why:
                self.lose(name, why)
                return

    def settle(self, name: str) -> None:
        """End a batch of events: mark an engine as unknown if some events were not understood.

        The blocks that a sparse group keeps are found by their hashes in a group that keeps all
        blocks. Within a batch either group may come first.
        """
        engine = self._engines[name]
        groups = engine.groups
        if engine.why:
            return
        whole = {one.block_tokens for one in groups.values() if not one.is_sparse}
        if any(one.is_sparse and one.block_tokens not in whole for one in groups.values()):
            self.lose(name, "its events do not name which blocks a group of its layers keeps")

    def remove(self, name: str, hashes: Iterable[Hashable], group: int | None = None) -> None:
        """Note blocks that an engine no longer has; unknown ones are ignored.

        group: the group of layers in which one copy of each block is gone; None: all copies in all
               groups.
        """
        engine, wanted = self._engines[name], list(hashes)
        groups = [one for at, one in engine.groups.items() if group in (at, None)]
        for begin in range(0, len(wanted), PART):
            with self._lock:
                for one in wanted[begin : begin + PART]:
                    for held in groups:
                        self._take(held, one, all_copies=group is None)

    # --- queries ----------------------------------------------------------------------------------

    def find(self, tokens: npt.NDArray[np.uint32], lora: str = "") -> list[OnGpu]:
        """Return for each engine how much of a prompt it has on its GPU."""
        packed = np.ascontiguousarray(tokens, TOKENS_IN).tobytes()
        found: list[OnGpu] = []
        with self._lock:
            known = [group for one in self._engines.values() for group in one.groups.values()]
            held = {
                hashed: self._held(packed, hashed, lora)
                for hashed in dict.fromkeys(group.hashed for group in known)
            }
            runs = {hashed: leading_columns(has.T) for hashed, has in held.items()}
            for name, engine in self._engines.items():
                size, groups = engine.block_tokens, list(engine.groups.values())
                if len(groups) == 1 and groups[0].read == ALL:
                    # The case of most engines: all of them in one walk.
                    prefix = int(runs[groups[0].hashed][groups[0].place]) * size
                else:
                    prefix = _usable(groups, held) if groups else 0
                state = KNOWN if not engine.why else AWAY if name in self._away else UNKNOWN
                blocks = sum(len(group.blocks) for group in groups)
                found.append(OnGpu(name, state, engine.why, prefix, size, blocks))
        return found

    def _held(self, packed: bytes, hashed: _Hashed, lora: str) -> Mask:
        """Return which blocks of a prompt each group has: (blocks, bits), shorter if none has."""
        width = -(-self._bits // 8)
        path = self._path(packed, hashed, lora)
        masks = b"".join([block.held_by.to_bytes(width, "little") for block in path])
        rows = np.frombuffer(masks, np.uint8).reshape(-1, width)
        return np.unpackbits(rows, axis=1, bitorder="little").view(np.bool_)

    def _path(self, packed: bytes, hashed: _Hashed, lora: str) -> Iterator[_Block]:
        """Yield the blocks of a prompt that are in the tree."""
        block_tokens, ahead = hashed
        size, tree = block_tokens * TOKENS_IN.itemsize, self._tree
        covered = size + ahead * TOKENS_IN.itemsize
        before: _Block | _Root = (block_tokens, lora)
        for begin in range(0, len(packed) - covered + 1, size):
            block = tree.get((before, packed[begin : begin + covered], ""))
            if block is None:
                return
            yield block
            before = block

    # --- groups and the tree, under the lock ------------------------------------------------------

    def _group(self, engine: _Engine, event: BlockStored) -> _Group | str:
        """Return the group of an engine that an event names, or why it cannot be followed."""
        read = tokens_read(event.kind, event.window)
        if read is None:
            return f"no rule is known for a group of its layers of the kind {event.kind[:40]!r}"
        at = event.group or 0
        with self._lock:
            group = engine.groups.get(at)
            if group is None:
                if len(engine.bits) >= GROUPS_MAX and at not in engine.bits:
                    return f"it has more than {GROUPS_MAX} groups of layers"
                if at not in engine.bits:
                    engine.bits[at] = 1 << self._bits
                    self._bits += 1
                group = engine.groups[at] = _Group(engine.bits[at])
            group.read = read
            group.block_tokens = max(group.block_tokens, event.block_tokens)
        if not event.kind and len(engine.groups) > 1:
            return "it does not say of which kind its groups of layers are"
        return group

    def _note(self, engine: _Engine, group: _Group, one: Hashable, key: _Key) -> _Block:
        """Note that a group has this block, by the engine's own hash, and return it."""
        block = self._tree.get(key)
        if block is None:
            block = self._tree[key] = _Block(key)
            if isinstance(key[0], _Block):
                key[0].children += 1
        self._give(group, one, block)
        if len(engine.groups) > 1:
            for other in engine.groups.values():
                # It has reported this hash before, without its position.
                if (
                    other.block_tokens == group.block_tokens
                    and other.blocks.get(one, block) is None
                ):
                    self._give(other, one, block)
        return block

    def _hold(self, engine: _Engine, group: _Group, one: Hashable) -> None:
        """Note that a group has a block, by its hash alone: another group gives the position."""
        block = group.blocks.get(one) or _placed(engine, group, one)
        if block is not None:
            self._give(group, one, block)
        else:
            group.blocks[one] = None

    def _give(self, group: _Group, one: Hashable, block: _Block) -> None:
        old = group.blocks.get(one)
        if old is not block:
            if old is not None:
                self._leave(group, old)
            group.blocks[one] = block
            if block.held_by & group.bit:
                group.names[block] = group.names.get(block, 0) + 1
            block.held_by |= group.bit

    def _take(self, group: _Group, one: Hashable, *, all_copies: bool) -> None:
        copies = group.copies.pop(one, 0)
        if copies > 1 and not all_copies:
            group.copies[one] = copies - 1
        if not copies or all_copies:
            block = group.blocks.pop(one, None)
            if block is not None:
                self._leave(group, block)

    def _leave(self, group: _Group, block: _Block) -> None:
        """Note that a group no longer has a block under one of its hashes.

        A block without groups and without children is removed.
        """
        names = group.names.pop(block, 0)
        if names:
            if names > 1:
                group.names[block] = names - 1
            return
        block.held_by &= ~group.bit
        while not block.held_by and not block.children:
            del self._tree[block.key]
            before = block.key[0]
            if not isinstance(before, _Block):
                return
            before.children -= 1
            block = before

    def _drop(self, name: str) -> None:
        """Forget all blocks of an engine, PART at a time."""
        for group in self._engines[name].groups.values():
            group.copies.clear()
            while group.blocks:
                with self._lock:
                    for _ in range(min(PART, len(group.blocks))):
                        block = group.blocks.popitem()[1]
                        if block is not None:
                            self._leave(group, block)


def _before(group: _Group, parent: Hashable | None, lora: str) -> _Block | _Root | None:
    """Return the node before new blocks; None: its position is unknown to the group."""
    return (group.block_tokens, lora) if parent is None else group.blocks.get(parent)


def _placed(engine: _Engine, group: _Group, one: Hashable) -> _Block | None:
    """Return the block of another group with this hash, which identifies the whole prefix."""
    for other in engine.groups.values():
        if other is not group and other.block_tokens == group.block_tokens:
            block = other.blocks.get(one)
            if block is not None:
                return block
    return None


def _usable(groups: Sequence[_Group], held: dict[_Hashed, Mask]) -> int:
    """Return the prefix, in tokens, that an engine with these groups need not compute."""
    return usable_tokens(
        [
            HeldBlocks(
                group.read,
                group.block_tokens,
                held[group.hashed][:, group.place],
            )
            for group in groups
        ]
    )


@attrs.frozen
class OnNode:
    """How much of a prompt one node has. A page may be in its memory and on its disk.

    node:          its HOST:PORT, or its incarnation if it is not in the view.
    incarnation:   16 hexadecimal digits.
    prefix_pages:  leading pages that it has, on any tier; prefix_tokens: the same in tokens, 0 if
                   the query used page hashes.
    memory_prefix_pages: leading pages that it has in memory.
    memory_pages, disk_pages: pages that it has, anywhere in the prompt.
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
    """How much of a prompt is stored, and where: a hint, which does not guarantee later reads.

    pages:         whole pages of the prompt; page_tokens: tokens of each, 0 for page hashes.
    stored_pages:  leading pages that some node has, on any tier; stored_tokens: in tokens.
    memory_pages:  leading pages that some node has in memory.
    whole:         whether all other pages are absent. False: a node that may know more did not
                   answer.
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
    """Return an answer. named: returns HOST:PORT of a member, "" if unknown."""
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


ObeyHint: TypeAlias = Callable[[str, PageKeys, Tag, float], Awaitable[Mapping[str, int]]]
"""Obeys a hint for pages of a namespace, for some seconds; returns pages by outcome."""


async def no_hints(*_: object) -> Mapping[str, int]:
    """Obey no hint."""
    raise InvalidRequest("this index takes no hints")


@attrs.frozen(eq=False)
class IndexParts:
    """What answers questions about prompts, for the prefix index (`http.prefix`).

    overlap: which members hold pages. named: HOST:PORT of a member, "" where it is not known.
    """

    overlap: Callable[[PageKeys], Awaitable[Overlap]]
    named: Callable[[int], str]
    gpu: GpuBlocks
    hint: ObeyHint = no_hints
