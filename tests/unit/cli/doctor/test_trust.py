"""What the doctor says about certificates, and about nodes that refuse this host."""

from __future__ import annotations

import datetime as dt
import socket
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trio

from peercache.cli.doctor.checks import ADVICE, GOOD, PROBLEM, Finding, judge
from peercache.cli.doctor.facts import JoinFact, TrustFact
from peercache.cli.doctor.host import look_at_trust
from peercache.config.settings import Config
from peercache.observability.log import get_logger
from peercache.trust.files import LiveTls
from tests.certificates import Certificates
from tests.unit.cli.doctor.test_checks import HOST
from tests.unit.http.http_node import served


@pytest.fixture(name="certificates")
def _certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "ca", "prod")


def _findings(**settings: str) -> list[Finding]:
    return _judged(look_at_trust(Config.load(settings)))


def _judged(trust: TrustFact) -> list[Finding]:
    found = judge(attrs.evolve(HOST, trust=trust))
    return [each for each in found if each.topic in ("certificates", "discovery")]


def test_host_without_certificates_serves_itself() -> None:
    """Nothing is wrong with that."""
    assert [(each.level, each.topic) for each in _findings()] == [(GOOD, "certificates")]


def test_trial_is_advised_to_become_a_cluster() -> None:
    """The command that mends it has the trial's name."""
    (found,) = _findings(insecure="ann")

    assert found.level == ADVICE
    assert "every process that connects may read every page" in found.text
    assert "--cluster ann" in found.fix


@pytest.mark.parametrize(
    ("lifetime", "level"), [(dt.timedelta(days=30), GOOD), (dt.timedelta(days=3), ADVICE)]
)
def test_certificate_is_told_with_its_days(
    certificates: Certificates, lifetime: dt.timedelta, level: str
) -> None:
    """Two weeks before its end it is time."""
    (found,) = _findings(**certificates.node("a", lifetime=lifetime))

    assert found.level == level
    assert "peercache://prod/node/a" in found.text


def test_wrong_files_are_a_problem(certificates: Certificates) -> None:
    """In the words of the node's own start."""
    settings = certificates.node("a")
    Path(settings["tls_key"]).chmod(0o644)
    (found,) = _findings(**settings)

    assert found.level == PROBLEM
    assert "chmod 600" in found.text


def _live(settings: dict[str, str]) -> LiveTls:
    live = LiveTls.open(Config.load(settings), is_node=True, log=get_logger())
    assert live is not None
    return live


async def test_node_to_join_says_who_it_is(certificates: Certificates) -> None:
    """Or why it and this host refuse each other."""
    settings, theirs = certificates.node("a"), certificates.node("b")

    async with served(settings=theirs, tls=_live(theirs)) as address:
        found = await _look({**settings, "discovery_addr": address})

    assert found == JoinFact(address, "peercache://prod/node/b")


async def test_node_of_another_authority_is_found(
    certificates: Certificates, tmp_path: Path
) -> None:
    """The doctor's host does not trust it."""
    other = Certificates(tmp_path / "other", "prod")
    settings, theirs = certificates.node("a"), other.node("b")

    async with served(settings=theirs, tls=_live(theirs)) as address:
        found = await _look({**settings, "discovery_addr": address})

    assert "certificate" in found.problem
    assert not found.identity


async def test_node_that_does_not_trust_this_host_is_found(
    certificates: Certificates, tmp_path: Path
) -> None:
    """With TLS 1.3 that is told after the handshake."""
    other = Certificates(tmp_path / "other", "prod")
    theirs, ours = other.node("b"), certificates.node("a")
    both = tmp_path / "both.crt"
    both.write_text(_joined(ours, theirs))

    async with served(settings=theirs, tls=_live(theirs)) as address:
        found = await _look({**ours, "tls_ca": str(both), "discovery_addr": address})

    assert "does not accept" in found.problem or "ca" in found.problem
    assert not found.is_silent


async def test_node_of_another_cluster_is_found(certificates: Certificates, tmp_path: Path) -> None:
    """One authority's file may serve two clusters by mistake."""
    other = Certificates(tmp_path / "other", "test")
    theirs, ours = other.node("b"), certificates.node("a")
    both = tmp_path / "both.crt"
    both.write_text(_joined(ours, theirs))
    for each in (theirs, ours):
        each["tls_ca"] = str(both)

    async with served(settings=theirs, tls=_live(theirs)) as address:
        found = await _look({**ours, "discovery_addr": address})

    assert "for cluster 'test', this one is 'prod'" in found.problem


def _joined(*peers: dict[str, str]) -> str:
    """Return the authorities of several peers as one file."""
    return "".join([Path(peer["tls_ca"]).read_text() for peer in peers])


async def _look(settings: dict[str, str]) -> JoinFact:
    fact = await trio.to_thread.run_sync(lambda: look_at_trust(Config.load(settings)))
    (found,) = fact.joins
    return found


@pytest.fixture(name="dead")
def _dead() -> Iterator[str]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def test_node_that_gives_no_answer_is_no_problem_of_trust(
    certificates: Certificates, dead: str
) -> None:
    """It may start later."""
    _, found = _findings(**certificates.node("a"), discovery_addr=dead)

    assert found.level == ADVICE
    assert "Connection refused" in found.text


def test_refusal_is_a_problem() -> None:
    """It does not go away alone."""
    fact = TrustFact(has_tls=True, identity="x", days_left=99, joins=(JoinFact("a:1", "", "no"),))
    _, found = _judged(fact)

    assert found.level == PROBLEM
    assert "refuse each other: no" in found.text
