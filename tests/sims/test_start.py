"""A cluster whose nodes and engines all start within a second: how soon all know all.

The full size, `python -m sims start`, takes some minutes of one core; what depends on the size is
asserted there and here alike.
"""

from __future__ import annotations

import attrs
import pytest

from peercache.actors.membership import candidates as addresses
from peercache.actors.membership.gossip import ViewLog
from sims import dying
from sims.__main__ import main
from sims.dying import AGREED_S
from sims.start import Report, Start


def test_fifty_nodes_and_their_engines_start_at_once() -> None:
    """All are admitted, all lookups have owners, and masters do not drown in views."""
    report = Start(nodes=50, ranks=2, seed=1).play(at_most_s=5.0)

    assert report.clients == 100
    # The last process starts after a second, and clients look at their homes once a second.
    assert report.admitted_s < 2.0
    assert report.served_s < 4.0
    assert report.behind_s < 0.050
    # A view has 16 KB. A master sends each of the others each entry about once.
    assert report.kilobytes[1] < 2000
    assert report.kilobytes[0] < 250
    # Then a node reports to three masters that it lives, and links that are not used are closed.
    assert report.quiet_messages[0] < 8.0
    assert report.quiet_kilobytes[1] < 10.0
    assert report.links == (49, 49)
    assert report.links_quiet < 10


def test_what_a_death_costs_a_node_does_not_grow_with_the_cluster() -> None:
    """Views are equal within 2 s (`sims.dying` asserts it), and a node is notified the change
    alone.
    """
    small, large = [deaths_in(nodes) for nodes in (12, 30)]

    for few, many in zip(small.deaths, large.deaths, strict=True):
        assert many.kilobytes[0] < 1.1 * few.kilobytes[0]
        assert many.messages[0] < 1.1 * few.messages[0]
        assert many.agreed_s < AGREED_S
    assert large.quiet_kilobytes[0] < 1.1 * small.quiet_kilobytes[0]
    assert large.quiet_messages[0] < 1.1 * small.quiet_messages[0]


@pytest.mark.slow
def test_without_a_log_of_changes_a_death_costs_more_in_a_larger_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound of the test above can fail: views that are compared grow with the cluster."""
    monkeypatch.setattr(ViewLog, "was", lambda *_: False)
    monkeypatch.setattr(ViewLog, "since", lambda *_: None)

    small, large = [deaths_in(nodes) for nodes in (16, 40)]

    assert large.deaths[0].kilobytes[0] > 1.2 * small.deaths[0].kilobytes[0]


def test_a_death_that_not_all_learn_of_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of a death can fail: members ask their masters once a second."""
    monkeypatch.setattr(dying, "AGREED_S", 0.1)

    with pytest.raises(AssertionError, match="hold it alive still"):
        deaths_in(12)


def deaths_in(nodes: int) -> Report:
    return Start(nodes=nodes, ranks=1, seed=3).play(at_most_s=10.0, deaths=True)


def test_the_same_seed_is_the_same_start() -> None:
    """A failure can be looked at again."""
    reports = [
        attrs.evolve(Start(nodes=20, ranks=1, seed=7).play(at_most_s=10.0), wall_s=0.0)
        for _ in range(2)
    ]

    assert reports[0] == reports[1]


def test_a_start_that_takes_too_long_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bound can fail: one candidate at a time, and each a second."""
    monkeypatch.setattr(addresses, "AT_ONCE_MAX", 0)

    assert main(["start", "--nodes", "10", "--ranks", "1", "--within", "3"]) == 1
    assert "nodes lack members" in capsys.readouterr().out


@pytest.mark.slow
def test_five_hundred_nodes_and_four_thousand_engines_start_at_once() -> None:
    report = Start(nodes=500, ranks=8, seed=2).play(at_most_s=15.0)

    assert report.behind_s < 0.5
    assert report.quiet_messages[0] < 20.0
