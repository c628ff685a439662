"""The process: what a forked child knows of its owner, and the shares of its descriptors."""

from __future__ import annotations

import math
import os

from hypothesis import given
from hypothesis import strategies as st

from peercache.model.process import DATA_MAX, HALVES_MAX, HTTP_MAX, DescriptorShares, ForkGuard
from peercache.node.switchboard import LINK_DESCRIPTORS, LINKS_MIN, links_that_fit


def test_only_a_fork_is_a_child() -> None:
    """The owner is never a child, also after it has forked."""
    guard = ForkGuard()
    child = os.fork()
    if not child:
        os._exit(7 if guard.is_child else 0)

    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 7
    assert not guard.is_child


FEWEST = 256
"""With less a node does not start."""


def _sum(shares: DescriptorShares) -> float:
    return shares.data + shares.newcomers + shares.control + shares.halves + shares.http


@given(st.integers(FEWEST, 2**20))
def test_what_others_open_never_takes_the_last_descriptors(descriptors: int) -> None:
    """Of as many as a process may have, all bounds together leave a quarter to links and more."""
    shares = DescriptorShares.of(descriptors)
    links = links_that_fit(descriptors)

    assert _sum(shares) <= descriptors * 11 / 16
    if links > LINKS_MIN:
        assert _sum(shares) + links * LINK_DESCRIPTORS <= descriptors * 15 / 16
    assert min(attr for attr in (shares.data, shares.newcomers, shares.halves, shares.http)) >= 1


def test_a_process_without_a_limit_has_the_largest_shares() -> None:
    """Those are bounded for the sake of memory."""
    shares = DescriptorShares.of(math.inf)

    assert (shares.data, shares.halves, shares.http) == (DATA_MAX, HALVES_MAX, HTTP_MAX)
    assert shares.control == math.inf
