"""Certificate files: which are refused at the start, and what a change of files does."""

from __future__ import annotations

import datetime as dt
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from peercache.config.settings import Config
from peercache.errors import ConfigError, Rejected
from peercache.trust import authority as authority_module
from peercache.trust.authority import Authority
from peercache.trust.files import LiveTls, TlsFiles, common_name_of, serial_of, with_cluster
from peercache.trust.identity import CertificateRole, Identity
from tests.certificates import Certificates
from tests.descriptors import no_descriptors


class Log:
    """Keeps what is logged."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, level: str) -> Any:
        """Return what logs at a level."""
        return lambda event, **facts: self.lines.append((event, facts))

    def events(self) -> list[str]:
        """Return the events, in order."""
        return [event for event, _ in self.lines]


@pytest.fixture(name="certificates")
def _certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "ca")


def _load(settings: dict[str, str], *, is_node: bool = True, **more: str) -> TlsFiles:
    files = TlsFiles.load(Config.load({**settings, **more}), is_node=is_node)
    assert files is not None
    return files


def _problem(settings: dict[str, str], *, is_node: bool = True, **more: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        _load(settings, is_node=is_node, **more)
    assert "PRIVATE" not in str(caught.value)
    return caught.value


def test_without_tls_no_file_is_read() -> None:
    """And the library that reads certificates is not loaded: it takes 60 ms."""
    assert TlsFiles.load(Config()) is None
    code = (
        "import sys, peercache, peercache.trust.files\n"
        "from peercache.config.settings import Config\n"
        "assert peercache.trust.files.TlsFiles.load(Config()) is None\n"
        "assert not [name for name in sys.modules if name.startswith('cryptography')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_say_who_the_process_is(certificates: Certificates) -> None:
    """The cluster's name follows from the certificate where no setting sets it."""
    settings = certificates.node("a")
    files = _load(settings)

    assert files.identity == Identity("tests", CertificateRole.NODE, "a")
    assert files.key_pem == Path(settings["tls_key"]).read_text()
    assert files.key_pem not in repr(files)
    assert with_cluster(Config.load(settings), files).cluster == "tests"
    assert with_cluster(Config(), None).cluster == "default"


@pytest.mark.parametrize(
    ("is_node", "role", "problem"),
    [
        (True, CertificateRole.NODE, ""),
        (False, CertificateRole.NODE, ""),
        (False, CertificateRole.CLIENT, ""),
        (True, CertificateRole.CLIENT, "a node needs a node's"),
        (True, CertificateRole.OPERATOR, "a node needs a node's"),
        (False, CertificateRole.OPERATOR, "a client needs a client's"),
    ],
)
def test_role_must_be_right(
    certificates: Certificates, is_node: bool, role: CertificateRole, problem: str
) -> None:
    """A node's certificate implies a reader's: engines that embed a node have one."""
    settings = certificates.issue(role, "a")

    if problem:
        assert problem in str(_problem(settings, is_node=is_node))
    else:
        assert _load(settings, is_node=is_node).identity.role is role


def test_expired_certificate_is_refused(certificates: Certificates) -> None:
    """The error names the file and the time."""
    error = _problem(certificates.node("a", lifetime=dt.timedelta(minutes=-1)))

    assert error.name == "tls_cert"
    assert "node-a.crt: it expired on 20" in str(error)


