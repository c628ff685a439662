"""Churn in a cluster: nodes die, restart, leave and join, and all know it soon.

The full size, `python -m sims churn`, takes half an hour of one core.
"""

from __future__ import annotations

import pytest

from sims import churn
from sims.churn import EVENTS, Churn, ChurnReport, churn_table


def churned(nodes: int) -> ChurnReport:
    return Churn(nodes=nodes, clients=4, seed=5).churn(300.0)


def test_views_converge_after_each_event_and_a_node_sends_as_much_in_a_larger_cluster() -> None:
    """Each event is asserted to be known to all in time."""
    small, large = churned(12), churned(30)

    assert {event.what for event in small.events} == set(EVENTS)
    assert len(large.events) == 10
    assert large.messages[0] < 1.2 * small.messages[0]
    assert large.kilobytes[0] < 1.2 * small.kilobytes[0]
    # Header, rule, and a line for each.
    assert len(list(churn_table((small, large)))) == 4


def test_a_restart_within_the_time_of_a_death_is_known_at_once() -> None:
    """The new process is a member before the old one has been silent for long."""
    report = churned(12)

    count, nodes_s, _ = report.worst("restart")
    assert count
    assert nodes_s < churn.CONVERGED_S / 2


def test_views_that_do_not_converge_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound can fail: clients ask once a second."""
    monkeypatch.setattr(churn, "CONVERGED_S", 0.5)

    with pytest.raises(AssertionError, match="lack the ring"):
        churned(12)
