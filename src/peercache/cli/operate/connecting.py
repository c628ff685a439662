"""How an operator's commands reach a node: their flags. The rest is `client.operator`.

A command names a node with --at. Without it, it takes the home address of a node of this host, or
the default port of this host.
"""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem

from peercache.cli.options import Callback, DurationType
from peercache.client.operator import TIMEOUT_S, Operator, Target
from peercache.config.settings import SETTINGS
from peercache.errors import PeerCacheError
from peercache.observability.log import configure_logging

COMPLETE_S = 1.5
"""How long a person waits for a Tab."""

_FLAGS = ("cluster", "tls_ca", "tls_cert", "tls_key", "tls_crl", "home")
"""The settings for reaching a cluster, and for the identity used there."""


def complete_members(
    ctx: click.Context,
    param: click.Parameter,  # noqa: ARG001 - click's signature
    incomplete: str,
) -> list[CompletionItem]:
    """Return the control addresses of the members; none if no node of this host answers."""
    given = {name: ctx.params.get(name) for name in _FLAGS if name != "home"}
    try:
        target = target_of(at=None, timeout_s=COMPLETE_S, config=ctx.params.get("config"), **given)
        with Operator(target) as operator:
            members = operator.statuses()
    except (PeerCacheError, OSError):
        return []
    return [
        CompletionItem(member.status.name, help=member.status.state)
        for member in members
        if member.status.name.startswith(incomplete)
    ]


def target_options(command: Callback) -> Callback:
    """Add --at, --timeout, --config and the settings by which a node is reached."""
    for name in reversed(_FLAGS):
        row = SETTINGS[name]
        command = click.option(name, row.flag, metavar=row.kind.metavar, help=row.meaning)(command)
    for option in (
        click.option("--config", metavar="FILE", help="TOML file with settings, such as a node's."),
        click.option(
            "--timeout",
            "timeout_s",
            type=DurationType(0.1, 600),
            default=TIMEOUT_S,
            show_default=f"{TIMEOUT_S:g}s",
            metavar="DURATION",
            help="How long the node may take to answer.",
        ),
        click.option(
            "--at",
            metavar="HOST:PORT",
            shell_complete=complete_members,
            help="The node to ask: its control address, or ipc://PATH of its home. "
            "Default: a node of this host.",
        ),
    ):
        command = option(command)
    return command


def target_of(**given: Any) -> Target:
    """Return the target of `target_options`, and set up the log of a command; raise ConfigError."""
    target = Target.of(**given)
    configure_logging(log_format=target.config.log_format, level="error")
    return target