def test_certificate_of_tomorrow_is_refused(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is wrong shows here, before peers refuse the process one by one."""
    monkeypatch.setattr(authority_module, "CLOCK_DIFFERENCE", dt.timedelta(days=-1))

    assert "is not valid before 20" in str(_problem(certificates.node("a")))


def test_certificate_of_another_authority_is_refused(
    certificates: Certificates, tmp_path: Path
) -> None:
    """Also of one with the same name."""
    other = Certificates(tmp_path / "other")
    settings = {**certificates.node("a"), "tls_ca": other.node("b")["tls_ca"]}

    assert "no authority of tls_ca has signed it" in str(_problem(settings))


def test_certificate_signed_by_a_node_is_refused(certificates: Certificates) -> None:
    """Only authorities sign: a node's key that leaked makes no second node."""
    node = certificates.node("a")
    forged = certificates.folder / "forged.pem"
    own = x509.load_pem_x509_certificate(Path(node["tls_cert"]).read_bytes())
    key = load_pem_private_key(Path(node["tls_key"]).read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    attacker = Authority(certificates.folder, own, key)
    path = attacker.issue(
        Identity("tests", CertificateRole.NODE, "z"), lifetime=dt.timedelta(days=1)
    )
    forged.write_text(path.read_text() + Path(node["tls_cert"]).read_text())
    settings = {**node, "tls_cert": str(forged), "tls_key": str(path.with_suffix(".key"))}

    assert "no authority of tls_ca has signed it" in str(_problem(settings))


def test_two_authorities_are_trusted_while_one_replaces_the_other(
    certificates: Certificates, tmp_path: Path
) -> None:
    """A rollover: first both are trusted, then certificates change, then the old one goes."""
    new = Certificates(tmp_path / "new")
    both = tmp_path / "both.crt"
    old_node, new_node = certificates.node("a"), new.node("a")
    both.write_text(Path(old_node["tls_ca"]).read_text() + Path(new_node["tls_ca"]).read_text())

    for settings in (old_node, new_node):
        assert _load({**settings, "tls_ca": str(both)}).identity.name == "a"


def test_key_of_another_certificate_is_refused(certificates: Certificates) -> None:
    """The error names both files."""
    settings = {**certificates.node("a"), "tls_key": certificates.node("b")["tls_key"]}

    assert "node-b.key is not the key of" in str(_problem(settings))


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o606, 0o644])
def test_key_that_others_can_read_is_refused(certificates: Certificates, mode: int) -> None:
    """The error names the command that fixes it."""
    settings = certificates.node("a")
    Path(settings["tls_key"]).chmod(mode)
    error = _problem(settings)

    assert error.name == "tls_key"
    assert f"mode {mode:04o}" in str(error)
    assert "chmod 600" in str(error)


def test_key_may_be_read_by_the_group_that_shares_the_host(certificates: Certificates) -> None:
    """A mounted secret belongs to root and a group."""
    settings = certificates.node("a")
    key = Path(settings["tls_key"])
    key.chmod(0o640)
    group = str(key.stat().st_gid)

    assert _load(settings, share_group=group).identity.name == "a"
    assert "mode 0640" in str(_problem(settings, share_group=str(int(group) + 12_345)))
    key.chmod(0o644)
    assert "mode 0644" in str(_problem(settings, share_group=group))


@pytest.mark.parametrize("name", ["tls_ca", "tls_cert", "tls_key"])
@pytest.mark.parametrize("content", [None, b"", b"no PEM", b"\xff\xfe", b"x" * (2**20 + 1)])
def test_unreadable_file_is_named(
    certificates: Certificates, tmp_path: Path, name: str, content: bytes | None
) -> None:
    """Missing, empty, damaged, binary, huge: one error that names setting and file."""
    file = tmp_path / "file.pem"
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)
    error = _problem({**certificates.node("a"), name: str(file)})

    assert error.name == name
    assert "file.pem" in str(error)


def test_certificate_of_another_cluster_is_refused(certificates: Certificates) -> None:
    """A name that is set must be the certificate's."""
    settings = certificates.node("a")

    assert _load(settings, cluster="tests").identity.cluster == "tests"
    assert "'cluster': is 'prod', and" in str(_problem(settings, cluster="prod"))


def test_certificate_without_an_identity_is_refused(certificates: Certificates) -> None:
    """An authority's own certificate names no peer."""
    settings = certificates.node("a")

    assert "no identity of PeerCache" in str(_problem({**settings, "tls_cert": settings["tls_ca"]}))


# --- files that change ----------------------------------------------------------------------------


def _live(settings: dict[str, str], log: Log, **more: str) -> LiveTls:
    live = LiveTls.open(Config.load({**settings, **more}), is_node=True, log=log)
    assert live is not None
    return live


def test_renewed_certificate_is_taken_without_a_restart(certificates: Certificates) -> None:
    """Each user of the certificates is notified once."""
    settings, log = certificates.node("a"), Log()
    live = _live(settings, log)
    reported: list[int] = []
    live.on_change(lambda changed: reported.append(changed.files.serial))
    old = live.files.serial

    assert not live.look()
    certificates.issue(CertificateRole.NODE, "a", is_renewal=True)
    assert live.look()
    assert not live.look()

    assert live.files.serial != old
    assert reported == [live.files.serial]
    assert log.events() == ["tls.files_changed"]


