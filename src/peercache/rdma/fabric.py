"""The rdma fabric of a client: one-sided READs in the caller's thread.

The owner's processor is not involved in a read. If a channel has not completed its read, it is
destroyed before `read` returns: a destroyed queue pair writes nowhere, so no READ writes to a
destination after the return. A destination that is not registered is read through a bounce buffer.
"""

from __future__ import annotations

import random
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias, final

from peercache.errors import LocalProtocolError
from peercache.fabric.port import Fabric
from peercache.model.ids import name_of
from peercache.model.member import Member
from peercache.model.reads import Fetched, PeerRead
from peercache.observability.log import WarnOnce, get_logger
from peercache.observability.metrics import Metrics
from peercache.observability.reasons import (
    DEADLINE,
    INTERNAL,
    LINK_DOWN,
    NO_MEMORY,
    PEER_UNREACHABLE,
    REFUSED,
    UNREGISTERED,
)
from peercache.rdma.channels import Channel, Channels, ClientRail, Reserved, end_of, published_by
from peercache.rdma.plan import ReadProgress
from peercache.rdma.rail import Rail
from peercache.rdma.reading import Leased, Share, Transfer, Unprepared, drive, shares_of
from peercache.wire.messages.declared import Message
from peercache.wire.messages.session import NO_PATH, NO_RDMA, ChannelOpened, ChannelsHeld, Refused

EXCHANGE_S = 0.2
"""Longest wait for a node's end of a channel; a breaker opens after a longer silence."""

ABSENT_S = 30.0
"""How long a node that does not serve rdma is not asked again."""

REFUSED_S = 5.0
"""The same for a temporary refusal: too many channels, no path."""

AWAY_S = 1.0
"""The same for a peer that did not answer or could not be read."""

SET_ASIDE_S = 0.005
"""Time reserved before a deadline, to destroy a channel."""

REFRESH_S = 1.0
"""Interval at which a peer that is still registering memory is asked for its regions."""

ELSEWHERE = {
    PEER_UNREACHABLE: PEER_UNREACHABLE,
    REFUSED: REFUSED,
    UNREGISTERED: REFUSED,
    LINK_DOWN: PEER_UNREACHABLE,
    NO_MEMORY: PEER_UNREACHABLE,
}
"""Failures that another fabric may not have, with the miss reason if there is no other fabric."""

AskPeer: TypeAlias = Callable[[int, Message, float], "Message | None"]
"""Sends a request to a peer by its incarnation, with a deadline; returns its answer, or None."""


ALL_RAILS = -1


@final
class UnreachablePeers:
    """Peers, and rails to them, that reads skip for a while. Thread-safe: each step is atomic."""

    def __init__(self) -> None:
        """Start without entries."""
        self._until: dict[tuple[int, int], float] = {}

    def note(self, peer: int, until: float, rail: int = ALL_RAILS) -> None:
        """Skip a peer until a time, over one rail or over all."""
        self._until[peer, rail] = until

    def has(self, peer: int, now: float, rail: int = ALL_RAILS) -> bool:
        """Return whether reads skip the peer now."""
        return self._until.get((peer, rail), 0.0) > now

    def any(self) -> bool:
        """Return whether there may be entries."""
        return bool(self._until)

    def rails(self, peer: int, now: float) -> list[int]:
        """Return the single rails that reads of a peer skip now."""
        return [
            rail
            for (of, rail), until in list(self._until.items())
            if of == peer and rail != ALL_RAILS and until > now
        ]

    def forget(self, peer: int) -> None:
        """Remove a peer."""
        for key in [key for key in list(self._until) if key[0] == peer]:
            self._until.pop(key, None)


