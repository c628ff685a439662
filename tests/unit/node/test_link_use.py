"""Which links are closed: the idle ones, and the least recently used of too many."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from peercache.node.switchboard import (
    IDLE_S,
    LINKS_MAX,
    LINKS_MIN,
    SETTLE_S,
    LinkUse,
    links_that_fit,
)


def test_a_link_that_is_not_used_is_closed_after_a_while() -> None:
    """One that is used stays, and so does one that has to."""
    use = LinkUse(links_max=10)
    for address in ("idle", "head", "used"):
        use.used(address, 0.0)
    use.used("used", 1.0)

    assert use.surplus(IDLE_S - 0.1, kept=()) == []
    assert use.surplus(IDLE_S, kept={"head"}) == ["idle"]
    use.ended("idle")
    assert use.surplus(IDLE_S, kept={"head"}) == []
    assert len(use) == 2


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 6)), max_size=30),
    st.integers(1, 4),
    st.sets(st.sampled_from("abcdef"), max_size=2),
)
def test_the_least_recently_used_of_too_many_are_closed(
    steps: list[tuple[str, int]], links_max: int, kept: set[str]
) -> None:
    """The oracle: sort by the last use; and what is new is left alone."""
    use, last, now = LinkUse(links_max=links_max), dict[str, float](), 0.0
    for address, later_s in steps:
        now += later_s
        use.used(address, now)
        last.pop(address, None)
        last[address] = now
    now += SETTLE_S

    found = use.surplus(now, kept=kept)

    others = [address for address in last if address not in kept]
    too_many = max(0, len(last) - links_max)
    idle = [address for address in others if now - last[address] >= IDLE_S]
    assert found == others[: max(too_many, len(idle))]


def test_a_new_link_is_left_alone() -> None:
    """It may not have been answered yet."""
    use = LinkUse(links_max=1)
    for address in "abc":
        use.used(address, 0.0)

    assert use.surplus(SETTLE_S - 0.1, kept=()) == []
    assert use.surplus(SETTLE_S, kept=()) == ["a", "b"]


def test_a_process_with_few_descriptors_has_few_links() -> None:
    """A quarter of them, five a link; some in any case, and not more than anyone needs."""
    assert [links_that_fit(files) for files in (64, 1024, 65_536, 2**20, math.inf)] == [
        LINKS_MIN,
        51,
        3276,
        LINKS_MAX,
        LINKS_MAX,
    ]
