"""Which blocks of tokens are in the GPU memory of which engines, by their own events.

Engines name blocks by hashes of their own, so blocks are found by what is in them: one tree of
token blocks for all engines, and in each of its nodes the engines that have this block behind this
prefix, as bits of a number. One walk answers for all engines of a block size.

Owns    the tree, and each engine's hashes of its blocks.
Keeps   an engine is known only while nothing of its events was missed: otherwise its blocks are
        dropped, and it says why until it has cleared its cache or is followed from its beginning.
Limits  BLOCKS_MAX blocks, ENGINES_MAX engines. Nothing holds the lock for more than PART blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from threading import Lock
from typing import Any, TypeAlias, final

import attrs
import numpy as np
import numpy.typing as npt

BLOCKS_MAX = 2**20
"""Different blocks of all engines: about 300 MB in blocks of 16 tokens."""

ENGINES_MAX = 64

PART = 4096
"""Blocks that are changed under the lock at once: a few milliseconds."""

TOKENS_IN = np.dtype("<u4")

_Root: TypeAlias = tuple[int, str]
"""(tokens of a block, LoRA adapter): where prompts begin."""

_Key: TypeAlias = "tuple[_Block | _Root, bytes, str]"
"""(the block before or a root, token ids, what else the block depends on)."""


@attrs.define(eq=False)
class _Block:
    """A node of the tree. engines: a bit each. children: blocks behind it, on any engine."""

    key: _Key
    engines: int = 0
    children: int = 0


@attrs.define(eq=False)
class _Engine:
    bit: int
    why: str
    """Why it is not known; "" while it is."""
    block_tokens: int = 0
    blocks: dict[Hashable, _Block] = attrs.field(factory=dict)
    """By the engine's own hash."""


