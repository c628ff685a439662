"""How an operator's commands reach a node: their flags. The rest is `client.operator`.

A command names a node with --at, or a cluster with --context. Without them, it takes the home
address of a node of this host, or the default port of this host.
"""

from __future__ import annotations

import os
from typing import Any

import click
from click.shell_completion import CompletionItem

from peercache.cli.options import Callback, DurationType, alone
from peercache.client.operator import TIMEOUT_S, Operator, Target
from peercache.config.contexts import AT, contexts_file, read_contexts
from peercache.config.settings import SETTINGS
from peercache.errors import PeerCacheError
from peercache.observability.log import configure_logging

COMPLETE_S = 1.5
"""How long a person waits for a Tab."""

CONTEXT_VARIABLE = "PEERCACHE_CONTEXT"
"""The environment variable of --context."""

_FLAGS = ("cluster", "insecure", "tls_ca", "tls_cert", "tls_key", "tls_crl", "home")
"""The settings for reaching a cluster, and for the identity used there."""


def complete_members(
    ctx: click.Context,
    param: click.Parameter,  # noqa: ARG001 - click's signature
    incomplete: str,
) -> list[CompletionItem]:
    """Return the control addresses of the members; none if no node of this host answers."""
    given = {name: ctx.params.get(name) for name in _FLAGS if name != "home"}
    try:
        given |= {name: ctx.params.get(name) for name in ("config", "context")}
        target = target_of(at=None, timeout_s=COMPLETE_S, **given)
        with Operator(target) as operator:
            members = operator.statuses()
    except (PeerCacheError, OSError):
        return []
    return [
        CompletionItem(member.status.name, help=member.status.state)
        for member in members
        if member.status.name.startswith(incomplete)
    ]


def complete_contexts(
    ctx: click.Context,  # noqa: ARG001 - click's signature
    param: click.Parameter,  # noqa: ARG001
    incomplete: str,
) -> list[CompletionItem]:
    """Return the names of this user's contexts; none without a valid file of them."""
    try:
        contexts = read_contexts(contexts_file(os.environ))
    except PeerCacheError:
        return []
    return [
        CompletionItem(name, help=context[AT])
        for name, context in contexts.items()
        if name.startswith(incomplete)
    ]


def target_options(command: Callback) -> Callback:
    """Add --at, --context, --timeout, --config and the settings by which a node is reached."""
    for name in reversed(_FLAGS):
        row = SETTINGS[name]
        option = click.option(
            name, row.flag, metavar=row.kind.metavar, help=row.meaning, **alone(row)
        )
        command = option(command)
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
            "--context",
            envvar=CONTEXT_VARIABLE,
            metavar="NAME",
            shell_complete=complete_contexts,
            help="The cluster of this name in ~/.config/peercache/contexts.toml: its address and "
            f"certificates. Flags, the environment and --config override it; {CONTEXT_VARIABLE} "
            "sets it.",
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
