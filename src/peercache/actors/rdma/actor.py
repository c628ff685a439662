"""rdma: the queue pairs that clients have to this node.

Owns    the list of channels of each client, and the time of the client's last message about them.
        The queue pairs are behind a port (`actors.ports`): real devices, or a fake in tests.
Takes   OpenChannel and ChannelsHeld of clients; ClientsConnected and PoolGrew of the node;
        RdmaServes, RdmaAbsent and PairOpened of the port.
Sends   OpenPair, DropPair and ServeMemory to the port; ChannelOpened or Refused to clients.
Keeps   the port has a queue pair for each listed channel that was answered, and for no other. A
        channel is dropped when its client does not list it any more. All channels of a client are
        dropped when it has no admitted connection for LEFT_S: it exited, or its certificate was
        revoked, and a queue pair must not outlive the session. They are also dropped when it is
        silent for SILENT_S: a node cannot see one-sided READs, so only messages count. A refusal
        states its reason.
Limits  channels_a_client_max and CHANNELS_MAX queue pairs; PENDING_MAX OpenPair without an answer.
"""

from __future__ import annotations

from typing import final

import attrs
from typing_extensions import assert_never

from peercache.actors.effects import Effect, Send
from peercache.actors.mailboxes import ClientsConnected, PoolGrew, RdmaMessage
from peercache.actors.origin import Origin
from peercache.actors.ports import (
    DropPair,
    OpenPair,
    PairOpened,
    RdmaAbsent,
    RdmaServes,
    ServeMemory,
)
from peercache.wire.messages.session import (
    BUSY,
    NO_PATH,
    NO_RDMA,
    TOO_MANY,
    ChannelsHeld,
    OpenChannel,
    Refused,
)

CHANNELS_MAX = 8192
"""Queue pairs of a node: a hundred clients with sixteen channels over five rails. A device has room
for a hundred thousand, each some kilobytes of kernel memory."""

SILENT_S = 65.0
"""A client lists its channels every 20 s; three lost lists in a row do not drop them."""

LEFT_S = 5.0
"""How long the queue pairs of a client outlive its last connection: a broken connection is replaced
within a second or two, and reads continue in the meantime."""

PENDING_MAX = 256
"""OpenPair without an answer: a quarter of a second of work. The actor refuses further requests,
because the port drops no effect."""


@attrs.define
class _Client:
    """channels: by the client's number, oldest first."""

    seen_at: float
    connected_at: float
    channels: dict[int, None] = attrs.field(factory=dict)