@attrs.frozen
class OnGpu:
    """How much of a prompt an engine has on its GPU.

    engine:       the name that the settings give it.
    state:        "known", or "unknown" or "away" with the reason in `why`.
    prefix_tokens: leading tokens on the GPU, in whole blocks; 0 unless it is known.
    block_tokens: tokens of one of its blocks; 0 before its first block.
    blocks:       blocks that it has in all.
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
        """Know nothing of these engines yet."""
        names = tuple(dict.fromkeys(engines))
        if len(names) > ENGINES_MAX:
            raise ValueError(f"{len(names)} engines, at most {ENGINES_MAX} are followed")
        self._engines = {
            name: _Engine(1 << at, "it was not reached yet") for at, name in enumerate(names)
        }
        self._away = set(names)
        self._tree: dict[_Key, _Block] = {}
        self._blocks_max = blocks_max
        self._lock = Lock()

    def __len__(self) -> int:
        """Return how many different blocks are held."""
        return len(self._tree)

    # --- what the follower of an engine's events says ------------------------------------------

    def begin(self, name: str) -> None:
        """Follow an engine from its beginning, or from when its cache is empty."""
        self._drop(name)
        with self._lock:
            self._engines[name].why = ""
            self._away.discard(name)

    def lose(self, name: str, why: str, *, is_away: bool = False) -> None:
        """Know nothing of an engine from now on. is_away: it cannot be reached."""
        with self._lock:
            self._engines[name].why = why
            (self._away.add if is_away else self._away.discard)(name)
        self._drop(name)

    def is_known(self, name: str) -> bool:
        """Return whether nothing of this engine's events was missed."""
        return not self._engines[name].why

    def why(self, name: str) -> str:
        """Return why an engine is not known; "" while it is."""
        return self._engines[name].why

    def store(
        self,
        name: str,
        hashes: Sequence[Hashable],
        parent: Hashable | None,
        tokens: Sequence[int],
        block_tokens: int,
        lora: str = "",
        extra: Sequence[Any] | None = None,
    ) -> None:
        """Note blocks that an engine has stored, one behind the other.

        parent: the engine's hash of the block before the first; None where they begin a prompt.
        tokens: the token ids of all of them. extra: what else each block depends on, or None.
        """
        engine = self._engines[name]
        if engine.why:
            return
        if block_tokens < 1 or len(tokens) != len(hashes) * block_tokens:
            self.lose(name, "an event of it told another number of tokens than its blocks have")
            return
        try:
            packed = np.asarray(tokens, TOKENS_IN).tobytes()
        except (OverflowError, TypeError, ValueError):
            self.lose(name, "an event of it told tokens that are no token ids")
            return
        size = block_tokens * TOKENS_IN.itemsize
        is_full = False
        for begin in range(0, len(hashes), PART):
            with self._lock:
                engine.block_tokens = block_tokens
                before = self._before(engine, parent, block_tokens, lora)
                for at in range(begin, min(begin + PART, len(hashes))):
                    if before is None:
                        break  # Its prefix was never told: no question can reach it.
                    if len(self._tree) >= self._blocks_max:
                        is_full = True
                        break
                    also = repr(extra[at]) if extra and at < len(extra) and extra[at] else ""
                    before = self._note(
                        engine, hashes[at], (before, packed[at * size : (at + 1) * size], also)
                    )
                parent = hashes[min(begin + PART, len(hashes)) - 1]
        if is_full:
            self.lose(name, f"the engines have more than {self._blocks_max} different blocks")

    def remove(self, name: str, hashes: Iterable[Hashable]) -> None:
        """Note blocks that an engine has no longer; unknown ones are passed over."""
        engine, wanted = self._engines[name], list(hashes)
        for begin in range(0, len(wanted), PART):
            with self._lock:
                for one in wanted[begin : begin + PART]:
                    block = engine.blocks.pop(one, None)
                    if block is not None:
                        self._leave(engine, block)

    # --- what is asked ----------------------------------------------------------------------------

    def find(self, tokens: npt.NDArray[np.uint32], lora: str = "") -> list[OnGpu]:
        """Return for each engine how much of a prompt it has on its GPU; of nothing if empty."""
        packed = np.ascontiguousarray(tokens, TOKENS_IN).tobytes()
        found: list[OnGpu] = []
        with self._lock:
            runs: dict[int, dict[int, int]] = {}
            for name, engine in self._engines.items():
                size = engine.block_tokens
                if size and size not in runs:
                    runs[size] = self._walk(packed, size, lora)
                run = runs.get(size, {}).get(engine.bit, 0)
                state = KNOWN if not engine.why else AWAY if name in self._away else UNKNOWN
                blocks = len(engine.blocks)
                found.append(OnGpu(name, state, engine.why, run * size, size, blocks))
        return found

    def _walk(self, packed: bytes, block_tokens: int, lora: str) -> dict[int, int]:
        """Return by engine how many leading blocks it has."""
        size, tree = block_tokens * TOKENS_IN.itemsize, self._tree
        having = ~0
        runs: dict[int, int] = {}
        before: _Block | _Root = (block_tokens, lora)
        for count, begin in enumerate(range(0, len(packed) - size + 1, size)):
            block = tree.get((before, packed[begin : begin + size], ""))
            left = having & block.engines if block is not None else 0
            if left != having:
                if count:
                    runs |= dict.fromkeys(_bits(having & ~left), count)
                having = left
            if not having or block is None:
                return runs
            before = block
        if len(packed) >= size:
            runs |= dict.fromkeys(_bits(having), len(packed) // size)
        return runs

    # --- the tree, under the lock -----------------------------------------------------------------

    @staticmethod
    def _before(
        engine: _Engine, parent: Hashable | None, block_tokens: int, lora: str
    ) -> _Block | _Root | None:
        if parent is None:
            return (block_tokens, lora)
        return engine.blocks.get(parent)

    def _note(self, engine: _Engine, one: Hashable, key: _Key) -> _Block:
        """Note that an engine has this block, by its own hash, and return it."""
        block = self._tree.get(key)
        if block is None:
            block = self._tree[key] = _Block(key)
            if isinstance(key[0], _Block):
                key[0].children += 1
        old = engine.blocks.get(one)
        if old is not block:
            if old is not None:
                self._leave(engine, old)
            engine.blocks[one] = block
            block.engines |= engine.bit
        return block

    def _leave(self, engine: _Engine, block: _Block) -> None:
        """Note that an engine has it no longer. What no engine has, and none continues, goes."""
        block.engines &= ~engine.bit
        while not block.engines and not block.children:
            del self._tree[block.key]
            before = block.key[0]
            if not isinstance(before, _Block):
                return
            before.children -= 1
            block = before

    def _drop(self, name: str) -> None:
        """Forget all blocks of an engine, a part at a time."""
        engine = self._engines[name]
        while engine.blocks:
            with self._lock:
                for _ in range(min(PART, len(engine.blocks))):
                    self._leave(engine, engine.blocks.popitem()[1])


def _bits(mask: int) -> Iterator[int]:
    """Yield each bit of a number."""
    while mask:
        yield mask & -mask
        mask &= mask - 1
