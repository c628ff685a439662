"""GPU blocks: what engines have of a prompt, and what a prefix needs of each group of layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from peercache.events.blocks import BlockStored
from peercache.manager.gpu_blocks import (
    ALL,
    AWAY,
    ENGINES_MAX,
    GROUPS_MAX,
    KNOWN,
    UNKNOWN,
    GpuBlocks,
    HeldBlocks,
    OnGpu,
    tokens_read,
    usable_tokens,
)
from tests.examples import examples

BLOCK = 4


def prompt(*blocks: int) -> list[int]:
    """Return tokens in blocks, each full of one token."""
    return [block for block in blocks for _ in range(BLOCK)]


def hashes_of(*blocks: int) -> list[tuple[int, ...]]:
    """Return the hashes of blocks, as an engine chains them."""
    return [blocks[: at + 1] for at in range(len(blocks))]


def stored(
    hashes: Iterable[Any], parent: Any, tokens: Iterable[int], block_tokens: int, **what: Any
) -> BlockStored:
    """Return the event of blocks that an engine has stored."""
    return BlockStored(tuple(hashes), parent, tuple(tokens), block_tokens, **what)


def found(index: GpuBlocks, *blocks: int, lora: str = "") -> dict[str, int]:
    reported = index.find(np.array(prompt(*blocks), np.uint32), lora)
    return {one.engine: one.prefix_tokens // BLOCK for one in reported}


def begun(*names: str, **limits: int) -> GpuBlocks:
    index = GpuBlocks(names, **limits)
    for name in names:
        index.begin(name)
    return index


def store(index: GpuBlocks, name: str, *blocks: int, **what: Any) -> None:
    index.store(name, stored(hashes_of(*blocks), None, prompt(*blocks), BLOCK, **what))


class Engines(RuleBasedStateMachine):
    """Three engines store and evict blocks of few kinds; what is found is what they have."""

    NAMES = ("a", "b", "c")
    names = st.sampled_from(NAMES)
    blocks = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)

    def __init__(self) -> None:
        super().__init__()
        self.index = begun(*self.NAMES)
        self.has: dict[str, set[tuple[int, ...]]] = {name: set() for name in self.NAMES}

    @rule(name=names, blocks=blocks)
    def store(self, name: str, blocks: tuple[int, ...]) -> None:
        store(self.index, name, *blocks)
        self.has[name].update(hashes_of(*blocks))

    @rule(name=names, blocks=blocks, more=blocks)
    def store_behind(self, name: str, blocks: tuple[int, ...], more: tuple[int, ...]) -> None:
        """Behind a block that the engine may have evicted: then nothing can be reported of it."""
        hashes = hashes_of(*blocks, *more)[len(blocks) :]
        self.index.store(name, stored(hashes, blocks, prompt(*more), BLOCK))
        if blocks in self.has[name]:
            self.has[name].update(hashes)

    @rule(name=names, blocks=blocks)
    def evict(self, name: str, blocks: tuple[int, ...]) -> None:
        self.index.remove(name, [blocks])
        self.has[name].discard(blocks)

    @rule(name=names)
    def clear(self, name: str) -> None:
        self.index.begin(name)
        self.has[name].clear()

    @rule(blocks=blocks)
    def look(self, blocks: tuple[int, ...]) -> None:
        expected = {
            name: next(
                (at for at, one in enumerate(hashes_of(*blocks)) if one not in has), len(blocks)
            )
            for name, has in self.has.items()
        }
        assert found(self.index, *blocks) == expected

    @invariant()
    def nothing_is_left_behind(self) -> None:
        """A block stays while an engine has it, or has one behind it."""
        wanted = {
            one[:at] for has in self.has.values() for one in has for at in range(len(one) + 1)
        }
        assert len(self.index) == len(wanted - {()})


TestEngines = Engines.TestCase
TestEngines.settings = settings(stateful_step_count=20, max_examples=40)


@pytest.fixture
def index() -> GpuBlocks:
    return begun("a")


def test_an_engine_that_was_missed_is_unknown_until_it_begins_again(index: GpuBlocks) -> None:
    store(index, "a", 1, 2)

    index.lose("a", "events 3 to 5 were missed")
    store(index, "a", 1)

    assert index.find(np.array(prompt(1), np.uint32)) == [
        OnGpu("a", UNKNOWN, "events 3 to 5 were missed", 0, BLOCK, 0)
    ]
    assert len(index) == 0
    index.lose("a", "it is gone", is_away=True)
    assert index.find(np.array([], np.uint32))[0].state == AWAY
    index.begin("a")
    store(index, "a", 1)
    assert index.find(np.array(prompt(1), np.uint32)) == [OnGpu("a", KNOWN, "", BLOCK, BLOCK, 1)]


def test_adapters_and_salts_are_distinguished(index: GpuBlocks) -> None:
    """A block of another adapter, or that depends on more than tokens, is no hit for a prompt."""
    store(index, "a", 1, lora="french")
    assert (found(index, 1), found(index, 1, lora="french")) == ({"a": 0}, {"a": 1})
    index.store("a", stored(["x", "y"], None, prompt(7, 8), BLOCK, extra=[None, ("image-1",)]))
    assert found(index, 7, 8) == {"a": 1}


def test_a_block_whose_hash_covers_more_is_found_before_the_same_tokens() -> None:
    """With vLLM's drafts (EAGLE): what is behind a block distinguishes equal tokens."""
    index = begun("drafting", "plain")
    tokens = prompt(1, 2)
    index.store("drafting", stored(["12"], None, prompt(1), BLOCK, ahead=[[2, 2]]))
    index.store("drafting", stored(["13"], None, prompt(1), BLOCK, ahead=[[3, 3]]))
    index.store("drafting", stored(["12", "124"], None, tokens, BLOCK, ahead=[[2, 2], [4, 4]]))
    index.store("plain", stored(["1", "12"], None, tokens, BLOCK))

    def reports(asked: list[int]) -> list[int]:
        return [one.prefix_tokens for one in index.find(np.array(asked, np.uint32))]

    assert reports(prompt(1, 2, 4)) == [8, 8]
    assert reports([*tokens, 4, 4]) == [8, 8]
    assert reports([*tokens, 4]) == [4, 8], "it has no hash of its second block yet"
    assert reports(prompt(1, 2, 5)) == [4, 8]
    assert reports(prompt(1, 5)) == [0, 4]
    index.store("drafting", stored([], None, tokens, BLOCK, **FULL))
    index.remove("drafting", ["12"])
    assert reports(prompt(1, 2, 4)) == [0, 8]
    assert reports(prompt(1, 3)) == [4, 4]