def test_wrong_new_files_keep_the_old_ones(certificates: Certificates) -> None:
    """A half-done rotation is logged once, and taken when it is whole."""
    settings, log = certificates.node("a"), Log()
    live = _live(settings, log)
    old = live.files
    other = certificates.node("b")

    Path(settings["tls_cert"]).write_text("half a certif")
    assert not live.look()
    assert not live.look()
    shutil.copy(other["tls_cert"], settings["tls_cert"])
    assert not live.look()
    assert live.files is old
    certificates.issue(CertificateRole.NODE, "a", is_renewal=True)
    assert live.look()

    assert log.events() == ["tls.files_rejected", "tls.files_rejected", "tls.files_changed"]


def test_another_name_wants_a_restart(certificates: Certificates) -> None:
    """Peers know the process by the name in its certificate."""
    settings, log = certificates.node("a"), Log()
    live = _live(settings, log)
    other = certificates.node("b")

    shutil.copy(other["tls_cert"], settings["tls_cert"])
    shutil.copy(other["tls_key"], settings["tls_key"])

    assert not live.look()
    assert "a new name requires a restart" in log.lines[0][1]["problem"]
    assert live.files.identity.name == "a"


def test_certificate_that_soon_expires_is_logged_once_a_day(certificates: Certificates) -> None:
    """Also once it has expired: the process cannot end itself."""
    settings, log = certificates.node("a", lifetime=dt.timedelta(days=3)), Log()
    live = _live(settings, log)

    for _ in range(3):
        live.look()

    assert log.events() == ["tls.certificate_expires"]
    assert live.days_left == pytest.approx(3, abs=0.1)


# --- revocation -----------------------------------------------------------------------------------


def _names(settings: dict[str, str]) -> tuple[str, list[str]]:
    """Return what nng reports of a peer: its common name and its alternative names."""
    files = _load(settings, is_node=False)
    return common_name_of(files.serial), ["peercache", files.identity.uri()]


def test_revoked_peer_is_refused_and_others_are_not(certificates: Certificates) -> None:
    """The list is read from the folder of tls_ca, within one look after it came."""
    live = _live(certificates.node("a"), Log())
    bad, good = _names(certificates.client("bad")), _names(certificates.client("good"))
    assert live.admit(*bad).name == "bad"

    certificates.authority.revoke("client-bad")
    assert live.look()

    with pytest.raises(Rejected) as caught:
        live.admit(*bad)
    assert caught.value.reason == "revoked"
    assert live.admit(*good).name == "good"


def test_name_can_be_issued_again_after_a_revocation(certificates: Certificates) -> None:
    """A serial number is revoked, not a name."""
    live = _live(certificates.node("a"), Log())
    old = _names(certificates.node("b"))
    certificates.authority.revoke("node-b")
    live.look()
    new = _names(certificates.node("b"))

    assert live.refusal("b") == ""
    with pytest.raises(Rejected, match="revoked"):
        live.admit(*old)
    assert "issue a new certificate" in live.refusal("b")
    assert live.admit(*new).name == "b"
    # The old one is still refused, and no longer that of the node.
    with pytest.raises(Rejected, match="revoked"):
        live.admit(*old)
    assert live.refusal("b") == ""


def test_peer_of_another_cluster_is_refused(certificates: Certificates, tmp_path: Path) -> None:
    """One authority may serve two clusters."""
    live = _live(certificates.node("a"), Log())
    uri = Identity("prod", CertificateRole.NODE, "b").uri()

    with pytest.raises(Rejected, match="for cluster 'prod', this one is 'tests'") as caught:
        live.admit("12", [uri])
    assert caught.value.reason == "cluster"


def test_list_that_a_peer_reports_is_kept(certificates: Certificates, tmp_path: Path) -> None:
    """A node that restarts without its peers still refuses."""
    settings = {**certificates.node("a"), "tls_crl": str(tmp_path / "kept.crl")}
    bad = _names(certificates.client("bad"))
    certificates.authority.revoke("client-bad")
    text = (certificates.folder / "revoked.crl").read_text()
    Path(settings["tls_crl"]).write_text(text)
    live = _live(settings, Log())
    certificates.client("worse")
    certificates.authority.revoke("client-worse")
    newer = (certificates.folder / "revoked.crl").read_text()
    reported: list[LiveTls] = []
    live.on_change(reported.append)

    assert live.take_list(newer)
    assert not live.take_list(newer)
    assert not live.take_list(text)
    assert reported == [live]
    assert not live.look()

    again = _live(settings, Log())
    assert again.revocations.numbers == (2,)
    with pytest.raises(Rejected, match="revoked"):
        again.admit(*bad)


