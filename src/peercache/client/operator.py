"""An operator's connection to a node: where it is, as whom, and questions with answers.

The command line operates by it, and programs that follow what nodes hold (`client.following`).
"""

from __future__ import annotations

import itertools
import os
import random
import select
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, final

import attrs

from peercache.config.quantities import DEFAULT_CONTROL_PORT, parse_address
from peercache.config.settings import Config
from peercache.errors import (
    ConfigError,
    DeadlineExceeded,
    PeerUnreachable,
    Rejected,
    RemoteProtocolError,
)
from peercache.model.ids import new_client_id
from peercache.model.status import MemberStatus, Status, decoded_status, decoded_statuses
from peercache.net.peers import Gate
from peercache.net.sockets import Dialer, UnusableAddress, reached
from peercache.net.tls import ControlTls, control_url
from peercache.node.addresses import home_folder, home_prefix
from peercache.observability.log import get_logger
from peercache.trust.files import LiveTls, TlsFiles, with_cluster
from peercache.trust.sharing import Sharing
from peercache.wire.codec import WrongCluster, decode, encode
from peercache.wire.envelope import WIRE_VERSION, WIRE_VERSION_OLDEST, Envelope
from peercache.wire.messages.declared import Message
from peercache.wire.messages.operations import ClusterAsked, ClusterTold, StatusAsked, StatusTold
from peercache.wire.messages.session import OPERATOR, Hello, Refused, SayHello, Welcome

TIMEOUT_S = 5.0
"""How long a node may take to answer; to ask all members takes it a second."""

CONNECT_S = 2.0
"""How long an address may take to be reached."""

SLICE_S = 0.1

TURN_S = 0.005

Kind = TypeVar("Kind")


@attrs.frozen(kw_only=True)
class Target:
    """Which node is asked, and as whom. has_cluster: whether the user named the cluster."""

    at: str
    config: Config
    timeout_s: float
    has_cluster: bool

    @classmethod
    def of(
        cls,
        *,
        at: str | None = None,
        timeout_s: float = TIMEOUT_S,
        config: str | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: str | None,
    ) -> Target:
        """Make it of these settings; raise ConfigError.

        at:     a control address, or ipc://PATH of a home; None: a node of this host.
        config: a TOML file; settings: such as cluster, tls_ca, tls_cert and tls_key.
        """
        found = os.environ if environment is None else environment
        loaded = Config.load(settings, file=config, environment=found)
        default = Config.load({}).cluster
        address = _written(at) if at else loaded.home or _here(loaded)
        return cls(
            at=address,
            config=loaded,
            timeout_s=timeout_s,
            has_cluster=loaded.cluster != default,
        )

    @property
    def is_home(self) -> bool:
        """Whether it is a node's home address."""
        return self.at.startswith("ipc://")

    def attached(self) -> Config:
        """Return the settings of a client at this home, of the cluster that the node is of.

        Raises PeerUnreachable, Rejected or DeadlineExceeded.
        """
        with Operator(self) as operator:
            cluster = operator.cluster
        return attrs.evolve(
            self.config,
            home=self.at,
            cluster=cluster,
            op_timeout_s=self.timeout_s,
            exists_timeout_s=self.timeout_s,
        )


def _written(at: str) -> str:
    """Return an address as HOST:PORT or ipc://PATH; raise ConfigError."""
    if at.startswith("ipc://"):
        return at
    try:
        host, port = parse_address(at, default_port=DEFAULT_CONTROL_PORT)
    except ValueError as error:
        raise ConfigError("at", str(error)) from error
    return f"[{host}]:{port}" if ":" in host else f"{host or '127.0.0.1'}:{port}"


def homes_here() -> list[str]:
    """Return the home addresses of this user's nodes on this host that answer."""
    sockets = sorted(home_folder().glob("peercache-*.ipc"))
    return [f"ipc://{path}" for path in sockets if reached(f"ipc://{path}", CONNECT_S)]


def _here(config: Config) -> str:
    """Return the address of a node of this host, the default port where none has a home."""
    homes = homes_here()
    named = [home for home in homes if Path(home).name.startswith(home_prefix(config.cluster))]
    return next(iter(named or homes), f"127.0.0.1:{DEFAULT_CONTROL_PORT}")


