"""`peercache version` and `peercache completion`: versions, and completion for shells."""

from __future__ import annotations

import json

import click

from peercache.cli.options import json_option
from peercache.installation.library import version as distribution_version
from peercache.wire.envelope import WIRE_VERSION, WIRE_VERSION_OLDEST, versions_spoken


@click.command
@json_option
def version(*, as_json: bool) -> None:
    """Print the versions of the package and of the wire."""
    if as_json:
        wire = [WIRE_VERSION_OLDEST, WIRE_VERSION]
        print(json.dumps({"version": distribution_version(), "wire": wire}))
        return
    print(f"peercache {distribution_version()} (wire version {versions_spoken()})")


@click.command
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completions of a shell: eval "$(peercache completion bash)" in ~/.bashrc."""
    from click.shell_completion import get_completion_class  # noqa: PLC0415 - only for a shell

    kind = get_completion_class(shell)
    assert kind is not None, "click has lost a shell"
    print(kind(context.find_root().command, {}, "peercache", "_PEERCACHE_COMPLETE").source())
