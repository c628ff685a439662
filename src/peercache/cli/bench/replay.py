"""`peercache bench replay`: a request trace through real nodes and clients of this host.

Each request goes to one node, at its time by the trace, divided by a factor. The client of that
node asks which of its blocks the cluster has, reads the leading run of them, and sets the rest, in
batches, as an engine does. A block's bytes follow from its id, and every byte that was read is
compared with them.

The same requests are given to idealised LRU caches: one that has the memory of all nodes, and one
for each node, with the same routing, where each node reads what any node has.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import secrets
import shutil
import signal
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from peercache.cli.bench.limits import percentile
from peercache.cli.processes import LOCAL, NodeProcess, NodeProcesses
from peercache.cli.traces import LRU, Prompt
from peercache.client.client import Client
from peercache.client.report import reporting
from peercache.config.quantities import written_size
from peercache.config.settings import Config
from peercache.errors import DeadlineExceeded, PeerCacheError
from peercache.model.keys import KEY, KEY_BYTES, PageKeys
from peercache.model.runs import U64, PageRuns
from peercache.observability.log import configure_logging
from peercache.observability.reasons import ABSENT

EVEN: Final = "even"

SESSION_BLOCKS: Final = 2
"""Prompts that begin with the same blocks are one session. The first block alone distinguishes
nothing where all have one system prompt."""

SPEED_MAX: Final = 60.0
"""The greatest factor that is chosen where none is given: a node takes what is touched within one
second for touched at once."""

ABOUT_S: Final = 60.0
"""How long a replay takes where no factor is given, if SPEED_MAX allows it."""

BATCH_MAX: Final = 128
"""Blocks in one call: what SGLang asks for at once."""

BATCH_DIVISOR: Final = 4
"""A client may have a quarter of a pool uncommitted: batches for small pools are smaller."""

TABLES_FACTOR: Final = 1.1
"""Memory that a node takes for its tables in addition to the pages."""

CALLS: Final = {"op_timeout_s": "30", "exists_timeout_s": "2"}
"""A machine that is busy with all nodes makes calls slow, but shall make no misses."""

OWN_SETTINGS: Final = ("cluster", "discovery_addr", "granule", "home", "listen", "pool_size")
"""What the replay itself gives to nodes and clients."""

SETTLE_S: Final = 60.0
POLL_S: Final = 0.02

POISON: Final = 0xA5A5A5A5A5A5A5A5
POISON_EVERY: Final = 512
"""In words: one of each 4 KiB is overwritten before a read, so that one that wrote nothing there
shows."""


class WrongBytes(PeerCacheError):
    """A hit had other bytes than were set."""


# --- what is replayed -----------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Plan:
    """What is replayed, and how.

    prefill: so many nodes, the first ones, get requests; the others lend their memory.
    speed: the factor by which the trace's times are divided.
    settings: of the nodes and clients, by name.
    """

    requests: Sequence[Prompt]
    nodes: int
    prefill: int
    routing: str
    block_bytes: int
    speed: float
    seed: int
    settings: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def asked(self) -> int:
        """The blocks of all requests."""
        return sum(len(request.blocks) for request in self.requests)

    def figures(self) -> dict[str, Any]:
        """Return what all replays have in common, by name."""
        return {
            "requests": len(self.requests),
            "blocks": self.asked,
            "distinct_blocks": len({one for request in self.requests for one in request.blocks}),
            "nodes": self.nodes,
            "prefill": self.prefill,
            "routing": self.routing,
            "block_bytes": self.block_bytes,
            "speed": self.speed,
            "seed": self.seed,
            "settings": dict(self.settings),
        }

    def rooms(self, blocks: int) -> list[int]:
        """Return how many blocks each node has room for, of so many in all."""
        share, rest = divmod(blocks, self.nodes)
        return [share + (number < rest) for number in range(self.nodes)]

    def batch(self, blocks: int) -> int:
        """Return how many blocks a call has where there is room for so many in all."""
        return min(BATCH_MAX, min(self.rooms(blocks)) // BATCH_DIVISOR)

    def routed(self) -> list[int]:
        """Return the node of each request.

        even: any of them, as chance has it. zipf: a session stays at the node that it came to; the
        second node gets half as many sessions as the first one, the third a third.
        """
        chance, nodes = random.Random(self.seed), range(self.prefill)  # noqa: S311 - no secret
        if self.routing == EVEN:
            return [chance.randrange(self.prefill) for _ in self.requests]
        weights = [1 / (node + 1) for node in nodes]
        homes: dict[tuple[int, ...], int] = {}
        for request in self.requests:
            session = session_of(request)
            if session not in homes:
                (homes[session],) = chance.choices(nodes, weights)
        return [homes[session_of(request)] for request in self.requests]


def session_of(request: Prompt) -> tuple[int, ...]:
    """Return what the requests of a session have in common."""
    return tuple(request.blocks[:SESSION_BLOCKS])


def speed_for(requests: Sequence[Prompt]) -> float:
    """Return the factor by which a replay takes about a minute, or the greatest reasonable one."""
    length_s = requests[-1].at if requests else 0.0
    return min(SPEED_MAX, max(1.0, length_s / ABOUT_S))


def ideal_hits(requests: Sequence[Prompt], room: int) -> list[int]:
    """Return the hits of each request in one LRU of so many blocks."""
    return list(map(LRU(room).ask, requests))


def ideal_hits_by_node(
    requests: Sequence[Prompt], routed: Sequence[int], rooms: Sequence[int]
) -> list[int]:
    """Return the hits of each request where every node has an LRU of its own.

    A node stores what its requests do not find, and each node reads what any node has.
    """
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in rooms]
    hits = []
    for request, home in zip(requests, routed, strict=True):
        own, run = caches[home], 0
        for block in request.blocks:
            holder = own if block in own else next((one for one in caches if block in one), None)
            if holder is None:
                break
            holder.move_to_end(block)
            run += 1
        hits.append(run)
        for block in request.blocks[run:]:
            own[block] = None
            own.move_to_end(block)
            if len(own) > rooms[home]:
                own.popitem(last=False)
    return hits


# --- one request ----------------------------------------------------------------------------------


@attrs.frozen
class Answer:
    """What came of a request.

    hits: the blocks of its leading run that were read. waited_s: until they were.
    reason: why the run ended there; "" if all blocks were hits. late_s: so long after its time the
    request began.
    """

    hits: int
    waited_s: float = 0.0
    reason: str = ""
    late_s: float = 0.0


def keys_of(blocks: Sequence[int]) -> PageKeys:
    """Return the page keys of blocks."""
    digests = [hashlib.blake2b(b"%d" % one, digest_size=KEY_BYTES).digest() for one in blocks]
    return np.frombuffer(b"".join(digests), KEY)


def words_of(keys: PageKeys) -> U64:
    """Return for each key the word of eight bytes that its page consists of."""
    return keys.view(np.uint64)[::2]


class ReplayEngine:
    """The engine of one node: reads what the cluster has of a prompt, and stores the rest."""

    def __init__(self, client: Client, block_bytes: int, batch: int) -> None:
        """Take memory for the blocks of one call."""
        self._client, self._batch = client, batch
        self._memory = np.zeros((batch, block_bytes // 8), np.uint64)
        begin = int(self._memory.ctypes.data)
        addresses = np.arange(batch, dtype=np.uint64) * np.uint64(block_bytes) + np.uint64(begin)
        self._runs = PageRuns.regular(addresses, np.full(batch, block_bytes, np.uint64), batch)

    def serve(self, request: Prompt) -> Answer:
        """Read the leading run of a prompt that the cluster has; store the rest.

        Raise WrongBytes for a block that is read and is not as it was set.
        """
        if not request.blocks:
            return Answer(0)
        keys = keys_of(request.blocks)
        hits, waited_s, reason = self._read(keys)
        self._store(keys[hits:])
        return Answer(hits, waited_s, reason)

    def _read(self, keys: PageKeys) -> tuple[int, float, str]:
        """Return the blocks of the leading run, the time that the calls took, and why it ended."""
        waited_s = 0.0
        for begin in range(0, len(keys), self._batch):
            some = keys[begin : begin + self._batch]
            started = time.perf_counter()
            with reporting(is_detailed=True) as asked:
                found = self._client.batch_touch(some)
            waited_s += time.perf_counter() - started
            self._memory[:found, ::POISON_EVERY] = POISON
            started = time.perf_counter()
            with reporting() as read:
                answers = self._get(some[:found])
            waited_s += time.perf_counter() - started
            self._verify(some[:found], answers)
            run = leading(answers)
            if run < len(some):
                misses = read.misses if run < found else asked.misses
                ((reason, _),) = misses.most_common(1) or [(ABSENT, 0)]
                return begin + run, waited_s, reason
        return len(keys), waited_s, ""

    def _get(self, keys: PageKeys) -> list[bool]:
        if not len(keys):
            return []
        return self._client.batch_get_into(keys, self._runs.between(0, len(keys)))

    def _store(self, keys: PageKeys) -> None:
        for begin in range(0, len(keys), self._batch):
            some = keys[begin : begin + self._batch]
            self._memory[: len(some)] = words_of(some)[:, None]
            self._client.batch_set_from(some, self._runs.between(0, len(some)))

    def _verify(self, keys: PageKeys, answers: Sequence[bool]) -> None:
        is_right = (self._memory[: len(keys)] == words_of(keys)[:, None]).all(axis=1)
        wrong = np.count_nonzero(~is_right & np.array(answers, np.bool_))
        if wrong:
            raise WrongBytes(f"{wrong} blocks of a call were not read as they were set")


def leading(answers: Sequence[bool]) -> int:
    """Return the length of the leading run of hits."""
    return answers.index(False) if False in answers else len(answers)


# --- all requests ---------------------------------------------------------------------------------


def play(
    plan: Plan, serve: Sequence[Callable[[Prompt], Answer]], advance: Callable[[], object]
) -> list[Answer]:
    """Give each request to its node at its time; return the answers in the order of the requests.

    serve: what serves the requests of each node, one after the other, in a thread for each node.
    advance: called after each request, in any thread. What `serve` raises ends the replay.
    """
    failed = threading.Event()

    def note(done: Future[Answer]) -> None:
        advance()
        if not done.cancelled() and done.exception():
            failed.set()

    def serve_late(node: int, request: Prompt, due: float) -> Answer:
        late_s = max(0.0, time.monotonic() - due)
        return attrs.evolve(serve[node](request), late_s=late_s)

    threads = [ThreadPoolExecutor(1) for _ in serve]
    answers: list[Future[Answer]] = []
    began = time.monotonic()
    try:
        for request, node in zip(plan.requests, plan.routed(), strict=True):
            due = began + request.at / plan.speed
            if failed.wait(max(0.0, due - time.monotonic())):
                break
            answers.append(threads[node].submit(serve_late, node, request, due))
            answers[-1].add_done_callback(note)
        for answer in wait(answers, return_when=FIRST_EXCEPTION).done:
            answer.result()
        return [answer.result() for answer in answers]
    finally:
        for thread in threads:
            thread.shutdown(cancel_futures=True)


@attrs.frozen(eq=False)
class Outcome:
    """What came of a replay with room for so many blocks in all.

    ideal, ideal_by_node: the hits of each request in one LRU, and in one for each node.
    counted: the counters of all clients, added up. seconds: how long it took.
    """

    plan: Plan
    blocks: int
    answers: Sequence[Answer]
    ideal: Sequence[int]
    ideal_by_node: Sequence[int]
    counted: Mapping[str, float]
    seconds: float

    @property
    def hits(self) -> list[int]:
        """The hits of each request."""
        return [answer.hits for answer in self.answers]

    def rate(self, hits: Sequence[int]) -> float:
        """Return the share of all blocks that were hits."""
        return sum(hits) / self.plan.asked if self.plan.asked else 0.0

    def misses(self) -> dict[str, int]:
        """Return the blocks that were no hits, by the reason for which their run ended."""
        misses: Counter[str] = Counter()
        for request, answer in zip(self.plan.requests, self.answers, strict=True):
            if answer.reason:
                misses[answer.reason] += len(request.blocks) - answer.hits
        return dict(misses)

    def counted_by(self, name: str) -> dict[str, int]:
        """Return a counter of the clients by its label."""
        return {
            key.removeprefix(f"{name}_"): int(value)
            for key, value in self.counted.items()
            if key.startswith(f"{name}_")
        }

    def figures(self) -> dict[str, Any]:
        """Return the figures by name."""
        hit_rate, ideal_rate = self.rate(self.hits), self.rate(self.ideal)
        waits = [answer.waited_s * 1e3 for answer in self.answers] or [0.0]
        return {
            "room_blocks": self.blocks,
            "hit_rate": round(hit_rate, 4),
            "lru_hit_rate": round(ideal_rate, 4),
            "of_lru": round(hit_rate / ideal_rate, 4) if ideal_rate else None,
            "node_lru_hit_rate": round(self.rate(self.ideal_by_node), 4),
            "wait_p50_ms": round(percentile(waits, 0.5), 3),
            "wait_p99_ms": round(percentile(waits, 0.99), 3),
            "late_max_s": round(max((answer.late_s for answer in self.answers), default=0.0), 3),
            "seconds": round(self.seconds, 1),
            "bytes_read": self.counted_by("bytes_read"),
            "bytes_written": int(self.counted.get("bytes_written", 0)),
            "misses": self.misses(),
            "sets_refused": self.counted_by("sets_refused"),
        }

    def over_time(self, hits: Sequence[int], parts: int = 60) -> list[tuple[float, float]]:
        """Return the share of hits in equal parts of the trace, as (minutes, share)."""
        part_s = max((request.at for request in self.plan.requests), default=0.0) / parts or 1.0
        asked: Counter[int] = Counter()
        found: Counter[int] = Counter()
        for request, hit in zip(self.plan.requests, hits, strict=True):
            part = min(parts - 1, int(request.at / part_s))
            asked[part] += len(request.blocks)
            found[part] += hit
        return [
            ((part + 0.5) * part_s / 60, found[part] / asked[part])
            for part in sorted(asked)
            if asked[part]
        ]


# --- nodes and clients ----------------------------------------------------------------------------


def expect_room(plan: Plan, blocks: int) -> None:
    """Raise PeerCacheError where the shared memory has no room for so many blocks."""
    folder = Path(plan.settings.get("shm_dir", Config().shm_dir))
    wanted = int(blocks * plan.block_bytes * TABLES_FACTOR)
    free = shutil.disk_usage(folder).free
    if wanted > free:
        raise PeerCacheError(
            f"{blocks} blocks need {written_size(wanted)} in {folder}, which has "
            f"{written_size(free)} free: take fewer --blocks, or a smaller --block-size"
        )


@contextlib.contextmanager
def running(plan: Plan, rooms: Sequence[int]) -> Iterator[list[Client]]:
    """Run nodes with room for so many blocks each; yield a client of each node.

    Raise NodeFailed if a node does not serve, or has ended by the end of the block.
    """
    common = {
        **plan.settings,
        "cluster": f"replay-{secrets.token_hex(4)}",
        # A block takes no more of a pool than its bytes.
        "granule": str(plan.block_bytes),
    }
    flags = {**LOCAL, **{name.replace("_", "-"): value for name, value in common.items()}}
    nodes: list[NodeProcess] = []
    with NodeProcesses() as processes, contextlib.ExitStack() as stack:
        for number, room in enumerate(rooms):
            settings = {**flags, "pool-size": str(room * plan.block_bytes)}
            if nodes:
                processes.await_ready(nodes[0])
                settings["discovery-addr"] = nodes[0].ready["control"]
            nodes.append(processes.launch(f"node-{number + 1}", settings))
        clients = []
        for node in nodes:
            processes.await_ready(node)
            settings = {**CALLS, **common, "home": node.home}
            client = Client.open(Config.load(settings, environment=os.environ))
            stack.callback(client.close)
            clients.append(client)
        _await_whole(clients, [room * plan.block_bytes for room in rooms])
        yield clients
        for node in nodes:
            if not node.is_running:
                status = node.process.returncode
                raise node.failed(f"ended during the replay with status {status}")


def _await_whole(clients: Sequence[Client], pools: Sequence[int]) -> None:
    """Wait until every client knows all nodes, and every node may use its whole pool."""
    until = time.monotonic() + SETTLE_S
    for client, pool in zip(clients, pools, strict=True):
        wanted = {"members": len(clients), "home_pool_bytes_usable": pool}
        while not wanted.items() <= client.stats().items():
            if time.monotonic() > until:
                raise DeadlineExceeded("waiting for all nodes to see each other", SETTLE_S)
            time.sleep(POLL_S)


def run_replay(plan: Plan, blocks: int, advance: Callable[[], object]) -> Outcome:
    """Replay with room for so many blocks in all. advance: called after each request."""
    # A warning would be about a machine that is slow because it runs all nodes.
    configure_logging(log_format="console", level="error")
    for number in (signal.SIGTERM, signal.SIGHUP):
        # So that the nodes are ended, and their memory is freed.
        signal.signal(number, signal.default_int_handler)
    rooms = plan.rooms(blocks)
    counted: Counter[str] = Counter()
    with running(plan, rooms) as clients:
        engines = [
            ReplayEngine(client, plan.block_bytes, plan.batch(blocks))
            for client in clients[: plan.prefill]
        ]
        began = time.monotonic()
        answers = play(plan, [engine.serve for engine in engines], advance)
        seconds = time.monotonic() - began
        for client in clients:
            figures = client.stats()
            counted.update({name: n for name, n in figures.items() if isinstance(n, int | float)})
    return Outcome(
        plan,
        blocks,
        answers,
        ideal_hits(plan.requests, blocks),
        ideal_hits_by_node(plan.requests, plan.routed(), rooms),
        counted,
        seconds,
    )