def test_block_sizes_are_matched_each_in_its_own() -> None:
    index = begun("a", "b")
    store(index, "a", 1, 1)
    index.store("b", stored(["h"], None, [1] * 6, 6))
    reported = index.find(np.array([1] * 9, np.uint32))
    assert [(one.prefix_tokens, one.block_tokens) for one in reported] == [(8, 4), (6, 6)]


@pytest.mark.parametrize(
    ("tokens", "block_tokens"), [([1, 2, 3], 4), ([1, 2, 3, 2**32], 4), ([1, -2, 3, 4], 4), ([], 0)]
)
def test_events_that_cannot_be_right_lose_the_engine(tokens: list[int], block_tokens: int) -> None:
    """And no other engine."""
    index = begun("a", "b")
    store(index, "b", 1)
    index.store("a", stored(["h"], None, tokens, block_tokens))
    assert not index.is_known("a")
    assert found(index, 1) == {"a": 0, "b": 1}


WINDOW = {"group": 1, "kind": "sliding_window", "window": BLOCK * 2 + 1}
FULL = {"group": 0, "kind": "full_attention"}


def test_a_window_is_placed_behind_blocks_that_only_another_group_has(index: GpuBlocks) -> None:
    store(index, "a", 1, 2, 3, 4, **FULL)
    index.store("a", stored(hashes_of(1, 2, 3, 4)[2:], (1, 2), prompt(3, 4), BLOCK, **WINDOW))
    assert found(index, 1, 2, 3, 4, 5) == {"a": 4}
    assert found(index, 1, 2, 3) == {"a": 0}


def test_a_group_with_blocks_of_another_size_reports_nothing_of_where_they_are() -> None:
    """A later one does, with blocks of the same size."""
    large = (BLOCK * 2, FULL)
    small = (BLOCK, WINDOW | {"window": BLOCK})
    for order in ([large, small], [small, large]):
        index = begun("a")
        for size, group in order:
            index.store("a", stored([(1, 2)], None, prompt(1, 2), size, **group))
        assert found(index, 1, 2) == {"a": 0}
        store(index, "a", 1, 2, **FULL | {"group": 2})
        assert found(index, 1, 2) == {"a": 2}


def test_a_block_that_is_reported_again_behind_nothing_known_stays_where_it_is(
    index: GpuBlocks,
) -> None:
    store(index, "a", 1, 2)
    index.store("a", stored([(1, 2)], "unknown", prompt(2), BLOCK))
    assert found(index, 1, 2) == {"a": 2}
    index.remove("a", [(1, 2)])
    assert found(index, 1, 2) == {"a": 1}


def test_a_block_that_ends_within_another_is_none_of_a_prompt(index: GpuBlocks) -> None:
    """It takes no room among those that are."""
    index.store("a", stored([(1, 2)], None, prompt(1, 2), 2 * BLOCK, **FULL))
    index.store("a", stored([(1,)], None, prompt(1), BLOCK, **FULL))
    index.store("a", stored([(1, 2, 3)], (1, 2), prompt(3), BLOCK, **FULL))
    assert len(index) == 1
    assert found(index, 1, 2, 3) == {"a": 2}


def test_a_group_that_keeps_nothing_yet_is_understood(index: GpuBlocks) -> None:
    """It is not known then which blocks it keeps, and there are none."""
    index.store("a", stored([(1, 2)], None, prompt(1, 2), 2 * BLOCK, **FULL))
    index.store("a", stored([], None, prompt(1, 2), BLOCK, **WINDOW))
    index.settle("a")
    assert (index.is_known("a"), found(index, 1, 2)) == (True, {"a": 0})
    store(index, "a", 1, 2, **WINDOW)
    assert found(index, 1, 2) == {"a": 2}


