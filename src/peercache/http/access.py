"""Access: which client may read which page over HTTP, and the TLS of the HTTP port.

The role table is in `trust.rights`; here is what a connection proves about its client: its
certificate, a bearer token, or, on loopback, the uid of its process.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from collections.abc import Callable
from typing import Any, final

import attrs
import trio

from peercache.config.quantities import is_loopback, parse_address
from peercache.config.settings import Config
from peercache.errors import ConfigError, Rejected
from peercache.observability.log import WarnOnce
from peercache.observability.metrics import Metrics
from peercache.trust.files import (
    LOOK_S,
    LiveTls,
    TlsFiles,
    load_own_certificate,
    mark_of,
    read_secret,
)
from peercache.trust.rights import Watcher, may_read, watcher_of
from peercache.trust.sharing import NO_DESCRIPTORS, Sharing, is_on_loopback

TOKEN_CHARACTERS_MIN = 16
"""Shorter tokens can be guessed."""

NO_DESCRIPTORS_REASON = "descriptors"
"""The reason of a refusal that is independent of the client: ask again when the node has some."""


@attrs.frozen
class HttpClient:
    """What is known of the client of one connection.

    local, remote: numeric addresses and ports of the connection's ends.
    certificate:   what `ssl` reports about the client's certificate; None without one.
    """

    local: tuple[str, int]
    remote: tuple[str, int]
    is_encrypted: bool = False
    certificate: Any = None


@final
class Access:
    """Decides about each request, and counts and logs refusals."""

    def __init__(
        self,
        config: Config,
        *,
        sharing: Sharing,
        tls: LiveTls | None,
        metrics: Metrics,
        log: Any,
    ) -> None:
        """Take settings; raise ConfigError for a token file that cannot be used."""
        self._is_open = config.http_open
        self._is_trial = config.insecure
        self._sharing = sharing
        self._tls = tls
        self._refused = metrics.http_refused
        self._log = log
        self._warn_once = WarnOnce(log)
        self._token = _Token(config, log) if config.http_token_file else None
        self.ssl_context = None if tls is None else context_of(tls.files)
        if tls is not None:
            tls.on_change(self._renew)

    async def follow(self) -> None:
        """Follow changes of the token's file; return at once without a file."""
        while self._token is not None:
            await trio.sleep(LOOK_S)
            # A network file system may hang forever, and nothing else of the node with it.
            await trio.to_thread.run_sync(self._token.renew, abandon_on_cancel=True)

    def refusal(
        self, client: HttpClient, path: str, authorization: str = "", host: str = ""
    ) -> str:
        """Return why this page is not for the client, in words for it; "" where it is.

        authorization, host: the headers of these names, "" without one.
        Raises Rejected where the node cannot determine now who asks.
        """
        watchers, problem = self._watchers(client, authorization, host)
        if may_read(path, watchers, is_open=self._is_open):
            return ""
        reason, detail = (problem.reason, problem.detail) if problem else ("unauthorized", "")
        self.count(reason, client, detail)
        if problem and reason == NO_DESCRIPTORS_REASON:
            raise problem
        shown = (
            "this page requires the certificate of an operator or a node, or the bearer token of "
            "http_token_file"
        )
        return shown if not problem else f"{shown}; {problem.detail}"

    def count(self, reason: str, client: HttpClient, detail: str = "") -> None:
        """Count a refused request or connection, and log it once for each peer and reason."""
        self._refused.labels(reason).inc()
        self._warn_once(
            "http.request_refused",
            (client.remote[0], reason),
            peer=client.remote[0],
            reason=reason,
            detail=detail,
        )

    def _watchers(
        self, client: HttpClient, authorization: str, host: str
    ) -> tuple[frozenset[Watcher], Rejected | None]:
        """Return what the client has proved to be, and the first proof that failed."""
        proofs = (
            _proof(self._of_certificate, client),
            _proof(self._of_token, client, authorization),
            _proof(self._of_process, client, host),
            _proof(self._of_trial, client, host),
        )
        found = {proof for proof in proofs if isinstance(proof, Watcher)}
        problems = [proof for proof in proofs if isinstance(proof, Rejected)]
        return frozenset(found), problems[0] if problems else None

    def _of_certificate(self, client: HttpClient) -> Watcher | None:
        if client.certificate is None or self._tls is None:
            return None
        names = [
            name for kind, name in client.certificate.get("subjectAltName", ()) if kind == "URI"
        ]
        return watcher_of(self._tls.admit(client.certificate["serialNumber"], names))

    def _of_token(self, client: HttpClient, authorization: str) -> Watcher | None:
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        if not client.is_encrypted and not is_loopback(client.remote[0]):
            raise Rejected("token_in_clear", "a token travels over TLS only: make a new one")
        if self._token is None or not self._token.fits(given.strip()):
            raise Rejected("token", "the token is not this node's")
        return Watcher.TOKEN

    def _of_process(self, client: HttpClient, host: str) -> Watcher | None:
        if not is_on_loopback(client.local, client.remote):
            return None
        _check_host(client, host)
        problem = self._sharing.tcp_peer_problem(client.local, client.remote)
        if problem:
            reason = NO_DESCRIPTORS_REASON if problem == NO_DESCRIPTORS else "owner"
            raise Rejected(reason, problem)
        return Watcher.SHARER

    def _of_trial(self, client: HttpClient, host: str) -> Watcher | None:
        if not self._is_trial:
            return None
        _check_host(client, host)
        return Watcher.TRIAL

    def _renew(self, tls: LiveTls) -> None:
        try:
            self.ssl_context = context_of(tls.files)
        except ssl.SSLError as error:
            self._log.error("http.certificate_rejected", problem=str(error))


