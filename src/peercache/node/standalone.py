"""A node as a process of its own: its limits, its ready line, its end by a signal."""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import signal
import sys
from pathlib import Path

import trio

from peercache.config.settings import Config
from peercache.errors import ConfigError
from peercache.node.node import Node
from peercache.node.ready import Ready
from peercache.node.supervisor import READY, STOPPING, notify

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SIGHUP is a terminal that was closed. There is nothing to read again: new certificate files are
used without a signal."""

IGNORED = (signal.SIGUSR1, signal.SIGUSR2)
"""Log rotation and supervisors send them by mistake; their default ends a process uncleaned."""

DESCRIPTORS_MIN = 256
"""A node, its home clients and a handful of peers take so many descriptors; with fewer it refuses
connections at random."""


def run_standalone(config: Config, ready_file: str | None) -> None:
    """Run a node until one of STOPS; write its ready line to stdout, and to a file if named.

    Raises what keeps the node from serving, mostly in an exception group.
    """
    if (descriptors := _use_every_descriptor()) < DESCRIPTORS_MIN:
        raise ConfigError(
            "ulimit -n",
            f"{descriptors} open files are too few for a node, which wants {DESCRIPTORS_MIN} at "
            "least: `ulimit -n 65536`  (systemd: LimitNOFILE=65536; docker: --ulimit nofile=65536)",
        )
    trio.run(_serve, config, ready_file)


def _use_every_descriptor() -> float:
    """Raise the soft limit of descriptors to the hard one, and return it.

    Most systems begin with 1024, for programs that use select(): a fifth of the connections that
    this node is built for.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return math.inf if hard == resource.RLIM_INFINITY else hard


def _calm_the_collector() -> None:
    """Keep Python's garbage collector from stopping the loop.

    In a pool of a quarter of a million pages one full collection takes 0.14 s and frees nothing:
    the actors' state has no cycles. Young objects are still collected, those of the start never.
    """
    gc.freeze()
    gc.set_threshold(10_000, 50, 1_000_000)


async def _serve(config: Config, ready_file: str | None) -> None:
    node = Node(config, in_process=False)
    async with trio.open_nursery() as nursery:
        await nursery.start(_stop_on_signal, node)
        ready: Ready = await nursery.start(node.run)
        _calm_the_collector()
        _announce(ready, ready_file)
        notify(READY, node.log)
        await node.stopped.wait()
        nursery.cancel_scope.cancel()


async def _stop_on_signal(
    node: Node, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(*STOPS, *IGNORED) as signals:
        task_status.started()
        async for number in signals:
            if number in STOPS:
                notify(STOPPING, node.log)
                node.stop()
            else:
                node.log.warning("node.signal_ignored", signal=signal.Signals(number).name)


def _announce(ready: Ready, ready_file: str | None) -> None:
    line = json.dumps(ready.line())
    # The file first: a program that has read the line finds the file.
    if ready_file:
        # Renamed into place: a program that waits for the file never reads half of it.
        part = Path(f"{ready_file}.{os.getpid()}.part")
        try:
            part.write_text(line + "\n")
            part.replace(ready_file)
        except OSError as error:
            problem = f"cannot write {ready_file}: {error.strerror}"
            raise ConfigError("ready-file", problem) from error
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