def test_copies_of_a_block_are_removed_one_by_one() -> None:
    """Of an engine that names its groups. Others report a block again that is there."""
    index = begun("a", "b")
    for _ in range(3):
        store(index, "a", 1, **FULL)
        store(index, "b", 1)
    for left in (1, 1, 0):
        index.remove("a", [(1,)], 0)
        index.remove("b", [(1,)])
        assert found(index, 1) == {"a": left, "b": 0}

    for forget in (lambda: index.clear("a"), lambda: index.remove("a", [(1,)])):
        for _ in range(3):
            store(index, "a", 1, **FULL)
        forget()
        store(index, "a", 1, **FULL)
        index.remove("a", [(1,)], 0)
        assert found(index, 1) == {"a": 0, "b": 0}


def test_a_block_with_several_hashes_is_held_until_the_last_is_removed() -> None:
    """SGLang gives the blocks of an adapter new hashes when it loads it again."""
    index = begun("a", "b")
    for one in ("first load", "second", "third"):
        index.store("a", stored([one], None, prompt(1), BLOCK, lora="french"))
    for one, left in (("second", 1), ("first load", 1), ("third", 0)):
        index.remove("a", [one])
        assert found(index, 1, lora="french") == {"a": left, "b": 0}
    assert len(index) == 0


def test_a_hash_that_is_reported_of_another_block_leaves_the_one_before(index: GpuBlocks) -> None:
    """And a block may be of one token."""
    for token in (7, 8):
        index.store("a", stored(["x"], None, [token], 1))
    assert [index.find(np.array([one], np.uint32))[0].prefix_tokens for one in (7, 8)] == [0, 1]
    assert len(index) == 1


def test_an_engine_that_begins_again_has_its_groups_again(index: GpuBlocks) -> None:
    """They have the places that they had, however many there are."""
    for _ in range(2):
        for group in range(GROUPS_MAX):
            store(index, "a", 1, group=group, kind="full_attention")
        assert found(index, 1) == {"a": 1}
        index.begin("a")
    store(index, "a", 1, group=GROUPS_MAX, kind="full_attention")
    assert index.why("a") == f"it has more than {GROUPS_MAX} groups of layers"


def test_what_an_engine_was_lost_for_first_stays_reported(index: GpuBlocks) -> None:
    index.store("a", stored([(1, 2)], None, prompt(1, 2, 3), BLOCK, **WINDOW))
    index.lose("a", "events 3 to 5 were missed")
    index.settle("a")
    assert index.why("a") == "events 3 to 5 were missed"


def test_names_of_blocks_are_bounded() -> None:
    """Of blocks that are nowhere, too, and of one block with many names."""
    for parent in ("unknown", None):
        index = begun("a", blocks_max=5)
        for at in range(6):
            assert index.is_known("a")
            index.store("a", stored([at], parent, prompt(1), BLOCK))
        assert index.why("a") == "it has more than 5 blocks"


def test_bounds() -> None:
    """An engine that has more blocks than there is room for is unknown; others stay known."""
    index = begun("a", "b", blocks_max=5)
    store(index, "b", 1, 2)
    store(index, "a", 3, 4, 5, 6)
    assert (index.is_known("a"), index.is_known("b"), len(index)) == (False, True, 2)
    GpuBlocks(str(at) for at in range(ENGINES_MAX))
    with pytest.raises(ValueError, match="at most 64"):
        GpuBlocks(str(at) for at in range(ENGINES_MAX + 1))


def is_enough(group: HeldBlocks, tokens: int) -> bool:
    """Return whether the token behind so many finds what it reads."""
    if tokens % group.block_tokens or tokens > len(group.held) * group.block_tokens:
        return False
    if not tokens:
        return True
    first = max(0, tokens - group.read)
    return all(group.held[at // group.block_tokens] for at in range(first, tokens))


groups = st.builds(
    lambda read, size, held: HeldBlocks(read, size, np.array(held, np.bool_)),
    st.one_of(st.just(ALL), st.integers(0, 8)),
    st.integers(1, 4),
    st.lists(st.sampled_from([True, True, True, False]), max_size=8),
)


@settings(max_examples=examples(300))
@given(st.lists(groups, min_size=1, max_size=3))
def test_the_longest_prefix_that_all_groups_can_go_on_behind(several: list[HeldBlocks]) -> None:
    most = max(len(group.held) * group.block_tokens for group in several)
    expected = max(
        tokens for tokens in range(most + 1) if all(is_enough(group, tokens) for group in several)
    )
    assert usable_tokens(several) == expected


@pytest.mark.parametrize(
    ("kind", "window", "read"),
    [
        ("", 0, ALL),
        ("mla_attention", 0, ALL),
        ("sliding_window_mla", 8, 7),
        ("sliding_window", 0, None),
        ("mamba", 0, 1),
        ("cross_attention", 0, None),
        ("a kind of tomorrow", 0, None),
    ],
)
def test_kinds(kind: str, window: int, read: int | None) -> None:
    assert tokens_read(kind, window) == read
