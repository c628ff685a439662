"""An operator's connection to a node: its address, the operator's identity, requests and answers.

The command line uses it, and so do programs that follow what nodes hold (`client.following`).
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Mapping
from typing import TypeVar, final

import attrs

from peercache.config.contexts import AT, context_named
from peercache.config.home import default_home, nearest_home
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
from peercache.net.breaker import Breakers
from peercache.net.peers import ControlTls, Gate, control_url
from peercache.net.requests import Asker
from peercache.net.sockets import local_path, reached
from peercache.observability.log import get_logger
from peercache.trust.files import LiveTls, TlsFiles, with_cluster
from peercache.trust.sharing import Sharing
from peercache.wire.envelope import UNKNOWN_CLUSTER, WIRE_VERSION, WIRE_VERSION_OLDEST
from peercache.wire.messages.declared import Message
from peercache.wire.messages.membership import (
    ReportCluster,
    ReportStatus,
    RequestCluster,
    RequestStatus,
)
from peercache.wire.messages.session import OPERATOR, Hello, Refused, Welcome

TIMEOUT_S = 5.0
"""How long a node may take to answer; asking all members takes it a second."""

CONNECT_S = 2.0
"""How long an address may take to be reached."""

SLICE_S = 0.1
"""Longest wait between two checks of a connection: a program may follow a hundred nodes, each with
a request that waits for changes."""

TURN_S = 0.005
"""Pause between the end of a connection and the next Hello."""

Kind = TypeVar("Kind")


@attrs.frozen(kw_only=True)
class Target:
    """The node to ask, and the identity to use.

    at:          HOST:PORT of its control plane, or ipc://PATH of its home.
    timeout_s:   how long it may take to answer, in seconds.
    has_cluster: whether the user named the cluster.
    is_named:    whether the user named the address.
    context:     the context that the address is from; "" if it is from elsewhere.
    """

    at: str
    config: Config
    timeout_s: float
    has_cluster: bool
    is_named: bool = True
    context: str = ""

    @classmethod
    def of(
        cls,
        *,
        at: str | None = None,
        timeout_s: float = TIMEOUT_S,
        config: str | None = None,
        context: str | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: str | None,
    ) -> Target:
        """Create a target from settings.

        at:        HOST:PORT of a control plane, or ipc://PATH of a home; None: a node of this host.
        timeout_s: how long the node may take to answer, in seconds.
        config:    the path of a TOML file with settings.
        environment: variables with settings (`PEERCACHE_…`); None: those of this process.
        context:   the name of a context of this user, which all others override.
        settings:  override both: cluster, tls_ca, tls_cert, tls_key, insecure …

        Raises ConfigError for an unknown name, and for a value that cannot be used.
        """
        found = os.environ if environment is None else environment
        named = context_named(context, found) if context else {}
        of_context = named.pop(AT, None)
        loaded = Config.load(settings, file=config, environment=found, context=named)
        default = Config.load({}).cluster
        is_of_context = of_context is not None and not (at or loaded.home)
        at = of_context if is_of_context else at
        address = _written(at) if at else loaded.home or _here()
        return cls(
            at=address,
            config=loaded,
            timeout_s=timeout_s,
            has_cluster=loaded.cluster != default,
            is_named=bool(at or loaded.home),
            context=context if context and is_of_context else "",
        )

    @property
    def is_home(self) -> bool:
        """Whether it is a node's home address."""
        return self.at.startswith("ipc://")

    def attached(self) -> Config:
        """Return the settings of a client at this home address, with the node's cluster.

        Raises PeerUnreachable, Rejected or DeadlineExceeded.
        """
        with Operator(self) as operator:
            cluster = operator.cluster
        return attrs.evolve(
            self.config,
            home=self.at,
            embedded=False,
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
    """Return the default home addresses of this host at which a node answers, this user's first."""
    homes = dict.fromkeys((default_home(), nearest_home()))
    return [home for home in homes if reached(home, CONNECT_S)]


def _here() -> str:
    """Return the address of a node of this host; the default port if none has a home address."""
    return next(iter(homes_here()), f"127.0.0.1:{DEFAULT_CONTROL_PORT}")


@final
class Operator:
    """A connection to one node, as an operator; a context manager.

    Entering it connects; raises PeerUnreachable, Rejected or DeadlineExceeded. If the connection
    ends, the next call connects again. For one thread at a time.

    cluster: the name of the node's cluster, once it is connected.
    """

    def __init__(self, target: Target) -> None:
        """Load the certificates; raise ConfigError for wrong ones."""
        self._target = target
        # A home address is clear text: there, the user of this process is its identity.
        files = None if target.is_home else TlsFiles.load(target.config, is_operator=True)
        live = None
        if files is not None:
            live = LiveTls(target.config, files, is_node=False, log=get_logger())
        self._tls = None if files is None else ControlTls(files)
        config = with_cluster(target.config, files)
        self.cluster = config.cluster
        # Without certificates the cluster's name proves nothing, and the address identifies it.
        self._may_learn = self._tls is None and not target.has_cluster
        self._sharing = Sharing.of_config(config)
        self._gate = Gate(self._sharing, live)
        self._identity = new_client_id(random.SystemRandom())
        self._url = ""
        self._refusal: Exception | None = None
        self._asker = self._new_asker()
        self.welcome: Welcome | None = None

    def __enter__(self) -> Operator:
        """Connect; raise PeerUnreachable, Rejected or DeadlineExceeded."""
        try:
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._asker.close()

    def status(self, *, detail: bool = False) -> Status:
        """Return the status of the node.

        detail: with its threads, environment and settings; secrets are masked.

        Raises Rejected, PeerUnreachable, DeadlineExceeded or RemoteProtocolError.
        """
        reply = self.ask(RequestStatus(0, detail), ReportStatus)
        return _read(decoded_status, reply.status)

    def statuses(self, *, detail: bool = False) -> list[MemberStatus]:
        """Return the status of every member, as the node collects it, sorted by name.

        A member that does not answer the node within a second is listed without its status.

        detail: as with `status`, of every member.

        Raises Rejected, PeerUnreachable, DeadlineExceeded or RemoteProtocolError.
        """
        found: list[MemberStatus] = []
        after, more = 0, True
        while more:
            reply = self.ask(RequestCluster(0, detail, after), ReportCluster)
            part = _read(decoded_statuses, reply.statuses)
            if not part and reply.more:
                raise RemoteProtocolError("a portion without statuses")
            found += part
            more = reply.more
            after = int(part[-1].status.incarnation or "0", 16) if part else 0
        return sorted(found, key=lambda member: _by_name(member.status.name))

    def ask(self, question: Message, kind: type[Kind], *, within_s: float | None = None) -> Kind:
        """Return the answer of this kind; raise Rejected, PeerUnreachable or DeadlineExceeded."""
        timeout_s = within_s or self._target.timeout_s
        until = time.monotonic() + timeout_s
        while True:
            assert self.welcome is not None, "asked within `with`"
            if question.declared.since > self.welcome.wire:
                raise Rejected(
                    "wire_version",
                    f"{self._target.at} runs an older version, which cannot answer this: upgrade "
                    "it, or name another node with --at",
                )
            asked = ((self.welcome.member.incarnation, question),)
            answer = self._asker.ask(asked, until)[0]
            if isinstance(answer, kind):
                return answer
            if isinstance(answer, Refused):
                raise self._explained(answer)
            if answer is not None:
                raise RemoteProtocolError(f"a {type(answer).__name__} for a {kind.__name__}")
            if time.monotonic() >= until:
                raise DeadlineExceeded(f"the answer of {self._target.at}", timeout_s)
            # The connection has ended. Another incarnation may be at the address.
            time.sleep(TURN_S)
            self._greet(until)

    # --- the connection ---------------------------------------------------------------------------

    def _connect(self) -> None:
        until = time.monotonic() + self._target.timeout_s
        self._url = self._resolved()
        self._greet(until)

    def _resolved(self) -> str:
        """Return the address to dial; raise PeerUnreachable for a name that does not resolve."""
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

    def _new_asker(self) -> Asker:
        return Asker(
            identity=self._identity,
            cluster=UNKNOWN_CLUSTER if self._may_learn else self.cluster,
            hello_for=lambda _: self._hello(),
            url_of=lambda _: self._url,
            breakers=Breakers(),
            clock=time.monotonic,
            on_refused=self._note_refusal,
            on_unasked=lambda *_: None,
            gate=self._gate,
            name_of_peer=lambda _: None,
            tls=self._tls,
            slice_s=SLICE_S,
        )

    def _note_refusal(self, _: int, refused: Refused) -> None:
        """Record why an answer is refused; may be called on a thread of nng."""
        if refused.reason == "protocol":
            self._refusal = RemoteProtocolError(refused.detail)
        else:
            self._refusal = Rejected(refused.reason, refused.detail)

    def _greet(self, until: float) -> None:
        """Send Hello, and record the node that answers; raise the reason if none does."""
        self._refusal = None
        answer = self._asker.greet(self._url, until, keeps=True)
        other = self._asker.connections.other_cluster
        if isinstance(answer, Welcome):
            self.welcome = answer
        elif isinstance(answer, Refused) and other:
            if not self._may_learn:
                raise Rejected(
                    "cluster",
                    f"{self._target.at} is of the cluster {other!r}, and not of "
                    f"{self.cluster!r}: name it with --cluster",
                )
            self.cluster, self._may_learn = other, False
            self._asker.close()
            self._asker = self._new_asker()
            self._greet(until)
        elif isinstance(answer, Refused):
            raise self._explained(answer)
        else:
            raise self._silence()

    def _hello(self) -> Hello:
        return Hello(
            0, WIRE_VERSION_OLDEST, WIRE_VERSION, self.cluster, is_node=False, granule=0,
            name="", nonce=b"", namespace="", geometry=OPERATOR, lock="", secret=b"",
        )  # fmt: skip

    def _silence(self) -> Exception:
        """Return the reason why no node has answered the Hello."""
        if self._refusal is not None:
            return self._refusal
        at = self._target.at
        if self._target.is_home:
            try:
                # It may listen, and not be open to this user.
                self._sharing.check_listener(local_path(at))
            except Rejected as rejected:
                return rejected
        if reached(self._url, min(CONNECT_S, self._target.timeout_s)) is False:
            if self.welcome is not None:
                return PeerUnreachable(f"{at}: nothing listens there any more; {_HINT}")
            if self._url.startswith("tcp://") and _listens(self._url):
                return PeerUnreachable(
                    f"{at} in clear text; {_WANTS_CERTIFICATES}; or this is no control address, "
                    "such as that of /metrics"
                )
            if not self._target.is_named:
                return PeerUnreachable(
                    f"a node of this host: nothing listens at {nearest_home()}, the default home, "
                    f"and at {at}, the default port; {_HINT_HERE}"
                )
            return PeerUnreachable(f"{at}: nothing listens there; {_HINT}")
        hint = (
            f"it may be stopped, or {_WANTS_CERTIFICATES}"
            if self._tls is None
            else "it may be stopped, refuse this certificate, or have none: see its log"
        )
        hint = "it may be stopped" if self._target.is_home else hint
        return PeerUnreachable(f"{at} within {self._target.timeout_s:g} s; {hint}")

    def _explained(self, refused: Refused) -> Rejected:
        detail = refused.detail
        if refused.reason == "role":
            detail += (
                "; an operator's certificate is needed (peercache certs issue DIR --operator NAME)"
                if self._tls is not None
                else "; ask as the user of the node, or over tcp with an operator's certificate"
            )
        return Rejected(refused.reason, f"{self._target.at}: {detail}")


def _listens(url: str) -> bool:
    """Return whether a process accepts connections at tcp://HOST:PORT, with any protocol."""
    try:
        socket.create_connection(parse_address(url.removeprefix("tcp://")), CONNECT_S).close()
    except OSError:
        return False
    return True


_WANTS_CERTIFICATES = "it requires certificates: give --tls-ca, --tls-cert and --tls-key"
_HINT = "start a node there, or name another one with --at HOST:PORT"
_HINT_HERE = "start one (peercache node), or name one with --at HOST:PORT or --at ipc://PATH"


def _read(decoded: Callable[[bytes], Kind], raw: bytes) -> Kind:
    try:
        return decoded(raw)
    except ValueError as error:
        raise RemoteProtocolError(f"no status: {error}") from error


def _by_name(name: str) -> tuple[str, int]:
    """Return the sort key of a name: ports are numbers."""
    host, _, port = name.rpartition(":")
    return host, int(port) if port.isdigit() else 0
