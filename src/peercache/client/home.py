"""The home node, as its client sees it: attached, lost, attached again; and the view it tells.

One thread a client does this: once a second it asks for the view, lists the live reservations and
tells holders what was read. When the home node has restarted it attaches to the new incarnation.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, final

import attrs

from peercache.config import Config
from peercache.errors import PeerCacheError, PeerUnreachable, Rejected
from peercache.ids import Incarnation, name_of
from peercache.messages import (
    Granted,
    Member,
    Message,
    Refused,
    Touched,
    ViewAsked,
    ViewShared,
    Welcome,
)
from peercache.net.asking import Asker
from peercache.observe import Metrics
from peercache.reporting import Report
from peercache.segment.attached import AttachedSegment
from peercache.segment.layout import boot_id
from peercache.transfer.cluster import Cluster
from peercache.transfer.reading import Touches
from peercache.transfer.reserving import Reservations
from peercache.view import View

BEAT_S = 1.0
"""Between two looks at the home node: how old a client's view may be."""

LOST_BEAT_S = 0.25
"""The same while it is lost: hits come back well within 5 s of its restart."""

ATTACH_S = 5.0
"""How long `Client.open` waits for the home node."""

UNMAP_S = 5.0
"""How long the old segment waits for its last copy; the last user unmaps it otherwise."""

POPULATING = "peercache-populate"
"""The thread that fills our page tables for a new home node's memory."""


@attrs.frozen(eq=False)
class Attached:
    """One home incarnation that we write to."""

    incarnation: int
    segment: AttachedSegment
    reservations: Reservations


