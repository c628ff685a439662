"""Who reads which page over HTTP: as a table, over real sockets, plain and TLS."""

from __future__ import annotations

import datetime as dt
import os
import socket
import ssl
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import trio

from peercache.config.quantities import parse_address
from peercache.config.settings import Config
from peercache.errors import ConfigError
from peercache.http import access as access_module
from peercache.http.access import Access, HttpClient
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics, totals_of
from peercache.trust.files import LiveTls
from peercache.trust.identity import CertificateRole, Identity
from peercache.trust.rights import CHANGING_PAGES, Watcher, may_read
from peercache.trust.sharing import Sharing
from tests.certificates import Certificates
from tests.descriptors import no_descriptors
from tests.pace import ends_within
from tests.unit.http.http_node import ask, served

TOKEN = "a-token-of-some-length-42"
PAGES = ("/", "/healthz", "/metrics", "/nothing")
FAR = ("10.0.0.9", 40_000)
HERE = ("127.0.0.1", 40_000)
LOCAL = ("10.0.0.1", 31_997)
ANOTHER_UID = 54_321


@pytest.fixture(name="certificates")
def _certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "ca")


def every_client_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every connection for one beyond loopback."""
    monkeypatch.setattr(access_module, "is_loopback", lambda _: False)
    monkeypatch.setattr(access_module, "is_on_loopback", lambda *_: False)


def _live(settings: dict[str, str]) -> LiveTls:
    live = LiveTls.open(Config.load(settings), is_node=True, log=get_logger())
    assert live is not None
    return live


def _context(settings: dict[str, str] | None, ca: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    if settings is not None:
        context.load_cert_chain(settings["tls_cert"], settings["tls_key"])
    return context


def _reported(certificates: Certificates, role: CertificateRole, name: str = "x") -> dict[str, Any]:
    """Return what `ssl` reports of a certificate."""
    uri = Identity(certificates.authority.cluster, role, name).uri()
    return {"subjectAltName": (("DNS", "peercache"), ("URI", uri)), "serialNumber": "0A"}


def test_table_of_pages_and_watchers() -> None:
    """A stranger reads two pages, and those only where a person opened them."""
    every = frozenset(Watcher)
    for path in PAGES:
        for watcher in every:
            assert may_read(path, frozenset({watcher}), is_open=False)
        assert not may_read(path, frozenset(), is_open=False)
        assert may_read(path, frozenset(), is_open=True) is (path in ("/healthz", "/metrics"))


@pytest.mark.parametrize("path", sorted(CHANGING_PAGES))
def test_hints_are_for_those_who_may_be_operators_without_a_certificate(path: str) -> None:
    """A token is that of a scraper, and a certificate may be limited to namespaces."""
    allowed = {watcher for watcher in Watcher if may_read(path, frozenset({watcher}), is_open=True)}

    assert allowed == {Watcher.SHARER, Watcher.TRIAL}
    assert not may_read(path, frozenset(), is_open=True)


@pytest.mark.parametrize("http_open", [False, True])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("stranger", ""),
        ("operator", "all"),
        ("node", "all"),
        ("client", "role"),
        ("foreign cluster", "cluster"),
        ("token over tls", "all"),
        ("token in clear", "token_in_clear"),
        ("wrong token", "token"),
        ("basic", ""),
    ],
)
def test_far_client_reads_what_it_has_proved(
    certificates: Certificates, tmp_path: Path, kind: str, expected: str, http_open: bool
) -> None:
    """Each refusal is counted by its reason, and reveals nothing of the node."""
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    settings = {
        **certificates.node("a"), "http_open": str(http_open), "http_token_file": str(token)
    }  # fmt: skip
    metrics = Metrics()
    access = Access(
        Config.load(settings), sharing=Sharing.of(), tls=_live(settings), metrics=metrics,
        log=get_logger(),
    )  # fmt: skip
    certificate = {
        "operator": _reported(certificates, CertificateRole.OPERATOR),
        "node": _reported(certificates, CertificateRole.NODE),
        "client": _reported(certificates, CertificateRole.CLIENT),
        "foreign cluster": {
            **_reported(certificates, CertificateRole.NODE),
            "subjectAltName": (("URI", "peercache://other/operator/x"),),
        },
    }.get(kind)
    authorization = {
        "token over tls": f"Bearer {TOKEN}",
        "token in clear": f"Bearer {TOKEN}",
        "wrong token": f"Bearer {TOKEN}x",
        "basic": f"Basic {TOKEN}",
    }.get(kind, "")
    client = HttpClient(LOCAL, FAR, is_encrypted=kind != "token in clear", certificate=certificate)

    for path in PAGES:
        refused = access.refusal(client, path, authorization)
        is_open = http_open and path in ("/healthz", "/metrics")
        assert bool(refused) is not (is_open or expected == "all"), path
        assert TOKEN not in refused
    counted = {reason: n for reason, n in totals_of(metrics.http_refused).items() if n}
    shown = 2 if http_open else 4
    assert counted == ({} if expected == "all" else {expected or "unauthorized": shown})


def test_refusal_is_logged_with_what_is_wrong(certificates: Certificates) -> None:
    """The reason `role` alone does not say which certificate a person has to use."""
    settings = certificates.node("a")
    log = Mock()
    access = Access(
        Config.load(settings), sharing=Sharing.of(), tls=_live(settings), metrics=Metrics(), log=log
    )
    certificate = _reported(certificates, CertificateRole.CLIENT)

    access.refusal(HttpClient(LOCAL, FAR, is_encrypted=True, certificate=certificate), "/", "")

    (call,) = log.warning.call_args_list
    assert call.kwargs["reason"] == "role"
    assert call.kwargs["detail"] == "a client's certificate opens no page"


def test_process_of_another_uid_on_this_host_is_a_stranger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loopback is no proof: every user of the host can connect."""
    monkeypatch.setattr("peercache.trust.sharing.uid_of_tcp_peer", lambda *_: ANOTHER_UID)
    metrics = Metrics()

    def refusal(**settings: Any) -> str:
        config = Config.load(settings)
        sharing = Sharing.of(share_uids=config.share_uids)
        access = Access(config, sharing=sharing, tls=None, metrics=metrics, log=get_logger())
        return access.refusal(HttpClient(HERE, HERE), "/", "")

    assert f"uid {ANOTHER_UID}" in refusal()
    assert totals_of(metrics.http_refused) == {"owner": 1.0}
    assert refusal(share_uids=str(ANOTHER_UID)) == ""
    assert refusal(insecure=True) == ""