@final
class RdmaFabric:
    """Reads pages of every member that serves rdma. Thread-safe; never raises."""

    name = "rdma"

    def __init__(
        self,
        *,
        rails: Sequence[Rail],
        exchange: AskPeer,
        max_channels_per_peer: int,
        rng: random.Random,
        metrics: Metrics,
        fallback: Fabric | None = None,
        clock: Callable[[], float] = time.monotonic,
        poller: Callable[[], select.poll] = select.poll,
    ) -> None:
        """Read over `rails`; `close` also closes them.

        exchange: requests the other end of a channel from a node.
        fallback: reads the pages that rdma cannot read; None makes them misses.
        """
        self._sides = tuple(
            ClientRail(rail, index, rng=rng, clock=clock, has_fallback=fallback is not None)
            for index, rail in enumerate(rails)
        )
        self._exchange = exchange
        self._metrics = metrics
        self._fallback = fallback
        self._clock = clock
        self._poller = poller
        self._log = get_logger(actor="rdma")
        self.between: Callable[[], None] | None = None
        self._channels = Channels(
            self._sides, max_channels_per_peer=max_channels_per_peer, clock=clock
        )
        self._leases = self._channels.driver
        self._unreachable = UnreachablePeers()
        self._warn_once = WarnOnce(self._log)
        # Guards `_is_released`.
        self._lock = threading.Lock()
        self._is_released = False

    # --- the port `Fabric` ------------------------------------------------------------------------

    def reaches(self, member: Member) -> bool:
        """Return whether a link is up, and no failure says that this member serves no rdma."""
        now, peer = self._clock(), member.incarnation
        if self._leases.is_closed or not (member.data or member.control):
            return False
        if self._unreachable.has(peer, now):
            return False
        return any(
            side.is_usable(now) and not self._unreachable.has(peer, now, side.index)
            for side in self._sides
        )

    def read(self, read: PeerRead, deadline: float) -> Fetched:
        """Fill the destinations in page order by `deadline`; see `Fabric`."""
        progress = ReadProgress(read, deadline - SET_ASIDE_S)
        if not len(read.offsets):
            return Fetched(progress.seen, "", self.name)
        try:
            failure = self._read(progress)
        except Exception:
            self._log.error(
                "rdma.read_failed",
                peer=name_of(read.member.incarnation),
                at=read.member.control,
                exc_info=True,
            )
            failure = INTERNAL
        if not failure and progress.unopened.any():
            failure = UNREGISTERED
        if failure in ELSEWHERE and self._fallback is not None:
            return self._fall_back(self._fallback, progress, failure, deadline)
        if not failure and progress.outside.any():
            failure = REFUSED
        return Fetched(progress.seen, ELSEWHERE.get(failure, failure), self.name)

    def close(self) -> None:
        """Refuse new reads, wait for those in flight (each ends by its deadline), close all."""
        is_quiet = self._leases.close()
        with self._lock:
            is_released, self._is_released = self._is_released, True
        if is_quiet and not is_released:
            # With a read in flight the memory must stay: the exit of the process closes the rest.
            for side in self._sides:
                side.rail.close()

    # --- for the client and the node --------------------------------------------------------------

    def forget(self, incarnation: int) -> None:
        """Close the channels to a dead member; a channel in use when its read ends."""
        self._leases.forget(incarnation)
        self._unreachable.forget(incarnation)

    def held(self) -> list[tuple[int, ChannelsHeld]]:
        """Return the lists of channels that nodes must get now; call each second."""
        return self._channels.held()

    def register(self, name: str, address: int, length: int, owner: object) -> Callable[[], None]:
        """Start to register memory that reads will fill; return the function that ends it."""
        made = [
            (side, side.rail.regions.add(name, address, length, remote=False, owner=owner))
            for side in self._sides
        ]

        def end() -> None:
            for side, region in made:
                side.rail.regions.remove(region)

        return end

    # --- one read ---------------------------------------------------------------------------------

    def _read(self, progress: ReadProgress) -> str:
        """Read until no page is left, or no rail; return "" or the failure."""
        read = progress.read
        wanted = read.runs.lengths
        if wanted.shape != read.lengths.shape or (wanted != read.lengths).any():
            raise LocalProtocolError("lengths differ from the destinations' sizes")
        if self._unreachable.any():
            progress.avoided.update(self._unreachable.rails(progress.peer, self._clock()))
        failure = ""
        # Every iteration completes the read, or drops a rail or its idle channels.
        for _ in range(2 * len(self._sides) + 1):
            if not len(progress.left()):
                return ""
            struck_out = len(progress.avoided)
            leased, why = self._lease(progress)
            if not leased:
                failure = why or failure or PEER_UNREACHABLE
                if len(progress.avoided) == struck_out or self._is_away(progress):
                    return failure
                continue
            failure = self._use(progress, leased)
            if failure in (DEADLINE, INTERNAL, NO_MEMORY):
                return failure
        return failure

    def _is_away(self, progress: ReadProgress) -> bool:
        return self._unreachable.has(progress.peer, self._clock())

    def _lease(self, progress: ReadProgress) -> tuple[list[Leased], str]:
        """Wait for a lease; return connected channels, or [] and the reason."""
        reserved, why = self._channels.reserve(progress)
        leased: list[Leased] = []
        try:
            while reserved:
                channel, problem = self._connected(progress, reserved[-1])
                mine = reserved.pop()
                if channel is None:
                    why = why or problem
                    progress.avoided.add(mine.side.index)
                    self._leases.end(mine.lease, None, works=False)
                else:
                    leased.append(Leased(mine, channel))
        except BaseException:
            for mine in reserved:
                self._leases.end(mine.lease, self._leases.channel_of(mine.lease), works=False)
            for each in leased:
                self._leases.end(each.reserved.lease, each.channel, works=False)
            raise
        return leased[::-1], why

    def _connected(self, progress: ReadProgress, mine: Reserved) -> tuple[Channel | None, str]:
        """Return the connected channel of a lease, or None and the reason."""
        if not mine.lease.is_new:
            return self._leases.channel_of(mine.lease), ""
        side, channel = mine.side, None
        try:
            channel = side.new_channel(mine.lease.channel)
            answer = self._ask(progress, side, channel)
            if isinstance(answer, ChannelOpened) and self._finds(progress, side, answer):
                channel.connect(
                    end_of(answer),
                    mtu=answer.mtu,
                    # With 0 every READ would wait without end.
                    reads_at_once=max(1, min(answer.reads_at_once, side.rail.reads_started)),
                    published=published_by(answer),
                )
                self._metrics.rdma_channels_opened.inc()
                return channel, ""
            why = REFUSED if isinstance(answer, Refused) else PEER_UNREACHABLE
        except (side.rail.verbs.Error, OSError, OverflowError, ValueError) as error:
            self._warn_channel(progress.read.member, side, str(error))
            why = PEER_UNREACHABLE
        except BaseException:
            if channel is not None:
                channel.close()
            raise
        if channel is not None:
            channel.close()
        return None, why

    def _ask(self, progress: ReadProgress, side: ClientRail, channel: Channel) -> Message | None:
        """Ask the peer for its end of a channel; skip the peer for a while if it has none."""
        until = min(progress.deadline, self._clock() + EXCHANGE_S)
        answer = self._exchange(progress.peer, side.question(channel), until)
        channel.asked_at = now = self._clock()
        if isinstance(answer, Refused):
            timeout_s = ABSENT_S if answer.reason == NO_RDMA else REFUSED_S
            rail = side.index if answer.reason == NO_PATH else ALL_RAILS
            why = f"{answer.reason}: {answer.detail}"
            self._away(progress.read.member, now + timeout_s, why, rail)
        elif answer is None and now < progress.deadline:
            self._away(
                progress.read.member, now + AWAY_S, "no answer to the exchange of queue pairs"
            )
        return answer

    def _finds(self, progress: ReadProgress, side: ClientRail, answer: ChannelOpened) -> bool:
        """Return whether the node's end can be reached; skip the rail for a while if not.

        Otherwise the connect would wait for a second and stop the whole process.
        """
        gid = end_of(answer).gid
        if side.rail.finds(gid, progress.deadline):
            return True
        now = self._clock()
        if now < progress.deadline:
            why = f"{NO_PATH}: no host answers for its GID {gid.hex(':', 2)} at {side.rail.name}"
            self._away(progress.read.member, now + REFUSED_S, why, side.index)
        return False

    def _use(self, progress: ReadProgress, leased: Sequence[Leased]) -> str:
        """Read the rest over these channels, then return or close each."""
        shares: list[Share] = []
        try:
            shares = shares_of(
                progress,
                leased,
                refresh=lambda each: self._refresh(progress, each),
                between=self.between,
                clock=self._clock,
            )
            drive(
                [share.transfer for share in shares],
                progress.deadline,
                self._clock,
                has_spare=self._channels.has_spare(progress, [each.reserved for each in leased]),
                leave_out=lambda dead: self._leave_out(dead, shares),
                poller=self._poller(),
            )
            return self._settle(progress, shares)
        except Unprepared as unprepared:
            return unprepared.failure
        finally:
            # Also after a KeyboardInterrupt, and each one although another raises.
            self._end_all(leased, shares)

    def _leave_out(self, dead: Transfer, shares: Sequence[Share]) -> None:
        # At once: this read may continue for long over the other rails.
        for share in shares:
            if share.transfer is dead:
                share.leased.reserved.side.leave_out(self._clock())

    def _end_all(self, leased: Sequence[Leased], shares: Sequence[Share]) -> None:
        if leased:
            try:
                self._end(leased[0], [share for share in shares if share.leased is leased[0]])
            finally:
                self._end_all(leased[1:], shares)

    def _end(self, leased: Leased, shares: Sequence[Share]) -> None:
        """End a lease; an unfinished channel is closed."""
        works = all(share.transfer.is_over and not share.transfer.failure for share in shares)
        self._leases.end(leased.reserved.lease, leased.channel, works=works)
        # Only now: until a channel is destroyed, its READs may write to borrowed memory.
        for share in shares:
            share.give_back()

    def _settle(self, progress: ReadProgress, shares: Sequence[Share]) -> str:
        """Note pages and failures; skip a rail that failed, or close its idle channels."""
        failure = ""
        for share in shares:
            transfer, side = share.transfer, share.leased.reserved.side
            progress.take(share.pages, transfer.seen, transfer.complete)
            why = transfer.failure
            if why == PEER_UNREACHABLE and not side.rail.is_up():
                why = LINK_DOWN
            if why == LINK_DOWN:
                side.leave_out(self._clock())
                self._warn_once(
                    "rdma.rail_left_out",
                    (progress.peer, side.index),
                    peer=name_of(progress.peer),
                    at=progress.read.member.control,
                    reason=why,
                    rail=side.rail.name,
                )
            elif transfer.is_stuck:
                # This does not affect the peer or other channels: the next iteration uses another
                # one.
                self._warn_channel(
                    progress.read.member, side, "the device has forgotten its requests"
                )
            elif why in (PEER_UNREACHABLE, REFUSED) and share.leased.reserved.lease.is_new:
                progress.avoided.add(side.index)
            elif why in (PEER_UNREACHABLE, REFUSED):
                self._leases.retire_idle(progress.peer, side.index)
            if why:
                self._metrics.rdma_channels_failed.labels(why).inc()
            # The deadline is the same for all.
            failure = why if why == DEADLINE or not failure else failure
        return failure

    def _refresh(self, progress: ReadProgress, leased: Leased) -> None:
        """Ask the peer again for its registered memory."""
        if self._clock() - leased.channel.asked_at < REFRESH_S:
            return
        answer = self._ask(progress, leased.reserved.side, leased.channel)
        if isinstance(answer, ChannelOpened):
            try:
                leased.channel.published = published_by(answer)
            except ValueError as error:
                self._warn_channel(progress.read.member, leased.reserved.side, str(error))

    def _fall_back(
        self, fallback: Fabric, progress: ReadProgress, failure: str, deadline: float
    ) -> Fetched:
        """Read the missing pages over the other fabric."""
        pages, peer = progress.elsewhere(), progress.peer
        self._metrics.rdma_fallbacks.labels(failure).inc(len(pages))
        key, name, at = (peer, failure), name_of(peer), progress.read.member.control
        self._warn_once("rdma.fell_back", key, peer=name, at=at, reason=failure, to=fallback.name)
        if failure == PEER_UNREACHABLE:
            self._away(progress.read.member, self._clock() + AWAY_S, failure)
        got = fallback.read(progress.part(pages), deadline)
        progress.seen[pages] = got.seals
        why = got.failure or (REFUSED if progress.outside.any() else "")
        return Fetched(progress.seen, why, fallback.name)

    # --- warnings ---------------------------------------------------------------------------------

    def _away(self, member: Member, until: float, why: str, rail: int = ALL_RAILS) -> None:
        """Skip a peer until a time, over one rail or over all, and warn once."""
        self._unreachable.note(member.incarnation, until, rail)
        self._warn_once(
            "rdma.connect_failed",
            (member.incarnation, why),
            peer=name_of(member.incarnation), at=member.control, reason=why,
        )  # fmt: skip

    def _warn_channel(self, member: Member, side: ClientRail, why: str) -> None:
        self._warn_once(
            "rdma.channel_failed",
            (member.incarnation, why),
            peer=name_of(member.incarnation), at=member.control, reason=why, rail=side.rail.name,
        )  # fmt: skip
