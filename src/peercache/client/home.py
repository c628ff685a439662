"""The home node, as its client sees it: a thread that maintains the connection (`paths.home_tie`).

Each client has one such thread: once a second it requests the view, lists the live reservations and
notifies holders of what was read. After a restart of the home node it attaches to the new
incarnation.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias, final

import attrs

from peercache.client.bridge import Bridge
from peercache.config.settings import Config
from peercache.errors import PeerCacheError, PeerUnreachable, Rejected
from peercache.memory.attached import AttachedSegment
from peercache.memory.layout import boot_id
from peercache.model.ids import Incarnation, name_of
from peercache.model.member import Member
from peercache.net.breaker import Breakers
from peercache.net.peers import ControlTls, control_url
from peercache.net.sockets import reached
from peercache.observability.log import WarnOnce
from peercache.observability.metrics import ClientReport, Metrics
from peercache.paths import home_tie as tie
from peercache.paths.cluster import Cluster
from peercache.paths.home_tie import BEAT_S, LOST_BEAT_S, Tie
from peercache.paths.read import Touches
from peercache.trust.sharing import Sharing

ATTACH_S = 5.0
"""How long `Client.open` waits for the home node."""

PROBE_S = 0.2
"""How long to wait for a listener at a home address at which no node has answered."""

UNMAP_S = 5.0
"""How long to wait for the last copy in the old segment; otherwise its last user unmaps it."""

LOST_BEATS = 2
"""Beats without an answer after which the home node is lost: on an overloaded host one may go
unanswered although the node serves."""

SILENT_REPEAT_S = 60.0
"""How often a silent home node is logged while sets fail: an engine stores many times a second."""

POPULATING = "peercache-populate"
"""The thread that fills our page tables for a new home node's memory."""

Attached: TypeAlias = tie.Attached[AttachedSegment]


NO_ANSWER = "no_answer"
REFUSED = "refused"


@attrs.frozen
class HomeState:
    """The state of a client's home node.

    is_lost:    it does not answer, or refuses this client: nothing is stored, and reads miss.
    answered_s: when it answered last, in seconds of `time.monotonic`.
    reason:     "no_answer" or "refused"; "" while it is not lost.
    why:        the same as a sentence.
    """

    is_lost: bool
    answered_s: float
    reason: str = ""
    why: str = ""


def no_node(url: str, config: Config) -> PeerUnreachable:
    """Return the error of a client at whose home address nothing listens, and what to do."""
    home = f" --home {config.home}" if config.home else ""
    command = f"peercache node{' --insecure' if config.insecure else ''}{home}"
    return PeerUnreachable(
        f"a node at {url}: start one with `{command}`, name the address of another one in home, "
        "or set embedded = true for a node in this process"
    )