@pytest.mark.parametrize("insecure", [False, True])
def test_a_web_page_whose_name_resolves_to_this_host_reads_nothing(insecure: bool) -> None:
    """DNS rebinding: the browser is a process of a user who may read, and so is a trial's."""
    config = Config.load({"insecure": insecure})
    access = Access(
        config, sharing=Sharing.of_config(config), tls=None, metrics=Metrics(), log=get_logger()
    )
    client = HttpClient(HERE, HERE)

    for host in ("evil.example:31997", "evil.example", "127.0.0.1.evil.example"):
        assert "127.0.0.1, [::1] or localhost" in access.refusal(client, "/metrics", host=host)
    if insecure:
        for host in ("", "127.0.0.1:31997", "localhost", "[::1]:31997"):
            assert access.refusal(client, "/metrics", host=host) == ""
        assert access.refusal(HttpClient(LOCAL, FAR), "/", host="node-a.example:31997") == ""


async def test_own_process_reads_everything_on_loopback() -> None:
    """The kernel reports whose connection it is."""
    async with served() as address:
        assert [(await ask(address, path))[0] for path in PAGES] == [200, 200, 200, 404]


async def test_a_node_without_descriptors_reports_it_and_admits_no_client() -> None:
    """A 401 would send a person to look for rights that are not missing."""
    metrics = Metrics()
    async with served(metrics=metrics) as address:
        # Connected, but not accepted yet: that takes the one that is left.
        probe = trio.socket.from_stdlib_socket(socket.create_connection(parse_address(address)))
        with probe, no_descriptors(left=1):
            await probe.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with trio.fail_after(20):
                answer = await probe.recv(4096)
                while chunk := await probe.recv(4096):
                    answer += chunk

        assert (await ask(address, "/metrics"))[0] == 200
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"raise its limit" in answer
    assert totals_of(metrics.http_refused) == {"descriptors": 1.0}


