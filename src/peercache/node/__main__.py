"""`python -m peercache.node`: a standalone node."""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import trio

from peercache.config.flags import add_config_flags, config_from_flags
from peercache.config.settings import Config
from peercache.errors import ConfigError, PeerCacheError
from peercache.node.node import Node, Ready, describe
from peercache.observability.log import configure_logging

if sys.version_info < (3, 11):  # pragma: no cover - trio brings it there
    from exceptiongroup import BaseExceptionGroup


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node until SIGTERM or SIGINT; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m peercache.node", description=__doc__)
    parser.add_argument(
        "--ready-file", metavar="FILE", help="write the ready line here too, once the node serves"
    )
    add_config_flags(parser)
    args = parser.parse_args(arguments)
    try:
        config = config_from_flags(args, os.environ)
        configure_logging(log_format=config.log_format, level=config.log_level)
        _use_every_descriptor()
        trio.run(_serve, config, args.ready_file)
    except PeerCacheError as error:
        return _complain([error])
    except BaseExceptionGroup as group:
        errors = describe(group)
        if not all(isinstance(error, PeerCacheError) for error in errors):
            raise
        return _complain(errors)
    return 0


def _use_every_descriptor() -> None:
    """Take as many descriptors as we may have.

    Most systems begin with 1024, for the sake of programs that use select(): a fifth of the
    connections that this node is built for.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _complain(errors: Sequence[BaseException]) -> int:
    for error in errors:
        sys.stderr.write(f"peercache.node: {error}\n")
    return 2


def _calm_the_collector() -> None:
    """Keep Python's garbage collector from stopping the loop.

    A pool of a quarter of a million pages makes one full collection take 0.14 s, for nothing: the
    actors' state has no cycles. Young objects are still collected, those of the start never again.
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
        await node.stopped.wait()
        nursery.cancel_scope.cancel()


async def _stop_on_signal(
    node: Node, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            node.stop()


def _announce(ready: Ready, ready_file: str | None) -> None:
    line = json.dumps(ready.line())
    # The file first: whoever has read the line will find it.
    if ready_file:
        # Whoever waits for the file must never see half of it.
        part = Path(f"{ready_file}.{os.getpid()}.part")
        try:
            part.write_text(line + "\n")
            part.replace(ready_file)
        except OSError as error:
            problem = f"cannot write {ready_file}: {error.strerror}"
            raise ConfigError("ready-file", problem) from error
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