@final
class Home:
    """A client's connection to its home node, and the thread that maintains it."""

    def __init__(
        self,
        *,
        url: str,
        config: Config,
        bridge: Bridge,
        breakers: Breakers,
        touches: Touches,
        report: ClientReport | None,
        on_view: Callable[[set[int]], None],
        renew_lock: Callable[[], None],
        on_beat: Callable[[], None] = lambda: None,
        sharing: Sharing | None = None,
        on_segment: Callable[[str], None] = lambda _: None,
        metrics: Metrics,
        log: Any,
        tls: ControlTls | None = None,
    ) -> None:
        """Maintain the connection to the node at `url`; `on_view` gets the live incarnations.

        on_beat: called about once a second, in this thread.
        sharing: the users whose segments are mapped; None: this process's user and root.
        on_segment: called with the path of the home node's segment, once it is mapped.
        """
        self._url = url
        self._tls = tls
        self._bridge = bridge
        self._on_view = on_view
        self._renew_lock = renew_lock
        self._on_beat = on_beat
        self._sharing = sharing
        self._on_segment = on_segment
        self._metrics = metrics
        self._log = log
        self._warn_once = WarnOnce(log, repeat_s=SILENT_REPEAT_S)
        self._wake = threading.Event()
        self._beats = threading.Condition()
        self._began = self._ended = 0
        """How many beats have begun, and how many have ended."""
        self._closing = threading.Event()
        self._logged_problem = ""
        self._config = config
        self._problem: PeerCacheError | None = None
        self.has_no_node = False
        """Whether nothing listened at the address for as long as `open` waits."""
        self._thread: threading.Thread | None = None
        self._unanswered = 0
        self._refusal = ""
        self.state = HomeState(
            is_lost=True, answered_s=-math.inf, reason=NO_ANSWER, why="it was not reached yet"
        )
        """Replaced, never modified: any thread may read it."""
        self.tie: Tie[AttachedSegment] = Tie(
            url=url,
            config=config,
            boot_id=boot_id(),
            breakers=breakers,
            touches=touches,
            report=report,
            clock=time.monotonic,
            open_memory=self._open_memory,
            on_attached=self._came,
            on_rejected=self._rejected,
            on_view=self._view_came,
        )

    @property
    def url(self) -> str:
        """The address at which the home node listens for its clients."""
        return self._url

    @property
    def was_opened(self) -> bool:
        """Whether the home node was reached."""
        return self._thread is not None

    def url_of(self, peer: int) -> str | None:
        """Return the address at which to dial an incarnation."""
        if self.tie.is_home(peer):
            return self._url
        member = self.tie.cluster.members.get(peer)
        return control_url(member.control, self._tls) if member is not None else None

    def open(self) -> None:
        """Attach, or raise the reason why that fails; then start the thread."""
        until = time.monotonic() + ATTACH_S
        # Each attempt uses a connection of its own: one that hangs costs a second, not the client.
        while not self._bridge.run(self.tie.attach(min(until, time.monotonic() + BEAT_S))):
            if time.monotonic() >= until:
                raise self._unanswered_problem()
            time.sleep(LOST_BEAT_S / 5)
        while not self.tie.has_view and time.monotonic() < until:
            self._bridge.run(self.tie.ask_view())
        self.state = HomeState(is_lost=False, answered_s=time.monotonic())
        self._thread = threading.Thread(target=self._main, name="peercache-home", daemon=True)
        self._thread.start()

    def _unanswered_problem(self) -> PeerCacheError:
        if self._problem is not None:
            return self._problem
        self.has_no_node = not self._config.embedded and reached(self._url, PROBE_S) is False
        if self.has_no_node:
            return no_node(self._url, self._config)
        return PeerUnreachable(
            f"the home node at {self._url} within {ATTACH_S:g} s: its process listens, but it is "
            "stopped, or its host is overloaded"
        )

    def look_now(self) -> None:
        """Start a beat now: a call has found that the home node is gone or silent."""
        self._wake.set()

    def was_silent(self, pages: int) -> None:
        """Warn, at most once in SILENT_REPEAT_S, that a set ended without an answer."""
        self._warn_once(
            "home.set_unanswered",
            "",
            home=self._url,
            pages=pages,
            problem="the node is silent: it hangs, or its host is overloaded. Give the node more "
            "cores, or raise op_timeout_s of the engines",
        )
        self.look_now()

    def renew(self, until: float) -> Cluster:
        """Have the thread request the view now; return the cluster afterwards, or at `until`."""
        with self._beats:
            # The current beat may have sent its request before this call.
            wanted = self._began + 1
            self._wake.set()
            self._beats.wait_for(lambda: self._ended >= wanted, until - time.monotonic())
        return self.tie.cluster

    def stop(self) -> None:
        """End the thread, within a bound."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * BEAT_S)

    def detach(self) -> None:
        """Notify the home node that no more is written, and unmap its segment."""
        attached = self.tie.attached
        if attached is not None:
            self._bridge.run(self.tie.send_report(attached, math.inf))
            self.tie.attached = None
            attached.memory.close(UNMAP_S)

    def _main(self) -> None:
        while not self._closing.is_set():
            is_well, self._refusal = False, ""
            with self._beats:
                self._began += 1
            try:
                is_well = self._bridge.run(self.tie.beat())
                self._on_beat()
            except Exception:
                # The thread must survive any bug of ours: without it nothing heals.
                self._log.error("home.beat_failed", exc_info=True)
            self._note(is_well=is_well)
            with self._beats:
                self._ended = self._began
                self._beats.notify_all()
            self._wake.wait(BEAT_S if is_well else LOST_BEAT_S)
            self._wake.clear()

    def _note(self, *, is_well: bool) -> None:
        """Record the outcome of a beat; log when the home node is lost, and when it is back."""
        before = self.state
        if is_well:
            self._unanswered = 0
            self.state = HomeState(is_lost=False, answered_s=time.monotonic())
            if before.is_lost:
                lost_s = round(self.state.answered_s - before.answered_s, 1)
                self._log.info("home.found", home=self._url, lost_s=lost_s)
            return
        self._unanswered += 1
        if self._unanswered < LOST_BEATS:
            return
        reason, why = (REFUSED, self._refusal) if self._refusal else (NO_ANSWER, "no answer")
        if not before.is_lost:
            self._log.warning("home.lost", home=self._url, why=why)
        self.state = HomeState(is_lost=True, answered_s=before.answered_s, reason=reason, why=why)

    def _rejected(self, error: PeerCacheError) -> None:
        self._refusal = str(error)
        if isinstance(error, Rejected) and error.reason == "lock":
            # The file has been deleted while in use; the new node gets a new one.
            self._renew_lock()
        if str(error) != self._logged_problem:
            self._logged_problem = str(error)
            self._log.warning("home.rejected", home=self._url, problem=str(error))

    def _open_memory(self, member: Member) -> AttachedSegment | None:
        try:
            opened = AttachedSegment.open(
                member.segment,
                incarnation=Incarnation(member.incarnation),
                writable=True,
                sharing=self._sharing,
            )
        except PeerUnreachable as error:
            # It may have stopped just now; if not, `open` raises this.
            self._problem = error
            return None
        self._on_segment(member.segment)
        return opened

    def _came(self, attached: Attached, old: Attached | None) -> None:
        populating = threading.Thread(
            target=self._populate, args=(attached.memory,), name=POPULATING, daemon=True
        )
        # Without the thread only speed is lost; the rest must still be done.
        with suppress(RuntimeError):
            populating.start()
        self._metrics.home_attached.inc()
        self._log.info("home.attached", home=self._url, node=name_of(attached.incarnation))
        if old is not None:
            old.memory.close(UNMAP_S)

    def _populate(self, segment: AttachedSegment) -> None:
        """Fill the page tables of our mapping, as far as the node has filled its own."""
        while segment.populate() < segment.page_bytes:
            self._closing.wait(BEAT_S)
            attached = self.tie.attached
            if self._closing.is_set() or attached is None or attached.memory is not segment:
                return

    def _view_came(self, before: Cluster, cluster: Cluster) -> None:
        if cluster.ring.version != before.ring.version:
            self._log.info("home.view_changed", members=len(cluster.members))
        self._on_view(set(cluster.members))