@final
@attrs.define
class RdmaActor:
    """The queue pairs of one node."""

    channels_a_client_max: int = attrs.field(kw_only=True)
    _absent_because: str = attrs.field(default="it is still starting", init=False)
    _clients: dict[int, _Client] = attrs.field(factory=dict, init=False)
    _count: int = attrs.field(default=0, init=False)
    _pending: int = attrs.field(default=0, init=False)
    _usable_bytes: int = attrs.field(default=0, init=False)

    def on_message(self, sender: Origin, message: RdmaMessage, now: float) -> list[Effect]:
        """Handle one message and return what must be done."""
        if isinstance(message, OpenChannel):
            return self._open(sender, message, now)
        if isinstance(message, ChannelsHeld):
            return self._hold(sender.identity, message, now)
        if isinstance(message, ClientsConnected):
            return self._leave(message.clients, now)
        if isinstance(message, PairOpened):
            return self._answer(message)
        if isinstance(message, PoolGrew):
            self._usable_bytes = message.usable_bytes
            return [] if self._absent_because else [ServeMemory(self._usable_bytes)]
        if isinstance(message, RdmaServes):
            self._absent_because = ""
            # The memory was populated before the devices were open.
            return [ServeMemory(self._usable_bytes)] if self._usable_bytes else []
        if isinstance(message, RdmaAbsent):
            self._absent_because = message.reason
            # The queue pairs are gone with the devices, and no pending OpenPair is answered.
            self._clients.clear()
            self._count = self._pending = 0
            return []
        assert_never(message)

    def on_tick(self, now: float) -> list[Effect]:
        """Drop the channels of clients that are silent for too long."""
        effects: list[Effect] = []
        for identity, client in list(self._clients.items()):
            if client.seen_at + SILENT_S <= now:
                effects += self._drop(identity, list(client.channels))
        return effects

    def deadline(self) -> float:
        """Return when the next client has been silent for too long; inf for never."""
        # Clients are ordered by the time of their last message.
        oldest = next(iter(self._clients.values()), None)
        return oldest.seen_at + SILENT_S if oldest is not None else float("inf")

    def check(self) -> None:
        """Assert the invariants, in time that does not grow with the state."""
        assert 0 <= self._count <= CHANNELS_MAX, self._count
        assert 0 <= self._pending <= PENDING_MAX, self._pending
        last = next(reversed(self._clients.values()), None)
        if last is None:
            assert self._count == 0, self._count
        else:
            held = len(last.channels)
            assert 0 < held <= self.channels_a_client_max, f"a client with {held} channels"

    def figures(self) -> dict[str, int | float | str]:
        """Return named figures, for operators."""
        return {
            "rdma": self._absent_because or "serves",
            "rdma_channels": self._count,
            "rdma_clients": len(self._clients),
        }

    # --- effects of a message ---------------------------------------------------------------------

    def _open(self, sender: Origin, wanted: OpenChannel, now: float) -> list[Effect]:
        if self._absent_because:
            return [_refusal(sender, wanted, NO_RDMA, self._absent_because)]
        if self._pending >= PENDING_MAX:
            return [_refusal(sender, wanted, BUSY, f"{self._pending} are being made")]
        client = self._clients.get(sender.identity)
        held = client.channels if client is not None else {}
        if wanted.channel not in held:
            if len(held) >= self.channels_a_client_max or self._count >= CHANNELS_MAX:
                what = f"you have {len(held)} queue pairs, of {self._count} at this node"
                return [_refusal(sender, wanted, TOO_MANY, what)]
            self._count += 1
        client = self._seen(sender.identity, now)
        client.channels[wanted.channel] = None
        self._pending += 1
        return [OpenPair(sender, wanted)]

    def _answer(self, opened: PairOpened) -> list[Effect]:
        self._pending -= 1
        client, channel = opened.origin.identity, opened.channel
        if not opened.is_open:
            self._forget(client, channel)
        elif not self._lists(client, channel):
            # The channel was dropped, or an earlier request refused, while this one was pending:
            # otherwise the queue pair would never be dropped.
            refusal = Refused(opened.answer.request, NO_PATH, "the channel was dropped meanwhile")
            return [DropPair(client, channel), Send(opened.origin, refusal)]
        return [Send(opened.origin, opened.answer)]

    def _hold(self, identity: int, listed: ChannelsHeld, now: float) -> list[Effect]:
        if identity not in self._clients:
            return []
        client = self._seen(identity, now)
        kept = frozenset(listed.channels)
        gone = [
            channel
            for channel in client.channels
            if channel <= listed.newest and channel not in kept
        ]
        return self._drop(identity, gone)

    def _leave(self, connected: frozenset[int], now: float) -> list[Effect]:
        """Drop the channels of the clients that have had no connection for too long."""
        effects: list[Effect] = []
        for identity, client in list(self._clients.items()):
            if identity in connected:
                client.connected_at = now
            elif client.connected_at + LEFT_S <= now:
                effects += self._drop(identity, list(client.channels))
        return effects

    def _seen(self, identity: int, now: float) -> _Client:
        client = self._clients.pop(identity, None) or _Client(now, now)
        client.seen_at = client.connected_at = now
        self._clients[identity] = client
        return client

    def _drop(self, identity: int, channels: list[int]) -> list[Effect]:
        for channel in channels:
            self._forget(identity, channel)
        return [DropPair(identity, channel) for channel in channels]

    def _lists(self, identity: int, channel: int) -> bool:
        client = self._clients.get(identity)
        return client is not None and channel in client.channels

    def _forget(self, identity: int, channel: int) -> None:
        if not self._lists(identity, channel):
            return
        client = self._clients[identity]
        del client.channels[channel]
        self._count -= 1
        if not client.channels:
            del self._clients[identity]


def _refusal(sender: Origin, wanted: OpenChannel, reason: str, detail: str) -> Send:
    return Send(sender, Refused(wanted.request, reason, detail))
