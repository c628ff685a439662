"""The failure detector: which members are back from the dead, and until when that counts."""

from __future__ import annotations

from peercache.actors.membership.failure_detector import FailureDetector

A, B = 11, 12


def test_a_member_is_back_for_a_while() -> None:
    """Others never were away."""
    detector = FailureDetector()
    detector.back(A, 100.0)

    seen = [detector.back_within(one, now, 3.0) for one, now in ((A, 102.9), (A, 103.0), (B, 100))]

    assert seen == [True, False, False]


def test_a_member_that_ends_again_is_back_no_more() -> None:
    """And is remembered no longer than others that are gone."""
    detector = FailureDetector()
    detector.back(A, 100.0)

    detector.ended(A)

    assert not detector.back_within(A, 100.1, 3.0)
