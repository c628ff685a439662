"""What happens in a run, and when: everything follows from one seed, and nothing else.

A run is a row of storms, in which faults overlap, and calm times between them, in which everything
that a storm has broken is undone: only then is a removal or a stored page sure (checkers.py).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

HOSTS = ("host-a", "host-b", "host-c", "host-d", "host-e")
CLIENTS = 6

STORM_S = (5.0, 10.0)
CALM_S = 11.0
"""Members are back in the views within seconds after it: the rest is calm."""

FAULTS_A_SECOND = 1.0
LASTS_S = (0.5, 8.5)
"""Members are suspect after 3 s of silence, and dead after 6."""
HOUR_S = 3600.0


def key_after(client: int) -> str:
    """Return the key that a client stores when the faults are over."""
    return f"after-{client}"


@attrs.frozen(kw_only=True)
class Fault:
    """One fault. at_s: seconds since the run began. to: hosts (their nodes), or clients."""

    kind: str
    at_s: float
    for_s: float
    to: tuple[str, ...]
    options: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def until_s(self) -> float:
        """When it is undone."""
        return self.at_s + self.for_s

    def __str__(self) -> str:
        """Return it as one line."""
        more = "".join(f" {name}={value}" for name, value in self.options.items())
        return f"{self.at_s:6.1f} s for {self.for_s:4.1f} s: {self.kind} {' '.join(self.to)}{more}"


@attrs.frozen(kw_only=True)
class Plan:
    """A run. settings: flags of every node. clocks: seconds by which each host's clock differs."""

    seed: int
    seconds: float
    settings: Mapping[str, str]
    client_settings: Mapping[str, str]
    clocks: Mapping[str, float]
    faults: Sequence[Fault]
    upgrades: bool = False
    """Nodes start with the build before, and each has this one after its first restart."""


NODE_KINDS = (
    "kill_node", "restart_node", "pause_node", "memory_limit", "few_descriptors", "clock_jump",
    "disk_error", "disk_slow", "disk_hangs", "disk_flips", "disk_full", "shm_full",
)  # fmt: skip
CLIENT_KINDS = ("kill_client", "pause_client")
PAIR_KINDS = ("one_way", "cut", "bad_link", "flapping", "slow_link", "mtu_black_hole")
HOST_KINDS = ("silence", "partition")
DRAWN = NODE_KINDS + CLIENT_KINDS + PAIR_KINDS + HOST_KINDS
STALL, STALL_S = "stall_node", (0.02, 0.3)
"""The loop of a node stalls again and again, for so long: each storm has one."""
KINDS = (*DRAWN, STALL)


def plan(seed: int, seconds: float, only: Sequence[str] = (), *, upgrades: bool = False) -> Plan:
    """Return the run of a seed. only: kinds of faults, if not all; upgrades: each node restarts."""
    rng = random.Random(seed)
    is_small = rng.random() < 0.5
    settings = {
        # Clients write 3 MiB of pages: a small pool evicts all the time.
        "pool-size": "1MiB" if is_small else "32MiB",
        "disk-size": "16MiB" if rng.random() < 0.5 else "64MiB",
        "write-policy": rng.choice(("through", "on_evict")),
        "spill": rng.choice(("true", "false")),
        "copies": rng.choice(("1", "2", "2")),
        "mirror-share": rng.choice(("0.1", "0.3")),
    }
    client_settings = {
        "mirror_pulls": rng.choice(("off", "hot", "all")),
        "verify": rng.choice(("sampled", "full", "generation")),
    }
    # The hosts started at other times: each has a monotonic clock of its own.
    clocks = {host: round(rng.uniform(0, 30 * 24 * HOUR_S)) for host in HOSTS}
    faults: list[Fault] = []
    storms: list[float] = []
    at_s = 2.0
    while at_s + STORM_S[0] + CALM_S <= seconds or not faults:
        storm_s = rng.uniform(*STORM_S)
        storms.append(at_s)
        for _ in range(max(1, round(storm_s * FAULTS_A_SECOND))):
            begin = at_s + rng.uniform(0, storm_s * 0.7)
            for_s = min(rng.uniform(*LASTS_S), at_s + storm_s - begin)
            faults.append(_fault(rng, rng.choice(only or DRAWN), round(begin, 2), round(for_s, 2)))
        at_s += storm_s + CALM_S
    faults = _apart(faults, _upgrades(storms) if upgrades else ())
    if not only:
        faults = _apart(_stalls(seed, storms), faults)
    return Plan(
        seed=seed,
        seconds=max(seconds, at_s),
        settings=settings,
        client_settings=client_settings,
        clocks=clocks,
        faults=faults,
        upgrades=upgrades,
    )


