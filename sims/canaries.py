"""Canaries: bugs planted one at a time, each of which the simulation must find.

A bug is planted from outside: for one run, a patch replaces a method of production code, which has
no switch for it. Bugs of fabrics and drivers are planted in the simulated ones (`planted`).
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs

from sims import (
    bugs,
    bugs_copies,
    bugs_expiring,
    bugs_following,
    bugs_handover,
    bugs_owners,
    bugs_placement,
    bugs_tables,
    bugs_tenants,
    planted,
)
from sims.canary import Canary
from sims.doubting import doubt
from sims.outliving import outlive
from sims.play import play
from sims.queueing import queue
from sims.racing import race, race_drains, race_spills
from sims.rewriting import rewrite
from sims.swarm import (
    draining,
    with_a_bound,
    with_late_loads,
    with_rot,
    with_tables,
    with_tenants,
    with_tenants_on_disk,
)
from sims.turning import turn

FIRST_SEED = 1_000_000
"""Canaries are hunted over the same seeds each time; no sweep starts with these."""

SET_ORDER = "set-order"


CANARIES: tuple[Canary, ...] = (
    Canary(
        "generation-check-skipped",
        "every read is a hit",
        10,
        patches=bugs.GENERATION_CHECK_SKIPPED,
    ),
    Canary(
        "key-not-compared",
        "a word that fits makes a hit, whichever page the seal names",
        20,
        patches=bugs.KEY_NOT_COMPARED,
    ),
    Canary(
        planted.NO_FIRST_LOOK,
        "a fabric reads the bytes without a look at the word before them",
        100,
        plant=planted.NO_FIRST_LOOK,
        story=rewrite,
    ),
    Canary(
        planted.FUTURE_ACCEPTED,
        "the look before the bytes accepts a record whose word is still to come",
        100,
        plant=planted.FUTURE_ACCEPTED,
        story=rewrite,
    ),
    Canary(
        planted.KEY_AFTER_WORD,
        "the node stores key and length after the word that vouches for them",
        100,
        plant=planted.KEY_AFTER_WORD,
    ),
    Canary(
        "evict-without-odd",
        "a slot is given out while its word still says that the page is there",
        10,
        patches=bugs.EVICT_WITHOUT_ODD,
    ),
    Canary(
        "publish-before-commit",
        "a page is readable as soon as its slot is granted",
        10,
        patches=bugs.PUBLISH_BEFORE_COMMIT,
    ),
    Canary(
        "unconditional-delete",
        "a delete removes the record of the key, newer or not",
        100,
        patches=bugs.UNCONDITIONAL_DELETE,
    ),
    Canary(
        "dispute-deletes",
        "an owner removes a record that a reader disputes, without its holder's word",
        20,
        patches=bugs.DISPUTE_DELETES,
    ),
    Canary(
        "old-owner-never-forgets",
        "a hand-over puts to the new owner and never withdraws from the old one",
        20,
        patches=bugs.OLD_OWNER_NEVER_FORGETS,
    ),
    Canary(
        "withdrawn-before-arrival",
        "a hand-over withdraws from the old owner without waiting for the new one",
        100,
        patches=bugs.WITHDRAWN_BEFORE_ARRIVAL,
    ),
    Canary(
        "reservation-freed-by-time",
        "a reservation ends a second after it began",
        50,
        patches=bugs.RESERVATION_FREED_BY_TIME,
    ),
    Canary(
        "dead-incarnation-accepted",
        "a shard goes on serving the records of a member that is dead",
        20,
        patches=bugs.DEAD_INCARNATION_ACCEPTED,
    ),
    Canary(
        planted.RETURNS_WHILE_WRITING,
        "a read returns at its deadline while its transfer goes on",
        20,
        plant=planted.RETURNS_WHILE_WRITING,
    ),
    Canary(
        planted.READS_SOURCE_LATE,
        "a copy into a slot goes on after its deadline",
        50,
        plant=planted.READS_SOURCE_LATE,
    ),
    Canary(
        "table-rebuilt-at-class-change",
        "words count by slot, and start again when an extent changes its class",
        20,
        patches=bugs.TABLE_REBUILT,
    ),
    Canary(
        "sequence-restarts",
        "every incarnation counts its generations from the same number",
        20,
        patches=bugs.SEQUENCE_RESTARTS,
    ),
    Canary(
        "lost-connection-frees",
        "the end of a connection ends its client's reservations",
        50,
        patches=bugs.LOST_CONNECTION_FREES,
    ),
    Canary(
        "lost-granted-never-repaired",
        "what a client does not list goes on being reserved",
        50,
        patches=bugs.LOST_GRANTED_NEVER_REPAIRED,
    ),
    Canary(
        "slots-ahead-used-though-given-up",
        "a client writes to slots ahead that it no longer lists",
        100,
        patches=bugs.SLOTS_AHEAD_USED_THOUGH_GIVEN_UP,
    ),
    Canary(
        "portion-committed-before-copied",
        "a portion of a set is committed as soon as its slots are granted",
        20,
        patches=bugs.COMMITTED_BEFORE_COPIED,
    ),
    Canary(
        "middle-portion-forgotten",
        "a set does not wait for the answer to the Commit of its second portion",
        100,
        patches=bugs.MIDDLE_NOT_AWAITED,
    ),
    Canary(
        "portion-not-listed",
        "a client does not list the reservations of portions that it still copies",
        100,
        patches=bugs.PORTION_NOT_LISTED,
    ),
    Canary(
        planted.WORD_BEFORE_BYTES,
        "the owner samples the word before it sends the bytes",
        100,
        plant=planted.WORD_BEFORE_BYTES,
        story=rewrite,
    ),
    Canary(
        "lost-put-or-delete-never-repaired",
        "no summaries: what an owner did not get it never gets",
        50,
        patches=bugs.NO_SUMMARIES,
    ),
    Canary(
        "successor-accepts",
        "a message for a dead incarnation is taken by its successor",
        200,
        patches=bugs.SUCCESSOR_ACCEPTS,
    ),
    Canary(
        "views-never-merge",
        "nodes that hold different views do not show them to each other",
        20,
        patches=bugs.VIEWS_NEVER_MERGE,
    ),
    Canary(
        "nothing-raised-on-refute",
        "a member that is said to be dead does not raise its counter",
        50,
        patches=bugs.NEVER_REFUTES,
    ),
    Canary(
        planted.CHECKSUM_NOT_VERIFIED,
        "a page that was loaded from disk is believed without its checksum",
        100,
        plant=planted.CHECKSUM_NOT_VERIFIED,
        change=with_rot,
    ),
    Canary(
        "late-slot-reused",
        "the slot of a load that is late is given to another client",
        50,
        patches=bugs.LATE_SLOT_REUSED,
        change=with_late_loads,
    ),
    Canary(
        "eviction-not-published",
        "with a disk, an eviction leaves the record of the page in memory",
        20,
        patches=bugs.EVICTION_NOT_PUBLISHED,
    ),
    Canary(
        "disk-deletion-not-published",
        "a page that is deleted from disk is still reported as on disk",
        50,
        patches=bugs.DISK_DELETION_NOT_PUBLISHED,
    ),
    Canary(
        "outbox-without-bound",
        "what waits for a peer that is away is kept, all of it",
        20,
        patches=bugs.OUTBOX_WITHOUT_BOUND,
    ),
    Canary(
        "mailbox-without-bound",
        "whatever comes is put into the mailbox of an actor that has no time",
        50,
        patches=bugs.MAILBOX_WITHOUT_BOUND,
    ),
    Canary(
        "changes-on-a-wrong-base",
        "a client takes changes of a view that is not the one it has",
        20,
        patches=bugs.CHANGES_ON_A_WRONG_BASE,
    ),
    Canary(
        "hearsay-trusted",
        "a node believes what members that are no masters say of others",
        50,
        patches=bugs.HEARSAY_TRUSTED,
    ),
    Canary(
        "admitted-by-gossip",
        "a member is in the view as soon as another one reports it",
        20,
        patches=bugs.ADMITTED_BY_GOSSIP,
    ),
    Canary(
        "admitted-without-answer",
        "a process that says Join is a member before it has answered at its address",
        50,
        patches=bugs.ADMITTED_WITHOUT_ANSWER,
    ),
    Canary(
        "counter-jump-believed",
        "a member's counter may be at the end of its range in another one's view",
        50,
        patches=bugs.COUNTER_JUMP_BELIEVED,
    ),
    Canary(
        "forged-number-stands",
        "a stream goes on only after the highest number that its owner has seen",
        50,
        patches=bugs.FORGED_NUMBER_STANDS,
    ),
    Canary(
        "behind-ignored",
        "what an owner that is behind does not know is absent",
        50,
        patches=bugs.BEHIND_IGNORED,
    ),
    Canary(
        "silence-is-no-record",
        "an owner that has not answered when another one is asked counts as one without the record",
        20,
        patches=bugs.SILENCE_IS_NO_RECORD,
    ),
    Canary(
        "own-shard-counts",
        "a commit is answered as known to its owners when the own shard knows it",
        50,
        patches=bugs_owners.OWN_SHARD_COUNTS,
    ),
    Canary(
        "here-counts-as-published",
        "a Commit that comes again, or finds its pages here, is answered as known to their owners",
        20,
        patches=bugs_owners.HERE_COUNTS_AS_PUBLISHED,
        story=doubt,
    ),
    Canary(
        "epoch-not-checked",
        "a reader of a table does not look at the epoch again after its batch",
        20,
        patches=bugs_tables.EPOCH_NOT_CHECKED,
        story=turn,
    ),
    Canary(
        "entry-reused-in-an-epoch",
        "a holder's entry in a table is given to another one within an epoch",
        20,
        patches=bugs_tables.ENTRY_REUSED_IN_AN_EPOCH,
        story=turn,
    ),
    Canary(
        "old-tick-believed",
        "a table has authority however long ago its owner was at work",
        50,
        patches=bugs_tables.OLD_TICK_BELIEVED,
        story=doubt,
    ),
    Canary(
        "another-rings-word-believed",
        "a table that has authority for one ring is believed on another one",
        20,
        patches=bugs_tables.ANOTHER_RINGS_WORD_BELIEVED,
        story=doubt,
    ),
    Canary(
        "gap-not-doubted",
        "an owner keeps its authority when a message of a stream is missing",
        50,
        patches=bugs_owners.GAP_NOT_DOUBTED,
        story=doubt,
    ),
    Canary(
        "incarnation-inherits-in-sync",
        "a holder counts as in sync until it says otherwise",
        50,
        patches=bugs_owners.INCARNATION_INHERITS,
        story=doubt,
    ),
    Canary(
        "own-stall-unnoticed",
        "an owner keeps its authority when its process has been paused",
        50,
        patches=bugs_owners.STALL_UNNOTICED,
        story=doubt,
    ),
    Canary(
        "summary-of-before-counts",
        "a hand-over that waited while the owner was paused ends its doubt",
        20,
        patches=bugs_owners.SUMMARY_OF_BEFORE_COUNTS,
        story=doubt,
    ),
    Canary(
        "suspect-in-sync",
        "a holder that is suspected counts as in sync",
        20,
        patches=bugs_owners.SUSPECT_IN_SYNC,
        change=with_tables,
    ),
    Canary(
        "summary-counts-as-hand-over",
        "a summary that matches counts as a hand-over",
        50,
        patches=bugs_owners.SUMMARY_COUNTS_AS_HAND_OVER,
        story=doubt,
    ),
    Canary(
        "incomplete-hand-over",
        "a holder says that it has handed over as soon as it begins",
        20,
        patches=bugs_handover.INCOMPLETE_HAND_OVER,
        story=doubt,
    ),
    Canary(
        "pool-shares-taken-out",
        "writers that have stopped hold the whole pool",
        50,
        patches=bugs.POOL_SHARES_TAKEN_OUT,
    ),
    Canary(
        "writer-bound-ignored",
        "one writer reserves more than client_uncommitted_max",
        50,
        patches=bugs.WRITER_BOUND_IGNORED,
        change=with_a_bound,
    ),
    Canary(
        "waits-by-another-clock",
        "an answer is waited for by another clock than the one its deadline was made with",
        20,
        patches=bugs.WAITS_BY_ANOTHER_CLOCK,
    ),
    Canary(
        "handed-over-though-removed",
        "a page that is removed while it is handed over is committed all the same",
        20,
        patches=bugs_handover.THOUGH_REMOVED,
        story=race_drains,
    ),
    Canary(
        "spilled-though-removed",
        "a page that is removed while another node reads it ahead of its eviction comes back there",
        20,
        patches=bugs_handover.THOUGH_REMOVED,
        story=race_spills,
    ),
    Canary(
        "handed-over-unverified",
        "what a node reads from one that is drained is committed as it came",
        60,
        patches=bugs_handover.UNVERIFIED,
        change=draining,
    ),
    Canary(
        "quota-ignored",
        "pages of a namespace within its quota are evicted for another one",
        20,
        patches=bugs_tenants.QUOTA_IGNORED,
        change=with_tenants,
    ),
    Canary(
        "priority-ignored",
        "a namespace over its quota evicts pages of one with a higher priority",
        20,
        patches=bugs_tenants.PRIORITY_IGNORED,
        change=with_tenants,
    ),
    Canary(
        "disk-quota-ignored",
        "pages on disk of a namespace within its quota are evicted for another one",
        20,
        patches=bugs_tenants.DISK_QUOTA_IGNORED,
        change=with_tenants_on_disk,
    ),
    Canary(
        "disk-priority-ignored",
        "a namespace over its quota of the disk evicts pages of one with a higher priority",
        20,
        patches=bugs_tenants.DISK_PRIORITY_IGNORED,
        change=with_tenants_on_disk,
    ),
    Canary(
        "retained-reclaimed",
        "an extent in which pages are retained goes to another namespace or page size",
        20,
        patches=bugs_tenants.RETAINED_RECLAIMED,
        change=with_tenants,
    ),
    Canary(
        "retained-without-bound",
        "a namespace retains more than it is guaranteed",
        20,
        patches=bugs_tenants.RETAINED_WITHOUT_BOUND,
        change=with_tenants,
    ),
    Canary(
        "mirror-unverified",
        "a copy is kept of whatever a get has read, verified or not",
        50,
        patches=bugs.MIRROR_UNVERIFIED,
    ),
    Canary(
        "removed-comes-back",
        "a mirrored page that was read before a removal is committed after it",
        5,
        patches=bugs.REMOVED_COMES_BACK,
        story=race,
    ),
    Canary(
        "dead-not-named",
        "a removal names no member that has just died, although its pages can still be read",
        5,
        patches=bugs.DEAD_NOT_NAMED,
        story=outlive,
    ),
    *bugs_placement.CANARIES,
    *bugs_copies.CANARIES,
    *bugs_expiring.CANARIES,
    *bugs_following.CANARIES,
    Canary(
        "missing-page-remembered",
        "the page that was missing counts as absent for 50 ms, without a question",
        5,
        patches=bugs.MISSING_PAGE_REMEMBERED,
        story=queue,
    ),
    Canary(
        "missing-page-kept",
        "the page that was missing counts as absent for 50 ms, whatever its owners answer",
        5,
        patches=bugs.MISSING_PAGE_KEPT,
        story=queue,
    ),
    Canary(
        SET_ORDER,
        "owners are asked in the order of a set of strings",
        5,
        patches=bugs.SET_ORDER,
    ),
)


def canary_named(name: str) -> Canary:
    """Return a canary by its name."""
    return next(canary for canary in CANARIES if canary.name == name)


@contextmanager
def planted_canary(name: str) -> Iterator[None]:
    """Plant a bug within this context; "" plants none."""
    if not name:
        yield
        return
    canary = canary_named(name)
    with ExitStack() as undo:
        if canary.plant:
            planted.planted.add(canary.plant)
            undo.callback(planted.planted.discard, canary.plant)
        for owner, attribute, wrong_of in canary.patches:
            right = getattr(owner, attribute)
            undo.callback(setattr, owner, attribute, right)
            setattr(owner, attribute, wrong_of(right))
        yield


# --- hunting --------------------------------------------------------------------------------------


@attrs.frozen
class Found:
    """The result of a hunt: the checker that found the bug, and the number of seeds.

    checker: "" if the bug survived.
    """

    name: str
    checker: str
    seeds: int
    wall_s: float


def hunt(name: str) -> Found:
    """Run seeds with a bug planted until one of them fails, or there were enough."""
    canary = canary_named(name)
    started = time.monotonic()
    for number in range(canary.seeds_max):
        seed = FIRST_SEED + number
        if name == SET_ORDER:
            checker = "" if is_deterministic(seed, name) else "digest"
        else:
            with planted_canary(name):
                if canary.story is not None:
                    checker = canary.story(seed)
                else:
                    checker = play(seed, change=canary.change).checker
        if checker[:1].isupper():
            break  # An exception of the planted code itself: no checker has found anything.
        if checker:
            return Found(name, checker, number + 1, time.monotonic() - started)
    return Found(name, "", canary.seeds_max, time.monotonic() - started)


def is_deterministic(seed: int, canary: str = "", hash_seeds: tuple[int, ...] = (1, 2, 3)) -> bool:
    """Return whether a small run has one digest in processes with different hashes."""
    return len(set(digests_of(seed, canary, hash_seeds))) == 1


def digests_of(seed: int, canary: str, hash_seeds: tuple[int, ...]) -> list[str]:
    """Return the digests of a small run from several processes, which run in parallel."""
    command = [sys.executable, "-m", "sims", "run", "--seed", str(seed), "--small", "--digest"]
    command += ["--canary", canary] if canary else []
    running = [
        subprocess.Popen(
            command,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in hash_seeds
    ]
    printed = [process.communicate()[0].strip() for process in running]
    assert all(printed), "a run that has no digest is like any other that has none"
    return printed


def hunt_all(*, only: str, jobs: int | None, say: Callable[[str], None]) -> int:
    """Hunt every canary; print the checker that found it. Return 1 if one has survived."""
    names = [canary.name for canary in CANARIES if only in ("", canary.name)]
    survivors = 0
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs or os.cpu_count() or 1, maxtasksperchild=4) as pool:
        for found in pool.imap_unordered(hunt, names):
            how = f"found by {found.checker}" if found.checker else "SURVIVED"
            say(f"{found.name:36} {how:42} after {found.seeds:3} seeds, {found.wall_s:.0f} s")
            if not found.checker:
                say(f"reproduce: python -m sims canaries --only {found.name}")
                survivors += 1
    return 1 if survivors else 0
