"""Messages with which the two ends of a queue pair connect."""

from __future__ import annotations

from typing import ClassVar

import attrs

from peercache.wire.messages.declared import CLIENTS, NO_ROLE, Declared, Receiver, Rule

NO_RDMA = "no_rdma"
"""Refusal: the node serves no rdma; detail says why."""

NO_PATH = "no_path"
"""Refusal: no queue pair of the node can reach the client's end."""

TOO_MANY = "channels"
"""Refusal: the client, or the node, has no room for another queue pair."""

BUSY = "busy"
"""Refusal: the node is making too many queue pairs now."""


@attrs.frozen
class OpenChannel:
    """Ask a node for its end of a channel, or for the current regions of an open one.

    channel: the client's number of it, rising; a repeated number is the same channel.
    rail:          which of the client's ports it is of, from 0.
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

    pages_address, seals_address: where page memory and seals begin, in the node.
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
    """List the channels to a node that the client still uses: at every change, and each 20 s.

    newest: the highest number used; a channel neither newer nor listed ends.
    """

    declared: ClassVar = Declared(36, Receiver.RDMA, CLIENTS)

    newest: int
    channels: tuple[int, ...]