@final
class Operator:
    """A connection to one node, as an operator; a context manager."""

    def __init__(self, target: Target) -> None:
        """Take the certificates; raise ConfigError for wrong ones."""
        self._target = target
        # A home address is clear text: this process proves there who it is by its user.
        files = None if target.is_home else TlsFiles.load(target.config, is_operator=True)
        live = None
        if files is not None:
            live = LiveTls(target.config, files, is_node=False, log=get_logger())
        self._tls = None if files is None else ControlTls(files)
        config = with_cluster(target.config, files)
        self.cluster = config.cluster
        self._may_learn = self._tls is None and not target.has_cluster
        self._gate = Gate(
            Sharing.of(share_group=config.share_group, share_uids=config.share_uids), live
        )
        self._identity = new_client_id(random.SystemRandom())
        self._numbers = itertools.count(2)
        self._refused_peer: Rejected | None = None
        self._has_lost = False
        self._dialer: Dialer | None = None
        self.welcome: Welcome | None = None

    def __enter__(self) -> Operator:
        """Connect; raise PeerUnreachable, Rejected or DeadlineExceeded."""
        try:
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the connection."""
        self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._dialer is not None:
            self._dialer.close()
            self._dialer = None

    def status(self, *, detail: bool = False) -> Status:
        """Return how the node is."""
        told = self.ask(StatusAsked(0, detail), StatusTold)
        return _read(decoded_status, told.status)

    def statuses(self, *, detail: bool = False) -> list[MemberStatus]:
        """Return how every member is, as the node gathers it, by name."""
        found: list[MemberStatus] = []
        after, more = 0, True
        while more:
            told = self.ask(ClusterAsked(0, detail, after), ClusterTold)
            part = _read(decoded_statuses, told.statuses)
            if not part and told.more:
                raise RemoteProtocolError("a portion without statuses")
            found += part
            more = told.more
            after = int(part[-1].status.incarnation or "0", 16) if part else 0
        return sorted(found, key=lambda member: _by_name(member.status.name))

    def ask(self, question: Message, kind: type[Kind], *, within_s: float | None = None) -> Kind:
        """Return the answer of this kind; raise Rejected, PeerUnreachable or DeadlineExceeded."""
        assert self._dialer is not None, "asked within `with`"
        assert self.welcome is not None, "the node has answered the Hello"
        if question.declared.since > self.welcome.wire:
            raise Rejected(
                "wire_version",
                f"{self._target.at} runs an older version, which cannot answer this: upgrade it, "
                "or name another node with --at",
            )
        number = next(self._numbers)
        numbered: Any = attrs.evolve(question, request=number)  # type: ignore[misc]
        timeout_s = within_s or self._target.timeout_s
        until = time.monotonic() + timeout_s
        self._say(numbered, until)
        while True:
            answer = self._hear(until)
            if answer is None:
                raise DeadlineExceeded(f"the answer of {self._target.at}", timeout_s)
            if isinstance(answer, SayHello):
                self._greet(until)
                self._say(numbered, until)
            elif isinstance(answer, Refused) and answer.request in (0, number):
                raise self._told_why(answer)
            elif isinstance(answer, kind) and getattr(answer, "request", 0) == number:
                return answer

    # --- the connection ---------------------------------------------------------------------------

    def _connect(self) -> None:
        until = time.monotonic() + self._target.timeout_s
        url = self._url()
        if reached(url, min(CONNECT_S, self._target.timeout_s)) is False:
            if url.startswith("tcp://") and _listens(url):
                raise PeerUnreachable(
                    f"{self._target.at} in clear text; {_WANTS_CERTIFICATES}; or this is no "
                    "control address, such as that of /metrics"
                )
            raise PeerUnreachable(f"{self._target.at}: nothing listens there; {_HINT}")
        try:
            self._dialer = Dialer(url, tls=self._tls, accepts=self._accepts, on_removed=self._lost)
        except UnusableAddress as error:
            raise PeerUnreachable(f"{self._target.at}: {error}") from error
        self._greet(until)

    def _url(self) -> str:
        """Return what to dial; raise PeerUnreachable for a name that no address belongs to."""
        at = self._target.at
        if self._target.is_home:
            return at
        host, port = parse_address(at)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise PeerUnreachable(f"{at}: the name {host} does not resolve") from error
        numeric = str(found[0][4][0])
        numeric = f"[{numeric}]" if ":" in numeric else numeric
        return control_url(f"{numeric}:{port}", self._tls)

    def _accepts(self, peer: Any) -> bool:
        """Judge the process that has answered; comes on a thread of nng."""
        try:
            self._gate.check_node(peer, None)
        except Rejected as rejected:
            self._refused_peer = rejected
            return False
        return True

    def _lost(self) -> None:
        """Note that a connection has ended; comes on a thread of nng."""
        self._has_lost = True

    def _look_whether_it_left(self) -> None:
        """Raise PeerUnreachable where the node has ended: no answer comes from it any more."""
        if self._has_lost and self.welcome is not None and reached(self._url(), CONNECT_S) is False:
            raise PeerUnreachable(f"{self._target.at}: nothing listens there any more; {_HINT}")

    def _greet(self, until: float) -> None:
        self._say(self._hello(), until)
        while True:
            try:
                answer = self._hear(until)
            except WrongCluster as error:
                if not self._may_learn or not error.cluster:
                    raise Rejected(
                        "cluster",
                        f"{self._target.at} is of the cluster {error.cluster!r}, and not of "
                        f"{self.cluster!r}: name it with --cluster",
                    ) from error
                # Without certificates its name proves nothing, and the address says which one.
                self.cluster, self._may_learn = error.cluster, False
                self._say(self._hello(), until)
                continue
            if answer is None:
                raise self._silence()
            if isinstance(answer, Refused):
                raise self._told_why(answer)
            if isinstance(answer, Welcome):
                self.welcome = answer
                return

    def _hello(self) -> Hello:
        return Hello(
            1, WIRE_VERSION_OLDEST, WIRE_VERSION, self.cluster, is_node=False, granule=0,
            name="", nonce=b"", namespace="", geometry=OPERATOR, lock="", secret=b"",
        )  # fmt: skip

    def _silence(self) -> Exception:
        """Return why a node said nothing at all."""
        if self._refused_peer is not None:
            return self._refused_peer
        hint = (
            f"it may be stopped, or {_WANTS_CERTIFICATES}"
            if self._tls is None
            else "it may be stopped, refuse this certificate, or have none: see its log"
        )
        hint = "it may be stopped" if self._target.is_home else hint
        return PeerUnreachable(f"{self._target.at} within {self._target.timeout_s:g} s; {hint}")

    def _told_why(self, refused: Refused) -> Rejected:
        detail = refused.detail
        if refused.reason == "role":
            detail += (
                "; an operator's certificate is needed (peercache certs issue DIR --operator NAME)"
                if self._tls is not None
                else "; ask as the user of the node, or over tcp with an operator's certificate"
            )
        return Rejected(refused.reason, f"{self._target.at}: {detail}")

    def _say(self, message: Message, until: float) -> None:
        assert self._dialer is not None, "connected"
        raw = encode(Envelope(self._identity, 0, message), cluster=self.cluster)
        while not self._dialer.send(raw):
            if time.monotonic() >= until or self._refused_peer is not None:
                raise self._silence()
            self._look_whether_it_left()
            time.sleep(TURN_S)

    def _hear(self, until: float) -> Message | None:
        """Return the next message; None once the time is up, or the peer is another one."""
        assert self._dialer is not None, "connected"
        poll = select.poll()
        poll.register(self._dialer.receive_fd, select.POLLIN)
        while True:
            raw = self._dialer.receive()
            if raw is not None:
                return decode(raw, cluster=self.cluster).message
            left_s = until - time.monotonic()
            if left_s <= 0 or self._refused_peer is not None:
                return None
            self._look_whether_it_left()
            poll.poll(1000 * min(left_s, SLICE_S))


def _listens(url: str) -> bool:
    """Return whether a process accepts connections at tcp://HOST:PORT, whatever it speaks."""
    try:
        socket.create_connection(parse_address(url.removeprefix("tcp://")), CONNECT_S).close()
    except OSError:
        return False
    return True


_WANTS_CERTIFICATES = "it wants certificates: give --tls-ca, --tls-cert and --tls-key"
_HINT = "start a node there, or name another one with --at HOST:PORT"


def _read(decoded: Callable[[bytes], Kind], raw: bytes) -> Kind:
    try:
        return decoded(raw)
    except ValueError as error:
        raise RemoteProtocolError(f"no status: {error}") from error


def _by_name(name: str) -> tuple[str, int]:
    """Return what names are sorted by: ports as numbers."""
    host, _, port = name.rpartition(":")
    return host, int(port) if port.isdigit() else 0
