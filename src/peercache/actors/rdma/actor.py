"""rdma: which channels peers have to this node.

Owns    the list of channels that clients have asked for, and when each client last spoke of them.
        The queue pairs themselves belong to whoever keeps the devices, the actor "verbs".
Hears   OpenChannel, ChannelsHeld; RdmaServes and RdmaAbsent from the node; PairOpened from "verbs".
Says    WantPair and DropPair to "verbs"; ChannelOpened or Refused to whoever asked.
Keeps   a channel that its client does not list any more is dropped, and so are all of a client that
        has not spoken for SILENT_S: one-sided reads are invisible here, so only words count.
        A client that is refused is told why.
Limits  channels_a_client_max and CHANNELS_MAX queue pairs; WANTED_MAX of them in the making.
"""

from __future__ import annotations

from typing import final

import attrs
from typing_extensions import assert_never

from peercache.actors.effects import Effect, Send, TellVerbs
from peercache.actors.mailboxes import (
    DropPair,
    PairOpened,
    RdmaAbsent,
    RdmaHears,
    RdmaServes,
    WantPair,
)
from peercache.actors.origin import Origin
from peercache.wire.messages.rdma import ChannelsHeld, OpenChannel
from peercache.wire.messages.session import Refused

CHANNELS_MAX = 8192
"""Queue pairs of a node: a hundred clients with sixteen channels over five rails. A device has room
for a hundred thousand, each some kilobytes of kernel memory."""

SILENT_S = 65.0
"""Three times as long as a client may be silent about the channels it holds, and some."""

WANTED_MAX = 256
"""Questions handed on and not answered yet: a quarter of a second of work. Beyond it they are
refused, because facts within a node are never dropped."""

NO_RDMA = "no_rdma"
"""Refusal: this node serves no rdma; detail says why."""

NO_PATH = "no_path"
"""Refusal: no queue pair of this node can reach that end of the client's."""

TOO_MANY = "channels"
"""Refusal: no more queue pairs for this client, or for anybody."""

BUSY = "busy"
"""Refusal: too many queue pairs are being made just now."""


@attrs.define
class _Client:
    """channels: by the client's number, oldest first."""

    heard_at: float
    channels: dict[int, None] = attrs.field(factory=dict)


@final
@attrs.define
class ServedChannels:
    """The channels of one node."""

    channels_a_client_max: int = attrs.field(kw_only=True)
    _absent_because: str = attrs.field(default="it is still starting", init=False)
    _clients: dict[int, _Client] = attrs.field(factory=dict, init=False)
    _count: int = attrs.field(default=0, init=False)
    _wanted: int = attrs.field(default=0, init=False)

    def on_message(self, sender: Origin, message: RdmaHears, now: float) -> list[Effect]:
        """Take one message; see the module's docstring."""
        if isinstance(message, OpenChannel):
            return self._open(sender, message, now)
        if isinstance(message, ChannelsHeld):
            return self._hold(sender.identity, message, now)
        if isinstance(message, PairOpened):
            self._wanted -= 1
            if not message.is_open:
                self._forget(message.origin.identity, message.channel)
            return [Send(message.origin, message.answer)]
        if isinstance(message, RdmaServes):
            self._absent_because = ""
            return []
        if isinstance(message, RdmaAbsent):
            self._absent_because = message.reason
            return []
        assert_never(message)

    def on_tick(self, now: float) -> list[Effect]:
        """Drop the channels of clients that are gone."""
        effects: list[Effect] = []
        for identity, client in list(self._clients.items()):
            if client.heard_at + SILENT_S <= now:
                effects += self._drop(identity, list(client.channels))
        return effects

    def deadline(self) -> float:
        """Return when the next client has been silent for too long; inf for never."""
        # The one that spoke longest ago comes first: whoever speaks goes to the end.
        oldest = next(iter(self._clients.values()), None)
        return oldest.heard_at + SILENT_S if oldest is not None else float("inf")

    def check(self) -> None:
        """Assert the invariants, in time that does not grow with the state."""
        assert 0 <= self._count <= CHANNELS_MAX, self._count
        assert 0 <= self._wanted <= WANTED_MAX, self._wanted
        last = next(reversed(self._clients.values()), None)
        if last is None:
            assert self._count == 0, self._count
        else:
            held = len(last.channels)
            assert 0 < held <= self.channels_a_client_max, f"a client with {held} channels"

    def figures(self) -> dict[str, int | float | str]:
        """Return named figures, for people."""
        return {
            "rdma": self._absent_because or "serves",
            "rdma_channels": self._count,
            "rdma_clients": len(self._clients),
        }

    # --- what follows from a message --------------------------------------------------------------

    def _open(self, sender: Origin, wanted: OpenChannel, now: float) -> list[Effect]:
        if self._absent_because:
            return [_refusal(sender, wanted, NO_RDMA, self._absent_because)]
        if self._wanted >= WANTED_MAX:
            return [_refusal(sender, wanted, BUSY, f"{self._wanted} are being made")]
        client = self._clients.get(sender.identity)
        held = client.channels if client is not None else {}
        if wanted.channel not in held:
            if len(held) >= self.channels_a_client_max or self._count >= CHANNELS_MAX:
                what = f"you have {len(held)} queue pairs, of {self._count} at this node"
                return [_refusal(sender, wanted, TOO_MANY, what)]
            self._count += 1
        client = self._heard(sender.identity, now)
        client.channels[wanted.channel] = None
        self._wanted += 1
        return [TellVerbs(WantPair(sender, wanted))]

    def _hold(self, identity: int, listed: ChannelsHeld, now: float) -> list[Effect]:
        if identity not in self._clients:
            return []
        client = self._heard(identity, now)
        kept = frozenset(listed.channels)
        gone = [
            channel
            for channel in client.channels
            if channel <= listed.newest and channel not in kept
        ]
        return self._drop(identity, gone)

    def _heard(self, identity: int, now: float) -> _Client:
        client = self._clients.pop(identity, None) or _Client(now)
        client.heard_at = now
        self._clients[identity] = client
        return client

    def _drop(self, identity: int, channels: list[int]) -> list[Effect]:
        for channel in channels:
            self._forget(identity, channel)
        return [TellVerbs(DropPair(identity, channel)) for channel in channels]

    def _forget(self, identity: int, channel: int) -> None:
        client = self._clients.get(identity)
        if client is None or channel not in client.channels:
            return
        del client.channels[channel]
        self._count -= 1
        if not client.channels:
            del self._clients[identity]


def _refusal(sender: Origin, wanted: OpenChannel, reason: str, detail: str) -> Send:
    return Send(sender, Refused(wanted.request, reason, detail))