def _upgrades(storms: Sequence[float]) -> list[Fault]:
    """Return a graceful restart of each node, one after the other, over all storms."""
    each = -(-len(HOSTS) // len(storms))
    return [
        Fault(kind="restart_node", at_s=storms[at // each] + at % each, for_s=0.5, to=(host,))
        for at, host in enumerate(HOSTS)
    ]


def _stalls(seed: int, storms: Sequence[float]) -> list[Fault]:
    """Return a node that stalls in each storm, drawn apart: the other faults of a seed stay."""
    rng = random.Random(f"stalls/{seed}")
    return [_fault(rng, STALL, at_s, round(rng.uniform(1.0, STORM_S[0]), 2)) for at_s in storms]


def _fault(rng: random.Random, kind: str, at_s: float, for_s: float) -> Fault:
    options: dict[str, Any] = {}
    to: tuple[str, ...] = (rng.choice(HOSTS),)
    if kind in CLIENT_KINDS:
        to = (str(rng.randrange(CLIENTS)),)
    elif kind in PAIR_KINDS:
        to = tuple(rng.sample(HOSTS, 2))
        options = _link_options(rng, kind)
    elif kind == "partition":
        to = tuple(sorted(rng.sample(HOSTS, rng.choice((1, 2)))))
    elif kind == "silence":
        options = {"way": rng.choice(("out", "in"))}
    elif kind == "clock_jump":
        options = {"by_s": round(rng.choice((-1, 1)) * rng.uniform(1, 30) * HOUR_S)}
    elif kind == "few_descriptors":
        options = {"left": rng.choice((0, 4, 16, 64))}
        if rng.random() < 0.5:
            to = (str(rng.randrange(CLIENTS)),)
    elif kind == STALL:
        options = {"stall_s": round(rng.uniform(*STALL_S), 3)}
    elif kind == "memory_limit":
        options = {"left": f"{rng.choice((64, 512, 4096))}KiB"}
    elif kind.startswith("disk"):
        options = {"way": rng.choice(("r", "w", "b"))}
    return Fault(kind=kind, at_s=at_s, for_s=for_s, to=to, options=options)


def _link_options(rng: random.Random, kind: str) -> dict[str, Any]:
    """Return the fields of `Link` that make a link so."""
    match kind:
        case "bad_link":
            return {
                "loss": round(rng.choice((0.0, 0.01, 0.1, 0.3)), 2),
                "duplicated": rng.choice((0.0, 0.1)),
                "reordered": rng.choice((0.0, 0.1)),
                "delay_s": (delay_s := rng.choice((0.0, 0.005, 0.05, 0.3))),
                "jitter_s": delay_s / 2,
            }
        case "flapping":
            return {"flaps_s": rng.choice((0.1, 0.3, 1.0))}
        case "slow_link":
            return {"rate": rng.choice((125_000, 1_250_000))}  # 1 and 10 Mbit/s.
        case "mtu_black_hole":
            return {"frame_max": rng.choice((600, 1400))}
        case _:
            return {"is_cut": True}


def _apart(faults: Sequence[Fault], certain: Sequence[Fault] = ()) -> list[Fault]:
    """Return the faults by time, without those that meet another one of their mechanism."""
    kept: list[Fault] = list(certain)
    for fault in sorted(faults, key=lambda each: each.at_s):
        if not any(
            other.until_s > fault.at_s
            and other.at_s < fault.until_s
            and mechanism(other) == mechanism(fault)
            and set(other.to) & set(fault.to)
            for other in kept
        ):
            kept.append(fault)
    return sorted(kept, key=lambda each: each.at_s)


def mechanism(fault: Fault) -> str:
    """Return what undoing a fault resets: two of these at one target would undo each other."""
    if fault.kind in PAIR_KINDS + HOST_KINDS:
        return "network"
    if fault.kind in CLIENT_KINDS:
        return "client"
    if fault.kind in {"kill_node", "restart_node", "pause_node", "memory_limit", STALL}:
        return "process"
    return "slabs" if fault.kind in {"disk_error", "disk_slow", "disk_hangs", "disk_flips"} else (
        fault.kind
    )  # fmt: skip
