"""Messages of a connection: introduction, refusal, figures, and the ends of a queue pair."""

from __future__ import annotations

from typing import ClassVar

import attrs

from peercache.model.member import Member
from peercache.wire.messages.declared import (
    CLIENTS,
    CLIENTS_AND_OPERATORS,
    NO_ROLE,
    NODES,
    WRITERS,
    Declared,
    Receiver,
    Rule,
)

OPERATOR = "(operator)"
"""Geometry of a Hello of an operator, which has no pages."""


@attrs.frozen
class Hello:
    """Introduce the sender; the first message of a connection.

    name, nonce: those of a node: the name in its certificate ("" without TLS), and the nonce of its
                 incarnation (`model.ids.incarnation_of`); empty from a client.
    namespace:   the name of the client's namespace: it writes only in this one.
    lock:        basename of the client's lock file in the home folder; "" from a node, from a
                 client in the node's own process, and from a client that only reads.
    geometry:    that of the client's pages; OPERATOR from the command line of an operator.
    secret:      the bytes in that file, or the secret of the node's own process: only a process
                 that may read the file can know it. Empty from a client that only reads.
    """

    # Sent before there is a session, and answered by the switchboard.
    declared: ClassVar = Declared(0, Receiver.NODE, NO_ROLE)

    request: int
    wire_oldest: int
    wire_newest: int
    cluster: str
    is_node: bool
    granule: int
    name: str
    nonce: bytes
    namespace: str
    geometry: str
    lock: str
    secret: bytes = attrs.field(repr=False)


@attrs.frozen
class Welcome:
    """Answer an accepted Hello: the node as a member, and the facts of its segment."""

    declared: ClassVar = Declared(1, Receiver.ASKER, NO_ROLE)

    request: int
    wire: int
    member: Member
    segment_bytes: int


@attrs.frozen
class Refused:
    """Answer a refused request. reason: a word; detail: a sentence for operators."""

    declared: ClassVar = Declared(2, Receiver.ASKER, NO_ROLE)

    request: int
    reason: str
    detail: str


@attrs.frozen
class HelloRequired:
    """Ask a sender without Hello, or for a dead incarnation, to introduce itself again."""

    declared: ClassVar = Declared(3, Receiver.ASKER, NO_ROLE)

    incarnation: int


@attrs.frozen
class RequestStats:
    """Ask a node for its figures."""

    declared: ClassVar = Declared(28, Receiver.NODE, CLIENTS_AND_OPERATORS)

    request: int


@attrs.frozen
class ReportStats:
    """Answer a RequestStats: named figures."""

    declared: ClassVar = Declared(29, Receiver.ASKER, NO_ROLE)

    request: int
    figures: dict[str, int | float | str]


@attrs.frozen
class ReportRevocations:
    """Report revoked certificates to a node: the signed lists of the authorities, as PEM."""

    # Signed by an authority: a Byzantine node can only withhold it.
    declared: ClassVar = Declared(38, Receiver.NODE, NODES)

    lists: bytes


@attrs.frozen
class Counted:
    """Report to the home node what a client has counted since its last report.

    counts:  increases by "metric" or "metric/label value"; "peer_fabric/NODE": the fabric of its
             reads; "slow_call/N": one of its slowest calls since then (`observability.slow`).
    calls:   how long batch calls took, n × 5 bytes (`observability.metrics.CALL`).
    """

    declared: ClassVar = Declared(31, Receiver.NODE, WRITERS)

    counts: dict[str, int | float | str]
    calls: bytes


NO_RDMA = "no_rdma"
"""Refusal: the node does not serve rdma; detail explains why."""

NO_PATH = "no_path"
"""Refusal: no queue pair of the node can reach the client's end."""

TOO_MANY = "channels"
"""Refusal: the client, or the node, has no room for another queue pair."""

BUSY = "busy"
"""Refusal: the node is creating too many queue pairs now."""


@attrs.frozen
class OpenChannel:
    """Ask a node for its end of a channel, or for the current regions of an open one.

    channel: the client's number of it, increasing; a repeated number is the same channel.
    rail:          the index of the client's port, from 0.
    link_layer:    "Ethernet" or "InfiniBand".
    lid, gid:      its port's addresses (lid 0 on Ethernet, gid 16 bytes).
    mtu:           1 to 5: 256 bytes to 4096.
    reads_at_once: READs that the client wants to have in flight.
    """

    declared: ClassVar = Declared(34, Receiver.RDMA, CLIENTS, rules=(Rule.ALL_NAMESPACES,))

    request: int
    channel: int
    rail: int
    link_layer: str
    qp_num: int
    psn: int
    lid: int
    gid: bytes
    mtu: int
    reads_at_once: int


@attrs.frozen
class ChannelOpened:
    """Answer an OpenChannel: the node's end, and the published memory that this port may read.

    pages_address, seals_address: addresses of page memory and seals in the node.
    regions: n × (address, length, rkey), 8 bytes each: the memory registered so far.
    """

    declared: ClassVar = Declared(35, Receiver.ASKER, NO_ROLE)

    request: int
    channel: int
    qp_num: int
    psn: int
    lid: int
    gid: bytes
    mtu: int
    reads_at_once: int
    pages_address: int
    page_bytes: int
    seals_address: int
    granule: int
    regions: bytes


@attrs.frozen
class ChannelsHeld:
    """List the channels to a node that the client still uses: at every change, and every 20 s.

    newest: the highest number used; a channel neither newer nor listed ends.
    """

    declared: ClassVar = Declared(36, Receiver.RDMA, CLIENTS)

    newest: int
    channels: tuple[int, ...]
