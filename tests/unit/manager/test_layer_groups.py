"""Groups of layers: what a prefix needs of each, beside the words of the rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.manager.layer_groups import HeldBlocks, Needs, needs_of, usable_tokens
from tests.examples import examples


def is_enough(group: HeldBlocks, tokens: int) -> bool:
    """Return whether the token behind so many finds what it reads."""
    if tokens % group.block_tokens or tokens > len(group.held) * group.block_tokens:
        return False
    if not tokens:
        return True
    blocks = tokens // group.block_tokens
    if group.needs is Needs.STATE:
        return bool(group.held[blocks - 1])
    first = 0 if group.needs is Needs.ALL else max(0, tokens - group.window + 1)
    return all(group.held[at // group.block_tokens] for at in range(first, tokens))


groups = st.builds(
    lambda needs, size, window, held: HeldBlocks(
        needs, size, window if needs is Needs.WINDOW else 0, np.array(held, np.bool_)
    ),
    st.sampled_from(Needs),
    st.integers(1, 4),
    st.integers(1, 9),
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
    ("kind", "window", "needs"),
    [
        ("", 0, Needs.ALL),
        ("mla_attention", 0, Needs.ALL),
        ("sliding_window_mla", 8, Needs.WINDOW),
        ("sliding_window", 0, None),
        ("mamba", 0, Needs.STATE),
        ("cross_attention", 0, None),
        ("a kind of tomorrow", 0, None),
    ],
)
def test_kinds(kind: str, window: int, needs: Needs | None) -> None:
    assert needs_of(kind, window) is needs
