"""The planted bugs: replacements of methods of production code.

Each maker takes the correct method and returns a wrong one, similar to a real bug.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import trio

from peercache.actors.directory import actor as directory
from peercache.actors.directory.holdings import Holdings
from peercache.actors.effects import NotifyDirectory, NotifyPublisher, Send
from peercache.actors.mailboxes import ClientGone, RecordsChanged
from peercache.actors.membership import actor as membership
from peercache.actors.membership import gossip
from peercache.actors.pool import actor as pool
from peercache.actors.pool import answers, reservations
from peercache.actors.pool.page_table import Page, PageTable
from peercache.actors.pool.reservations import Shares
from peercache.actors.ports import DISK_LATE, DISK_UNTRIED
from peercache.actors.promote.actor import Promotions
from peercache.actors.publisher import actor as publisher
from peercache.actors.publisher import streams
from peercache.actors.removal.actor import Remover
from peercache.actors.runtime import SELF, Mailbox
from peercache.model import records
from peercache.model.member import ALIVE
from peercache.model.seal import ODD
from peercache.net.link import Outbox
from peercache.net.requests import Conversation
from peercache.node import switchboard
from peercache.observability import reasons
from peercache.paths import home_tie, lookup, mirror, read, search, write
from peercache.paths.steps import Post
from peercache.wire.messages.directory import HandedOver, StreamSummary
from peercache.wire.messages.pool import COMMITTED, Commit, Committed
from sims.node import SimNode

Patches = tuple[tuple[Any, str, Callable[[Any], Any]], ...]


def _everything_read(_: Any) -> Any:
    def verified(believed: Any, space: int, seals: Any) -> Any:
        del believed, space
        return seals["word"] != ODD

    return verified


def _by_words_alone(_: Any) -> Any:
    def verified(believed: Any, space: int, seals: Any) -> Any:
        del space
        generations = believed["generation"]
        return (generations == seals["word"]) & (generations % 2 == 0) & (generations != 0)

    return verified


KEY_NOT_COMPARED: Patches = ((read, "verified", _by_words_alone),)

GENERATION_CHECK_SKIPPED: Patches = ((read, "verified", _everything_read),)


def _silent(right: Any) -> Any:
    def protect(self: PageTable, slots: Any) -> None:
        # Its own copy is odd, the table that readers look at is not.
        right(self, slots)

    return protect


EVICT_WITHOUT_ODD: Patches = ((PageTable, "protect", _silent),)


def _early(right: Any) -> Any:
    def grant(self: Any, origin: Any, reserve: Any, *more: Any) -> Any:
        effects = right(self, origin, reserve, *more)
        found = self._reservations.find(origin.identity, reserve.sequence)
        if not isinstance(found, reservations.Reservation):
            return effects
        count = len(found.states)
        commit = Commit(0, reserve.sequence, b"\1" * count, bytes(8 * count), 0.0)
        *published, last = self._commit_open(origin, commit, found, is_copy=False)
        changed = RecordsChanged(last.fact.records, answers.NO_DROPS)
        return [*effects, *published, NotifyPublisher(changed)]

    return grant


PUBLISH_BEFORE_COMMIT: Patches = ((pool.Pool, "_grant", _early),)


def _whatever_stands(right: Any) -> Any:
    def drop(self: Holdings, packed: bytes) -> Any:
        drops = np.frombuffer(packed, records.DROP).copy()
        drops["generation"] = 2**64 - 1
        return right(self, drops.tobytes())

    return drop


UNCONDITIONAL_DELETE: Patches = ((Holdings, "drop", _whatever_stands),)


def _dropped_at_once(right: Any) -> Any:
    def dispute(self: Any, disputed: bytes, now: float) -> Any:
        effects = right(self, disputed, now)
        for effect in effects:
            doubted = records.from_bytes(effect.message.records)
            drops = np.zeros(len(doubted), records.DROP)
            for field in ("key", "generation"):
                drops[field] = doubted[field]
            self._held[effect.to].drop(drops.tobytes())
        return effects

    return dispute


DISPUTE_DELETES: Patches = ((directory.DirectoryShard, "_dispute", _dropped_at_once),)


def _only_puts(_: Any) -> Any:
    def settle(self: Any, rows: Any, now: float) -> Any:
        del self, rows, now
        return []

    return settle


OLD_OWNER_NEVER_FORGETS: Patches = ((publisher.Publisher, "_settle", _only_puts),)


def _impatient(right: Any) -> Any:
    def settle(self: Any, rows: Any, now: float) -> Any:
        for stream in self._streams.values():
            state = stream._states()
            state[rows[state[rows] == streams.SENT]] = streams.CONFIRMED
        return right(self, rows, now)

    return settle


WITHDRAWN_BEFORE_ARRIVAL: Patches = ((publisher.Publisher, "_settle", _impatient),)


def _with_timer(right: Any) -> Any:
    def on_message(self: Any, sender: Any, message: Any, now: float) -> Any:
        began = self.__dict__.setdefault("_began", {})
        effects = right(self, sender, message, now)
        for client, known in self._reservations._clients.items():
            for sequence in known.open:
                began.setdefault((client, sequence), now)
        for (client, sequence), at in list(began.items()):
            if at + 1.0 < now:
                del began[client, sequence]
                self._free([self._reservations.end(client, sequence)])
        return effects

    return on_message


RESERVATION_FREED_BY_TIME: Patches = ((pool.Pool, "on_message", _with_timer),)


def _no_member_ends(right: Any) -> Any:
    def follow(self: Any, view: Any, now: float) -> None:
        living = tuple(attrs.evolve(member, state=ALIVE) for member in view.members)
        right(self, attrs.evolve(view, members=living), now)
        self._states = {member.incarnation: member.state for member in view.members}

    return follow


DEAD_INCARNATION_ACCEPTED: Patches = ((directory.DirectoryShard, "_follow", _no_member_ends),)


def _table_of_extent(right: Any) -> Any:
    def add(self: PageTable, keys: Any, slots: Any, *rest: Any) -> list[Page]:
        added: list[Page] = right(self, keys, slots, *rest)
        for page in added:
            first = page.slot.first
            counts = _COUNTS.setdefault(page.slot.extent, {})
            counts[first] = counts.get(first, 0) + 1
            page.generation = 2 * counts[first]
        return added

    return add


_COUNTS: dict[Any, dict[int, int]] = {}

TABLE_REBUILT: Patches = ((PageTable, "add", _table_of_extent),)


def _from_one(right: Any) -> Any:
    def init(self: PageTable, **arguments: Any) -> None:
        right(self, **{**arguments, "sequence": 1})

    return init


SEQUENCE_RESTARTS: Patches = ((PageTable, "__init__", _from_one),)


def _frees(right: Any) -> Any:
    def pipe_ended(self: SimNode, pipe: int) -> None:
        session = self.admission.sessions.get(pipe)
        right(self, pipe)
        if session is not None and session.role.value == "writer":
            self.crew.mailboxes.pool.put(SELF, ClientGone(session.identity))

    return pipe_ended


LOST_CONNECTION_FREES: Patches = ((SimNode, "_pipe_ended", _frees),)


def _nothing_unlisted(_: Any) -> Any:
    def end_unlisted(self: Any, client: int, newest: int, sequences: Any) -> Any:
        del self, client, newest, sequences
        return []

    return end_unlisted


LOST_GRANTED_NEVER_REPAIRED: Patches = (
    (reservations.Reservations, "end_unlisted", _nothing_unlisted),
)


def _kept_though_unlisted(_: Any) -> Any:
    def give_up(self: Any, aheads: Any) -> None:
        for ahead in list(aheads):
            self._live.pop(ahead.sequence, None)

    return give_up


SLOTS_AHEAD_USED_THOUGH_GIVEN_UP: Patches = (
    (write.ClientReservations, "_give_up", _kept_though_unlisted),
)


def _without_summaries(right: Any) -> Any:
    summaries = (StreamSummary, HandedOver)

    def on_tick(self: Any, now: float) -> Any:
        effects = right(self, now)
        return [
            effect
            for effect in effects
            if not (isinstance(effect, Send) and isinstance(effect.message, summaries))
        ]

    return on_tick


NO_SUMMARIES: Patches = ((publisher.Publisher, "on_tick", _without_summaries),)


def _for_any_target(right: Any) -> Any:
    def decode(raw: bytes, *, cluster: str) -> Any:
        return attrs.evolve(right(raw, cluster=cluster), target=0)

    return decode


SUCCESSOR_ACCEPTS: Patches = ((switchboard, "decode", _for_any_target),)


def _keeps_to_itself(_: Any) -> Any:
    def share(self: Any, to: Any, members: Any = ()) -> Any:
        del self, to, members
        return []

    return share


VIEWS_NEVER_MERGE: Patches = ((membership.Membership, "_share", _keeps_to_itself),)


def _stays(_: Any) -> Any:
    def refute(self: Any, claim: Any) -> bool:
        del self, claim
        return False

    return refute


NEVER_REFUTES: Patches = ((membership.Membership, "_refute", _stays),)


def _takes_everything(_: Any) -> Any:
    def put(self: Outbox, raw: bytes) -> int:
        self.waiting.append(raw)
        return 0

    return put


OUTBOX_WITHOUT_BOUND: Patches = ((Outbox, "put", _takes_everything),)


def _refuses_nothing(_: Any) -> Any:
    def offer(self: Mailbox[Any], sender: Any, message: Any, size_bytes: int) -> bool:
        self._append(sender, message, size_bytes)
        return True

    return offer


MAILBOX_WITHOUT_BOUND: Patches = ((Mailbox, "offer", _refuses_nothing),)


def _by_another_clock(right: Any) -> Any:
    def wait_s(self: Conversation[Any]) -> Any:
        clock = self._connections.clock
        self._connections.clock = trio.current_time
        try:
            return right(self)
        finally:
            self._connections.clock = clock

    return wait_s


WAITS_BY_ANOTHER_CLOCK: Patches = ((Conversation, "wait_s", _by_another_clock),)


def _in_order_of_a_set(right: Any) -> Any:
    def next_owners(self: Any, is_available: Any, **facts: Any) -> Any:
        found = right(self, is_available, **facts)
        names = {f"{peer:016x}" for peer in found}
        # Only the first peer is asked.
        first = int(next(iter(names)), 16) if names else 0
        return {peer: keys for peer, keys in found.items() if peer == first}

    return next_owners


def _late_is_over(right: Any) -> Any:
    def loaded(self: Promotions, fact: Any) -> Any:
        # A late page is dropped, with its slot.
        outcomes = fact.outcomes.replace(bytes((DISK_LATE,)), bytes((DISK_UNTRIED,)))
        return right(self, attrs.evolve(fact, outcomes=outcomes))

    return loaded


def _never_mind(_: Any) -> Any:
    def late_ended(self: Promotions, number: int, indices: Any) -> Any:
        del self, number, indices
        return []

    return late_ended


LATE_SLOT_REUSED: Patches = (
    (Promotions, "loaded", _late_is_over),
    (Promotions, "late_ended", _never_mind),
)


def _stays_known(right: Any) -> Any:
    def end(self: Any, pages: Any, reserved: Any, **more: Any) -> Any:
        kept = right(self, pages, reserved, **more)
        if not self._has_disk:
            return kept
        return [
            effect for effect in kept if not isinstance(effect, (NotifyDirectory, NotifyPublisher))
        ]

    return end


EVICTION_NOT_PUBLISHED: Patches = ((pool.Pool, "_end", _stays_known),)


def _is_not_notified(_: Any) -> Any:
    def forgotten(pages: PageTable, keys: bytes) -> Any:
        del pages, keys
        return []

    return forgotten


DISK_DELETION_NOT_PUBLISHED: Patches = ((pool, "forgotten", _is_not_notified),)


def _unverified_too(right: Any) -> Any:
    def keep(self: Any, hits: Any, until: float) -> Any:
        return right(self, np.ones_like(hits), until)

    return keep


MIRROR_UNVERIFIED: Patches = ((mirror.MirroredBatch, "keep", _unverified_too),)


def _nothing_is_void(_: Any) -> Any:
    def is_void(self: Any, namespace: int, asked_at: float) -> bool:
        del self, namespace, asked_at
        return False

    return is_void


REMOVED_COMES_BACK: Patches = ((reservations.Mirrors, "is_void", _nothing_is_void),)


def _none_has_just_ended(_: Any) -> Any:
    def just_ended(self: Any, now: float) -> list[int]:
        del self, now
        return []

    return just_ended


DEAD_NOT_NAMED: Patches = ((Remover, "_just_ended", _none_has_just_ended),)


def _for_50_ms(right: Any) -> Any:
    asked: dict[tuple[int, bytes], float] = {}

    def leading(self: Any, keys: Any, cluster: Any, until: float, *, touch: bool = False) -> Any:
        batch = id(self), keys.tobytes()
        before = self._run_ends.pages_before(keys)
        if before is not None and self._clock() - asked.get(batch, -1.0) < 0.05:
            return read.Leading(before, reasons.ABSENT, "known", is_again=True)
        asked[batch] = self._clock()
        return (yield from right(self, keys, cluster, until, touch=touch))

    return leading


MISSING_PAGE_REMEMBERED: Patches = ((read.Reader, "leading", _for_50_ms),)


def _whatever_is_answered(right: Any) -> Any:
    missed: dict[tuple[int, bytes], float] = {}

    def leading(self: Any, keys: Any, cluster: Any, until: float, *, touch: bool = False) -> Any:
        batch, now = (id(self), keys.tobytes()), self._clock()
        before = self._run_ends.pages_before(keys)
        found = yield from right(self, keys, cluster, until, touch=touch)
        if before is not None and now - missed.get(batch, -1.0) < 0.05:
            return read.Leading(before, reasons.ABSENT, found.tier, is_again=True)
        missed[batch] = now
        return found

    return leading


MISSING_PAGE_KEPT: Patches = ((read.Reader, "leading", _whatever_is_answered),)


SET_ORDER: Patches = ((search.Search, "next_owners", _in_order_of_a_set),)


def _any_member_believed(right: Any) -> Any:
    def judge_view(theirs: Any, **facts: Any) -> Any:
        return right(theirs, **{**facts, "is_master": True})

    return judge_view


HEARSAY_TRUSTED: Patches = ((membership, "judge_view", _any_member_believed),)


def _in_at_once(right: Any) -> Any:
    def judge_view(theirs: Any, **facts: Any) -> Any:
        judged = right(theirs, **facts)
        judged.merged.extend(judged.unmet)
        return judged

    return judge_view


ADMITTED_BY_GOSSIP: Patches = ((membership, "judge_view", _in_at_once),)


def _knows_all(_: Any) -> Any:
    def is_new(self: Any, member: Any) -> bool:
        del self, member
        return False

    return is_new


ADMITTED_WITHOUT_ANSWER: Patches = ((membership.Membership, "_is_new", _knows_all),)


def _without_end(_: int) -> int:
    return 2**64


COUNTER_JUMP_BELIEVED: Patches = (
    (membership, "COUNTER_JUMP_MAX", _without_end),
    (gossip, "COUNTER_JUMP_MAX", _without_end),
)


def _never_false(_: Any) -> Any:
    def is_false_number(held: Any, number: int, now: float) -> bool:
        del held, number, now
        return False

    return is_false_number


FORGED_NUMBER_STANDS: Patches = ((directory, "_is_false_number", _never_false),)


def _last_word(right: Any) -> Any:
    def note_answer(self: Any, peer: Any, positions: Any, *, is_behind: bool) -> None:
        del is_behind
        right(self, peer, positions, is_behind=False)

    return note_answer


BEHIND_IGNORED: Patches = ((search.Search, "note_answer", _last_word),)


def _silence_is_no_record(right: Any) -> Any:
    def hedge(self: Any, answers: Any) -> Any:
        for asked, answer in zip(self._asked, answers, strict=True):
            if answer is None:
                self._search.note_answer(asked.peer, asked.positions, is_behind=False)
        return right(self, answers)

    return hedge


SILENCE_IS_NO_RECORD: Patches = ((lookup.Round, "hedge", _silence_is_no_record),)


def _all_allowed(_: Any) -> Any:
    def allow(self: Any, size: int, *, own: int, together: int) -> bool:
        del self, size, own, together
        return True

    return allow


POOL_SHARES_TAKEN_OUT: Patches = ((Shares, "allow", _all_allowed),)


def _by_all_alone(right: Any) -> Any:
    def allow(self: Shares, size: int, *, own: int, together: int) -> bool:
        free = attrs.evolve(self, each_max=self.together_max)
        return bool(right(free, size, own=own, together=together))

    return allow


WRITER_BOUND_IGNORED: Patches = ((Shares, "allow", _by_all_alone),)


def _committed_first(right: Any) -> Any:
    def copy(self: Any, portion: Any, slots: Any) -> Any:
        portion.written[slots.reserved()] = 1
        yield from self._commit(portion, slots, is_sent=True, is_first=False)
        yield from right(self, portion, slots)

    return copy


COMMITTED_BEFORE_COPIED: Patches = ((write._Round, "_copy", _committed_first),)


def _middle_not_awaited(right: Any) -> Any:
    def committed(self: Any, commit: Any, pages: int) -> Any:
        # The first and the last portion are those that a careless implementation handles.
        numbers = self.numbers = [*getattr(self, "numbers", []), commit.number]
        if commit.number and len(numbers) == 2:
            yield Post(())
            return Committed(0, 0, bytes((COMMITTED,)) * pages, b"", 0)
        return (yield from right(self, commit, pages))

    return committed


MIDDLE_NOT_AWAITED: Patches = ((write._Round, "_committed", _middle_not_awaited),)


def _ended_while_copied(right: Any) -> Any:
    def reserve(self: Any, portion: Any, *, is_sent: bool) -> Any:
        yield from right(self, portion, is_sent=is_sent)
        self._reservations.end(portion.sequence)

    return reserve


PORTION_NOT_LISTED: Patches = ((write._Round, "_reserve", _ended_while_copied),)


def _on_any_base(_: Any) -> Any:
    def changed_view(view: Any, changes: Any) -> Any:
        if not changes.base:
            return None
        changed = view.without(changes.gone).merge(changes.view)[0]
        # From here on it uses the digest that it was sent.
        return attrs.evolve(changed, digest=int.from_bytes(changes.digest, "little"))

    return changed_view


def _the_newest_only(right: Any) -> Any:
    def since(self: Any, digest: bytes) -> Any:
        changed = right(self, digest)
        return changed and changed[-1:]

    return since


CHANGES_ON_A_WRONG_BASE: Patches = (
    (home_tie, "changed_view", _on_any_base),
    (gossip.ViewLog, "since", _the_newest_only),
)