@final
class Home:
    """A client's tie to its home node."""

    def __init__(
        self,
        *,
        url: str,
        config: Config,
        asker: Asker,
        touches: Touches,
        report: Report | None,
        on_view: Callable[[set[int]], None],
        renew_lock: Callable[[], None],
        on_beat: Callable[[], None] = lambda: None,
        metrics: Metrics,
        log: Any,
    ) -> None:
        """Look after the home node at `url`; `on_view` hears which incarnations live.

        on_beat: called about once a second, in this thread.
        """
        self._url = url
        self._config = config
        self._asker = asker
        self._touches = touches
        self._report = report
        self._on_view = on_view
        self._renew_lock = renew_lock
        self._on_beat = on_beat
        self._metrics = metrics
        self._log = log
        self._boot_id = boot_id()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._told_problem = ""
        self._view = View.of()
        self._problem: PeerCacheError = PeerUnreachable(f"the home node at {url}")
        self._thread: threading.Thread | None = None
        self.attached: Attached | None = None
        self.cluster = self._cluster(0, 0.0)

    def url_of(self, peer: int) -> str | None:
        """Return where to dial an incarnation."""
        attached = self.attached
        if attached is not None and attached.incarnation == peer:
            return self._url
        member = self.cluster.members.get(peer)
        return f"tcp://{member.control}" if member is not None else None

    def open(self) -> None:
        """Attach, or raise why that cannot be; then look after it in a thread."""
        until = time.monotonic() + ATTACH_S
        while not self._attach(until):
            if time.monotonic() >= until:
                raise self._problem
            time.sleep(LOST_BEAT_S / 5)
        while not self.cluster.members and time.monotonic() < until:
            self._ask_view()
        self._thread = threading.Thread(target=self._main, name="peercache-home", daemon=True)
        self._thread.start()

    def look_now(self) -> None:
        """Do not wait for the next beat: a call has found the home node gone."""
        self._wake.set()

    def heard_late(self, peer: int, message: Message) -> None:
        """Take what answers no question that waits: slots ahead, of the node we write to."""
        attached = self.attached
        # Another incarnation means another reservation by this number.
        if isinstance(message, Granted) and attached is not None and attached.incarnation == peer:
            attached.reservations.granted(message)

    def stop(self) -> None:
        """End the thread, within a bound."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * BEAT_S)

    def detach(self) -> None:
        """Tell the home node that nothing will be written any more, and unmap its segment."""
        attached = self.attached
        if attached is not None:
            self._tell(attached, math.inf)
            self.attached = None
            attached.segment.close(UNMAP_S)

    def _main(self) -> None:
        while not self._closing.is_set():
            is_well = False
            try:
                is_well = self._beat()
            except Exception:
                # The thread must outlive any bug of ours: without it nothing heals.
                self._log.error("home.beat_failed", exc_info=True)
            self._wake.wait(BEAT_S if is_well else LOST_BEAT_S)
            self._wake.clear()

    def _beat(self) -> bool:
        is_well = self._ask_view()
        if not is_well:
            try:
                self._attach(time.monotonic() + BEAT_S)
            except PeerCacheError as error:
                if isinstance(error, Rejected) and error.reason == "lock":
                    # The file has been cleaned away under us; for a new node a new one will do.
                    self._renew_lock()
                if str(error) != self._told_problem:
                    self._told_problem = str(error)
                    self._log.warning("home.rejected", home=self._url, problem=str(error))
            is_well = self._ask_view()
        attached = self.attached
        if attached is not None and is_well:
            self._tell(attached, time.monotonic())
        for holder, drops in self._touches.take().items():
            if holder in self.cluster.members and not self._asker.breakers.is_open(holder):
                self._asker.post(((holder, Touched(drops)),))
        self._on_beat()
        return is_well

    def _tell(self, attached: Attached, now: float) -> None:
        """List the live reservations, and what was counted since the last time."""
        self._asker.post(((attached.incarnation, attached.reservations.report(now)),))
        counted = self._report.take() if self._report is not None else None
        if counted is not None:
            self._asker.post(((attached.incarnation, counted),))

    def _attach(self, until: float) -> bool:
        """Say Hello at the home address, map what is published there; False if nobody answers."""
        answer = self._asker.greet(self._url, until)
        if isinstance(answer, Refused):
            raise Rejected(answer.reason, answer.detail)
        if not isinstance(answer, Welcome):
            return False
        member, old = answer.member, self.attached
        self._asker.breakers.answered(member.incarnation)
        if old is not None and old.incarnation == member.incarnation:
            return True
        try:
            segment = AttachedSegment.open(
                member.segment, incarnation=Incarnation(member.incarnation), writable=True
            )
        except PeerUnreachable as error:
            # It may have stopped just now; if not, this is what `open` tells.
            self._problem = error
            return False
        self.attached = Attached(member.incarnation, segment, Reservations())
        threading.Thread(
            target=self._populate, args=(segment,), name=POPULATING, daemon=True
        ).start()
        self.cluster = self._cluster(member.incarnation, self.cluster.handover_until)
        self._metrics.home_attached.inc()
        self._log.info("home.attached", home=self._url, node=name_of(member.incarnation))
        if old is not None:
            old.segment.close(UNMAP_S)
        return True

    def _populate(self, segment: AttachedSegment) -> None:
        """Fill the page tables of our mapping, as far as the node has come with its own."""
        while segment.populate() < segment.page_bytes:
            self._closing.wait(BEAT_S)
            attached = self.attached
            if self._closing.is_set() or attached is None or attached.segment is not segment:
                return

    def _ask_view(self) -> bool:
        """Fetch the view from the home node, or from anybody while that is lost."""
        attached = self.attached
        now = time.monotonic()
        asked = ViewAsked(0, self._view.digest())
        if attached is not None:
            answer = self._asker.ask(((attached.incarnation, asked),), now + LOST_BEAT_S)[0]
            if isinstance(answer, ViewShared):
                self._take(answer)
                return True
        for peer in self.cluster.members:
            if attached is not None and peer == attached.incarnation:
                continue
            if self._asker.breakers.available(peer, now):
                other: Message | None = self._asker.ask(((peer, asked),), now + LOST_BEAT_S)[0]
                if isinstance(other, ViewShared):
                    self._take(other)
                    break
        return False

    def _take(self, shared: ViewShared) -> None:
        if not shared.view:
            return
        self._view = View.of(shared.view)
        attached = self.attached
        before = self.cluster.ring.version
        home = attached.incarnation if attached is not None else 0
        cluster = self._cluster(home, self.cluster.handover_until)
        if cluster.ring.version != before:
            until = time.monotonic() + self._config.handover_s
            cluster = attrs.evolve(cluster, handover_until=until)
            self._log.info("view.changed", members=len(cluster.members))
        self.cluster = cluster
        self._on_view(set(cluster.members))

    def _cluster(self, home: int, handover_until: float) -> Cluster:
        members: dict[int, Member] = {m.incarnation: m for m in self._view.members()}
        return Cluster.of(
            members,
            home=home,
            boot_id=self._boot_id,
            replicas=self._config.directory_replicas,
            virtual_nodes=self._config.virtual_nodes,
            handover_until=handover_until,
        )