def test_list_that_cannot_be_kept_still_holds(certificates: Certificates) -> None:
    """A mounted secret is read-only."""
    log = Log()
    settings = certificates.node("a")
    live = _live(settings, log)
    certificates.client("bad")
    certificates.authority.revoke("client-bad")
    newer = (certificates.folder / "revoked.crl").read_text()
    (certificates.folder / "revoked.crl").unlink()
    (certificates.folder / "revoked.crl").mkdir()

    assert live.take_list(newer)
    assert len(live.revocations) == 1
    # What is there now is read first: it may be newer.
    for _ in range(2):
        assert not live.look()
    assert log.events() == [
        "tls.revocations_changed",
        "tls.list_rejected",
        "tls.list_not_kept",
    ]


def test_older_list_frees_no_certificate(certificates: Certificates) -> None:
    """An old list that comes back, as a file or from a peer, changes nothing."""
    live = _live(certificates.node("a"), Log())
    bad = _names(certificates.client("bad"))
    certificates.client("first")
    path = certificates.folder / "revoked.crl"
    certificates.authority.revoke("client-first")
    old = path.read_text()
    certificates.authority.revoke("client-bad")
    live.look()

    path.write_text(old)
    live.look()

    with pytest.raises(Rejected, match="revoked"):
        live.admit(*bad)


@pytest.mark.parametrize("kind", ["foreign", "damaged", "none", "huge"])
def test_list_that_no_authority_signed_is_refused(
    certificates: Certificates, tmp_path: Path, kind: str
) -> None:
    """Else any member could revoke all others."""
    other = Certificates(tmp_path / "other")
    other.client("x")
    other.authority.revoke("client-x")
    certificates.client("x")
    certificates.authority.revoke("client-x")
    own = (certificates.folder / "revoked.crl").read_text()
    (certificates.folder / "revoked.crl").unlink()
    lines = own.splitlines()
    text = {
        "foreign": (other.folder / "revoked.crl").read_text(),
        "damaged": "\n".join([lines[0], lines[1][::-1], *lines[2:]]),
        "none": "nothing",
        "huge": own + " " * 200_000,
    }[kind]
    log = Log()
    live = _live(certificates.node("a"), log)

    with pytest.raises(Rejected) as caught:
        live.take_list(text)
    assert caught.value.reason == (
        "revocation_authority" if kind == "foreign" else "revocation_list"
    )
    assert len(live.revocations) == 0
    (certificates.folder / "revoked.crl").write_text(text)
    assert not live.look()
    assert log.events() == ["tls.list_rejected"]
    if kind == "foreign":
        return
    with pytest.raises(ConfigError, match=r"revoked\.crl"):
        _live(certificates.node("b"), Log())


def test_list_of_the_replaced_authority_stops_no_start(
    certificates: Certificates, tmp_path: Path
) -> None:
    """It stays behind when its authority goes, whose certificates are refused without it."""
    other = Certificates(tmp_path / "other")
    other.client("x")
    other.authority.revoke("client-x")
    (certificates.folder / "revoked.crl").write_text((other.folder / "revoked.crl").read_text())
    log = Log()

    live = _live(certificates.node("a"), log)

    assert log.events() == ["tls.list_rejected"]
    assert len(live.revocations) == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_list_is_taken_together_with_one_of_an_unknown_authority(
    certificates: Certificates, tmp_path: Path, *, is_first: bool
) -> None:
    """A node that trusts two authorities reports both lists to one that trusts one of them."""
    other = Certificates(tmp_path / "other")
    other.client("x")
    other.authority.revoke("client-x")
    live = _live(certificates.node("a"), Log())
    bad = _names(certificates.client("bad"))
    certificates.authority.revoke("client-bad")
    both = [other.folder / "revoked.crl", certificates.folder / "revoked.crl"]

    assert live.take_list("".join(file.read_text() for file in both[:: 1 if is_first else -1]))
    with pytest.raises(Rejected, match="revoked"):
        live.admit(*bad)


def test_revoked_stays_revoked_when_its_authority_goes(
    certificates: Certificates, tmp_path: Path
) -> None:
    """Its connection, on which the old authority vouched for it, may be open still."""
    other = Certificates(tmp_path / "other")
    bad = _names(other.client("bad"))
    other.authority.revoke("client-bad")
    settings = certificates.node("a")
    authorities = Path(settings["tls_ca"])
    newer = authorities.read_text()
    authorities.write_text(newer + (other.folder / "ca.crt").read_text())
    live = _live(settings, Log())
    live.take_list((other.folder / "revoked.crl").read_text())

    authorities.write_text(newer)

    assert live.look()
    assert live.revocations.numbers == ()
    with pytest.raises(Rejected, match="revoked"):
        live.admit(*bad)