async def test_one_port_speaks_clear_text_and_tls(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A probe has no certificate, a person has one, a scraper has a token."""
    # Every client of this test comes from this host; the far ones are what it is about.
    every_client_is_far(monkeypatch)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    settings = {
        **certificates.node("a"), "http_open": "true", "http_token_file": str(token)
    }  # fmt: skip
    ca = settings["tls_ca"]
    bare, operator = _context(None, ca), _context(certificates.operator("ann"), ca)
    engine = _context(certificates.client("engine"), ca)

    async with served(settings=settings, tls=_live(settings)) as address:
        assert [(await ask(address, path))[0] for path in PAGES] == [401, 200, 200, 401]
        assert [(await ask(address, p, context=bare))[0] for p in PAGES] == [401, 200, 200, 401]
        assert [(await ask(address, p, context=engine))[0] for p in PAGES] == [401, 200, 200, 401]
        assert [(await ask(address, p, context=operator))[0] for p in PAGES] == [200, 200, 200, 404]
        with_token = [(await ask(address, p, context=bare, token=TOKEN))[0] for p in PAGES]
        assert with_token == [200, 200, 200, 404]
        status, body = await ask(address, "/", token=TOKEN)
        assert (status, "make a new one" in body) == (401, True)


async def test_without_tls_a_far_client_reads_probes_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And without `http_open` nothing."""
    every_client_is_far(monkeypatch)

    async with served() as closed, served(settings={"http_open": True}) as opened:
        assert [(await ask(closed, path))[0] for path in PAGES] == [401] * 4
        assert [(await ask(opened, path))[0] for path in PAGES] == [401, 200, 200, 401]


@pytest.mark.parametrize("kind", ["foreign", "expired", "old protocol", "half", "noise"])
async def test_handshake_that_fails_is_counted_and_does_no_harm(
    certificates: Certificates, tmp_path: Path, kind: str
) -> None:
    """A certificate that is shown must be right, also where none is needed."""
    settings = {**certificates.node("a"), "http_open": "true"}
    ca, metrics = settings["tls_ca"], Metrics()
    if kind == "foreign":
        context = _context(Certificates(tmp_path / "other").operator("ann"), ca)
    elif kind == "expired":
        expired = certificates.issue(
            CertificateRole.OPERATOR, "old", lifetime=dt.timedelta(minutes=-1)
        )
        context = _context(expired, ca)
    else:
        context = _context(None, ca)
        context.maximum_version = ssl.TLSVersion.TLSv1_2

    async with served(settings=settings, tls=_live(settings), metrics=metrics) as address:
        if kind in ("half", "noise"):
            stream = await trio.open_tcp_stream(*parse_address(address))
            await stream.send_all(b"\x16\x03\x01" if kind == "half" else b"\x16" + b"x" * 500)
            await stream.send_eof()
            assert b"HTTP" not in bytes(await stream.receive_some())
            await stream.aclose()
        else:
            with pytest.raises((trio.BrokenResourceError, IndexError)):
                await ask(address, "/healthz", context=context)
        assert (await ask(address, "/healthz"))[0] == 200
        await trio.testing.wait_all_tasks_blocked(0.05)

    assert totals_of(metrics.http_refused) == {"handshake": 1.0}


async def test_renewed_and_revoked_certificates_count_at_once(certificates: Certificates) -> None:
    """New connections get the new certificate; a revoked operator is a stranger."""
    settings = certificates.node("a")
    operator = _context(certificates.operator("ann"), settings["tls_ca"])
    live = _live(settings)
    asker_is_far = pytest.MonkeyPatch()
    every_client_is_far(asker_is_far)

    async def serial(address: str) -> int:
        stream = trio.SSLStream(
            await trio.open_tcp_stream(*parse_address(address)), operator,
            server_hostname="peercache", https_compatible=True,
        )  # fmt: skip
        await stream.do_handshake()
        reported: Any = stream.getpeercert()
        await stream.aclose()
        return int(reported["serialNumber"], 16)

    with asker_is_far.context():
        async with served(settings=settings, tls=live) as address:
            before = await serial(address)
            assert (await ask(address, "/", context=operator))[0] == 200
            certificates.issue(CertificateRole.NODE, "a", is_renewal=True)
            certificates.authority.revoke("operator-ann")
            assert live.look()

            assert before != await serial(address) == live.files.serial
            status, body = await ask(address, "/", context=operator)
            assert (status, "is revoked" in body) == (401, True)
    asker_is_far.undo()


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        (TOKEN, 0o644, "mode 0644"),
        (TOKEN, 0o640, "mode 0640"),
        ("short", 0o600, "at least 16"),
        ("", 0o600, "at least 16"),
        ("two tokens on one line", 0o600, "one token"),
        (None, 0, "cannot read"),
    ],
)
def test_wrong_token_file_is_refused_at_the_start(
    tmp_path: Path, content: str | None, mode: int, problem: str
) -> None:
    """The error names the file, and never what it holds."""
    token = tmp_path / "token"
    if content is not None:
        token.write_text(content)
        token.chmod(mode)
    config = Config.load({"http_token_file": str(token)})

    with pytest.raises(ConfigError, match="token") as caught:
        Access(config, sharing=Sharing.of(), tls=None, metrics=Metrics(), log=get_logger())

    assert problem in str(caught.value)
    assert not content or content not in str(caught.value)


async def test_changed_token_counts_soon_and_a_file_that_hangs_stops_nothing(
    certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that becomes wrong keeps the old token."""
    monkeypatch.setattr(access_module, "LOOK_S", 0.01)
    every_client_is_far(monkeypatch)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    second, third = "another-token-of-some-length", "a-third-token-of-some-length"
    settings = {**certificates.node("a"), "http_token_file": str(token)}
    context = _context(None, settings["tls_ca"])

    async with served(settings=settings, tls=_live(settings)) as address:

        async def opens(reported: str) -> bool:
            return (await ask(address, "/metrics", token=reported, context=context))[0] == 200

        async def replaced(reported: str) -> None:
            with ends_within():
                while not await opens(reported):
                    pass

        assert await opens(TOKEN)
        token.write_text(second)
        await replaced(second)
        assert not await opens(TOKEN)
        token.write_text("x")
        await trio.sleep(0.1)
        assert await opens(second)
        token.unlink()
        # An open of it waits for a writer, as one on a file server that hangs does.
        os.mkfifo(token, 0o600)
        await trio.sleep(0.1)
        assert await opens(second)
        writer = await trio.to_thread.run_sync(token.open, "w")
        token.unlink()
        token.write_text(third)
        token.chmod(0o600)
        writer.close()
        await replaced(third)
