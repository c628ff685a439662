"""`peercache node` and `python -m peercache.node`: a standalone node from its flags."""

from __future__ import annotations

import os
import sys

import click

from peercache.cli.main import run
from peercache.cli.options import SettingsCommand, settings_options
from peercache.config.settings import Config
from peercache.errors import PeerCacheError
from peercache.node.runner import describe, run_standalone
from peercache.observability.log import configure_logging

if sys.version_info < (3, 11):  # pragma: no cover - trio brings it there
    from exceptiongroup import BaseExceptionGroup


@click.command(cls=SettingsCommand)
@click.option(
    "--ready-file", metavar="FILE", help="Write the ready line here too, once the node serves."
)
@settings_options
def node(config: str | None, ready_file: str | None, **settings: str | None) -> None:
    """Run a standalone node until SIGTERM or SIGINT."""
    loaded = Config.load(settings, file=config, environment=os.environ)
    configure_logging(log_format=loaded.log_format, level=loaded.log_level)
    try:
        run_standalone(loaded, ready_file)
    except BaseExceptionGroup as group:
        errors = describe(group)
        if not all(isinstance(error, PeerCacheError) for error in errors):
            raise
        raise PeerCacheError("; ".join(map(str, errors))) from group


def main() -> int:
    """Run `python -m peercache.node` and return its exit status."""
    return run(node, "peercache.node", sys.argv[1:])