def test_list_that_came_before_its_authority_counts_with_it(
    certificates: Certificates, tmp_path: Path
) -> None:
    """Two files are copied to a host in either order."""
    other = Certificates(tmp_path / "other")
    bad = _names(other.client("bad"))
    other.authority.revoke("client-bad")
    settings = certificates.node("a")
    live = _live(settings, Log())
    (certificates.folder / "revoked.crl").write_text((other.folder / "revoked.crl").read_text())
    assert not live.look()
    authorities = Path(settings["tls_ca"])

    authorities.write_text(authorities.read_text() + (other.folder / "ca.crt").read_text())

    assert live.look()
    with pytest.raises(Rejected, match="revoked"):
        live.admit(*bad)


def test_revoked_process_does_not_start(certificates: Certificates) -> None:
    """Every peer would refuse it, and none would say why."""
    settings = certificates.node("a")
    kept = {name: Path(path).read_bytes() for name, path in settings.items()}
    certificates.authority.revoke("node-a")
    for name, path in settings.items():
        Path(path).write_bytes(kept[name])
    Path(settings["tls_key"]).chmod(0o600)

    with pytest.raises(ConfigError, match=r"node-a.crt is revoked"):
        _live(settings, Log())


def test_process_knows_that_every_peer_refuses_it(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its health shows it: it serves no other host any more."""
    live = _live(certificates.node("a"), Log())
    assert live.own_problem == ""
    certificates.authority.revoke("node-a")
    live.take_list(certificates.revoked())

    assert live.own_problem == "this node's certificate is revoked"
    other = _live(certificates.node("b"), Log())
    monkeypatch.setattr("peercache.trust.files.time.time", lambda: other.files.not_after + 1)
    assert other.own_problem == "this node's certificate has expired"


def test_rollover_keeps_the_lists_of_authorities_that_stay(
    certificates: Certificates, tmp_path: Path
) -> None:
    """The list of one that is trusted no more goes with it."""
    new = Certificates(tmp_path / "new")
    both = tmp_path / "both" / "ca.crt"
    both.parent.mkdir()
    old_node, new_node = certificates.node("a"), new.node("a")
    both.write_text(Path(old_node["tls_ca"]).read_text() + Path(new_node["tls_ca"]).read_text())
    live = _live({**new_node, "tls_ca": str(both)}, Log())
    for each in (certificates, new):
        each.client("bad")
        each.authority.revoke("client-bad")
        assert live.take_list((each.folder / "revoked.crl").read_text())
    assert len(live.revocations) == 2

    both.write_text(Path(new_node["tls_ca"]).read_text())
    assert live.look()

    assert live.revocations.numbers == (1,)


def test_foreign_common_names_are_no_serial() -> None:
    """A certificate of another tool is refused by no number."""
    assert serial_of(common_name_of(2**159 - 1)) == 2**159 - 1
    assert serial_of("node a") == serial_of("") == 0


def test_an_authority_that_is_not_trusted_any_more_is_counted(
    certificates: Certificates, tmp_path: Path
) -> None:
    """A second one next to it is no certificate, and neither is a new certificate."""
    settings = certificates.node("a")
    other, ours = Certificates(tmp_path / "other"), Path(settings["tls_ca"]).read_text()
    theirs = (other.folder / "ca.crt").read_text()
    bundle = tmp_path / "bundle"
    bundle.write_text(ours)
    live = _live({**settings, "tls_ca": str(bundle)}, Log())

    seen = []
    for text in (ours + theirs, theirs + ours, ours):
        bundle.write_text(text)
        assert live.look()
        seen.append(live.authorities_dropped)

    assert seen == [0, 0, 1]


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
    reported: list[int] = []

    def follow(changed: LiveTls) -> None:
        reported.append(changed.files.serial)
        if len(reported) == 1:
            raise OSError(24, "Too many open files")

    live.on_change(follow)
    certificates.issue(CertificateRole.NODE, "a", is_renewal=True)

    with pytest.raises(OSError, match="Too many"):
        live.look()
    live.look()
    live.look()

    assert reported == [live.files.serial] * 2
