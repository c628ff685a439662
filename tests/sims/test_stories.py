"""Seeds that found something, as stories with names."""

from __future__ import annotations

import pytest

from sims.play import play
from sims.swarm import smaller


@pytest.mark.slow  # test_sweep.py plays the same seed with each change
def test_a_page_set_anew_with_another_length_is_found_by_every_client() -> None:
    """Seed 21: a record that does not fit is not remembered for ever.

    1. A client sets a page with another length than the others do, and c4 remembers its record.
    2. The page is evicted, and set anew with the usual length, at another node.
    3. c4 reads it: its own record says another length, so it was a miss, without a question to
       any node. The record was neither dropped nor tried again: a miss for as long as c4 lived.
    """
    outcome = play(21, change=smaller)

    assert outcome.ok, f"{outcome.checker}: {outcome.detail}"
