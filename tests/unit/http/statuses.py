"""Statuses of members as tests make them: a busy cluster of any size."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

from peercache.model.status import (
    NO_ANSWER,
    Detail,
    Draining,
    Latencies,
    MemberStatus,
    MovedPages,
    NamespaceUse,
    PeerStatus,
    Reuse,
    Shard,
    Spilled,
    Status,
    Thread,
    Tier,
    Worker,
)

BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


def name_of_node(number: int) -> str:
    """Return HOST:PORT of a node."""
    return f"10.0.{number // 250}.{number % 250 + 1}:31998"


def latencies(calls: float, typical: float) -> Latencies:
    """Return a histogram of calls around a typical number of seconds."""
    counts = [int(calls * min(1.0, (bound / typical) / (1 + bound / typical))) for bound in BOUNDS]
    return Latencies(bounds=BOUNDS, counts=(*counts, int(calls)), seconds=calls * typical)


def member(number: int, of: int, *, step: int = 100) -> MemberStatus:
    """Return a healthy node among so many, after so many steps of work."""
    rng = random.Random(number)
    work = (1 + 0.5 * rng.random()) * step
    others = [other for other in range(of) if other != number][:8]
    status = Status(
        name=name_of_node(number),
        incarnation=f"{number + 1:016x}",
        host=f"gpu-{number:03}.rack-{number // 8}.example",
        cluster="prod-eu",
        version="0.2.0",
        wire=(2, 3),
        state="ok",
        age_s=93_000.0 + step * 5,
        pool=Tier(
            size=256 * 2**30, used=int((150 + 90 * rng.random()) * 2**30), pages=190_000,
            free=20 * 2**30, evicted=int(40 * work),
        ),
        disk=Tier(
            size=2 * 2**40, used=int(rng.random() * 1.8 * 2**40), pages=1_200_000,
            evicted=int(3 * work),
        ),
        workers=tuple(
            Worker(
                name=f"{number * 8 + rank + 1:016x}", pid=41_000 + rank,
                namespace="Qwen3-235B-A22B-Instruct-2507/fp8/tp8", keys=88_000 + rank,
                hits=612.5, misses=41.2, sets=57.0, report_age_s=1.3,
            )
            for rank in range(2)
        ),
        counters={
            "pages_hit/shm": 700 * work, "pages_hit/rdma": 2_400 * work, "pages_hit/tcp": 90 * work,
            "pages_missed/absent": 160 * work, "pages_missed/evicted": 22 * work,
            "pages_missed/deadline": 3 * work * (1 + (step // 40) % 2),
            "pages_missed/peer_unreachable": 1.5 * work,
            "pages_set/copied": 330 * work, "bytes_read/rdma": 2_400 * work * 2**20,
            "bytes_written": 330 * work * 2**20, "pages_promoted": 25 * work,
            "disk_pages_written": 55 * work, "pages_taken_over": 12 * work,
            "pages_not_moved/no_room": 4 * work,
        },
        latency={"get": latencies(90 * work, 0.004), "set": latencies(30 * work, 0.009)},
        peers=tuple(
            PeerStatus(name=name_of_node(other), fabric="rdma", state="alive") for other in others
        ),
        shard=Shard(records=410_000, share=(0.9 + 0.2 * rng.random()) / of, authority=True),
        namespaces=(
            NamespaceUse(
                name="Qwen3-235B-A22B-Instruct-2507/fp8/tp8", bytes=120 * 2**30, pages=122_880,
                disk_bytes=2**40, quota=200 * 2**30, priority=2,
                retained=30 * 2**30,
            ),
            NamespaceUse(name="Llama-3.3-70B/bf16", bytes=31 * 2**30, pages=31_744),
        ),
        spilled=Spilled(
            moved=int(20 * work), moved_bytes=int(20 * work) * 2**20, refused=int(4 * work),
            not_moved={"no_room": int(4 * work), "not_read": 16.0},
            taken=int(12 * work), taken_bytes=int(12 * work) * 2**20, not_taken={"full": 45.0},
            peers=(
                *(
                    MovedPages(
                        name=name_of_node(other), given=int(2 * work) + other,
                        given_bytes=(int(2 * work) + other) * 2**20,
                        taken=int(1.5 * work) if other % 2 else 0,
                        taken_bytes=int(1.5 * work) * 2**20 if other % 2 else 0,
                    )
                    for other in others
                ),
                MovedPages(given=3, given_bytes=3 * 2**20),
            ),
        ),
        reuse=Reuse(
            uses=5_000.0,
            hit_rates={"0.25": 0.31, "0.5": 0.42, "1": 0.55, "2": 0.61, "4": 0.64, "8": 0.65},
        ),
        certificate_days=64.2,
        detail=Detail(
            threads=(Thread(name="peercache", cpu_s=812.3, state="S"),),
            environment={"PEERCACHE_HTTP_TOKEN_FILE": "(masked)"},
            settings={"pool_size": "256GiB", "http_listen": "0.0.0.0:31997"},
        ),
    )  # fmt: skip
    return MemberStatus(seen="alive", answers=True, status=status)


def dead(of: MemberStatus) -> MemberStatus:
    """Return a member that does not answer any more."""
    kept = Status(
        name=of.status.name, incarnation=of.status.incarnation, host=of.status.host, state=NO_ANSWER
    )
    return MemberStatus(seen="dead", answers=False, status=kept)


def with_status(of: MemberStatus, **changes: object) -> MemberStatus:
    """Return a member whose status differs."""
    return attrs.evolve(of, status=attrs.evolve(of.status, **changes))


def draining(of: MemberStatus) -> MemberStatus:
    """Return a member that hands its pages over."""
    reported = Draining(
        active=True, phase="handing over", pages=190_000, pages_done=71_000,
        bytes=180 * 2**30, bytes_done=67 * 2**30,
    )  # fmt: skip
    return with_status(of, state="draining", reasons=(), draining=reported)


def disk_full(of: MemberStatus) -> MemberStatus:
    """Return a member whose disk takes no more pages."""
    problem = "the disk tier of /var/lib/peercache: No space left on device"
    disk = Tier(size=2 * 2**40, used=2 * 2**40, pages=1_900_000, problem=problem)
    return with_status(of, state="degraded", reasons=(problem,), disk=disk)


def cluster(size: int, *, step: int = 100) -> Sequence[MemberStatus]:
    """Return so many healthy members."""
    return [member(number, size, step=step) for number in range(size)]
