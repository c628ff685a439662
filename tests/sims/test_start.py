"""A cluster whose nodes and engines all start within a second: how soon all know all.

The full size, `python -m sims start`, takes some minutes of one core; what depends on the size is
asserted there and here alike.
"""

from __future__ import annotations

import attrs
import pytest

from peercache.actors.membership import candidates
from sims.__main__ import main
from sims.start import Start


def test_a_hundred_nodes_and_their_engines_start_at_once() -> None:
    """All are admitted, all lookups have owners, and masters do not drown in views."""
    report = Start(nodes=100, ranks=2, seed=1).play(at_most_s=5.0)

    assert report.clients == 200
    # The last process starts after a second, and clients look at their homes once a second.
    assert report.admitted_s < 2.0
    assert report.served_s < 4.0
    assert report.behind_s < 0.050
    # A view has 16 KB. A master tells each of the others each entry about once.
    assert report.kilobytes[1] < 2000
    assert report.kilobytes[0] < 250
    # Then a node tells three masters that it lives, and links that are not used are closed.
    assert report.quiet_messages[0] < 8.0
    assert report.quiet_kilobytes[1] < 10.0
    assert report.links == (99, 99)
    assert report.links_quiet < 10


def test_the_same_seed_is_the_same_start() -> None:
    """A failure can be looked at again."""
    reports = [
        attrs.evolve(Start(nodes=20, ranks=1, seed=7).play(at_most_s=10.0), wall_s=0.0)
        for _ in range(2)
    ]

    assert reports[0] == reports[1]


def test_a_start_that_takes_too_long_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bound can fail: one candidate at a time, and each a second."""
    monkeypatch.setattr(candidates, "AT_ONCE_MAX", 0)

    assert main(["start", "--nodes", "10", "--ranks", "1", "--within", "3"]) == 1
    assert "nodes lack members" in capsys.readouterr().out


@pytest.mark.slow
def test_five_hundred_nodes_and_four_thousand_engines_start_at_once() -> None:
    report = Start(nodes=500, ranks=8, seed=2).play(at_most_s=15.0)

    assert report.behind_s < 0.5
    assert report.quiet_messages[0] < 20.0