def _check_host(client: HttpClient, host: str) -> None:
    """Raise Rejected for a Host header that a web page of another site may have caused.

    A browser is a process of the user's too: a web page whose name is made to resolve to this host
    would read what the user may read (DNS rebinding).
    """
    if host and is_on_loopback(client.local, client.remote) and not _names_loopback(host):
        raise Rejected("host", "on this host ask at 127.0.0.1, [::1] or localhost")


def _names_loopback(host: str) -> bool:
    """Return whether a Host header names this host by a name that no DNS server gives."""
    try:
        name, _ = parse_address(host, default_port=0)
    except ValueError:
        return False
    return is_loopback(name.lower())


def _proof(prove: Callable[..., Watcher | None], *facts: object) -> Watcher | Rejected | None:
    """Return what the facts prove, or why they prove nothing."""
    proved: Watcher | Rejected | None
    try:
        proved = prove(*facts)
    except Rejected as error:
        proved = error
    return proved


class _Token:
    """The bearer token of a file, and its changes."""

    def __init__(self, config: Config, log: Any) -> None:
        self._config = config
        self._log = log
        self._mark = mark_of(config.http_token_file)
        self._digest = self._read()

    def renew(self) -> None:
        """Read the file again if it has changed. May block; never raises."""
        mark = mark_of(self._config.http_token_file)
        if mark == self._mark:
            return
        self._mark = mark
        try:
            self._digest = self._read()
        except ConfigError as error:
            # The old one holds until the file is right again.
            self._log.error("http.token_rejected", problem=str(error))

    def fits(self, given: str) -> bool:
        """Return whether a token is the one that was read last."""
        # Digests of one length: a comparison must not reveal how long the token is.
        return hmac.compare_digest(_digest(given), self._digest)

    def _read(self) -> bytes:
        token = read_secret("http_token_file", self._config.http_token_file, self._config).strip()
        if len(token) < TOKEN_CHARACTERS_MIN or not token.isprintable() or " " in token:
            raise ConfigError(
                "http_token_file",
                f"{self._config.http_token_file} must contain one token of at least "
                f"{TOKEN_CHARACTERS_MIN} characters: `openssl rand -hex 32` makes one",
            )
        return _digest(token)


def context_of(files: TlsFiles) -> ssl.SSLContext:
    """Return the settings of TLS 1.3, in which a client may have a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A scraper may have a token instead; a certificate that is shown must be right.
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_verify_locations(cadata=files.ca_pem)
    load_own_certificate(context, files)
    return context


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
