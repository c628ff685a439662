"""Certificate files that could not be read, or followed, when they changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from peercache.errors import Rejected
from peercache.trust.files import LiveTls
from peercache.trust.identity import CertificateRole
from tests.certificates import Certificates
from tests.descriptors import no_descriptors
from tests.unit.trust.test_files import Log, _live, _names


@pytest.fixture(name="certificates")
def _certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "ca")


def test_list_that_could_not_be_read_is_read_when_there_is_a_descriptor(
    certificates: Certificates,
) -> None:
    """Else a stranger who takes all descriptors would keep a revoked certificate good."""
    live = _live(certificates.node("a"), Log())
    bad = _names(certificates.client("bad"))
    certificates.authority.revoke("client-bad")

    with no_descriptors():
        assert not live.look()
        assert live.admit(*bad).name == "bad"
    assert live.look()

    with pytest.raises(Rejected, match="revoked"):
        live.admit(*bad)


def test_what_did_not_follow_a_change_is_asked_to_do_so_again(certificates: Certificates) -> None:
    """A part of the node that has no descriptor for the new certificate gets it later."""
    live = _live(certificates.node("a"), Log())
    told: list[int] = []

    def follow(changed: LiveTls) -> None:
        told.append(changed.files.serial)
        if len(told) == 1:
            raise OSError(24, "Too many open files")

    live.on_change(follow)
    certificates.issue(CertificateRole.NODE, "a", is_renewal=True)

    with pytest.raises(OSError, match="Too many"):
        live.look()
    live.look()
    live.look()

    assert told == [live.files.serial] * 2
