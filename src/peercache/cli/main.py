"""The entry point of the `peercache` command: its table of commands, and the handling of errors.

Exit statuses: 0 done, 1 the command found something wrong, 2 a wrong flag, setting or environment,
130 after Ctrl-C, 141 where the reader of the output has gone.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence

import click

from peercache.cli.groups import LateGroup
from peercache.errors import PeerCacheError
from peercache.installation import library

EXIT_WRONG_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

COMPLETION = "_PEERCACHE_COMPLETE"
"""The environment variable by which a shell asks for completions."""


def _print_version(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:  # noqa: FBT001 - click's signature
    if is_wanted and not context.resilient_parsing:
        command = peercache.get_command(context, "version")
        assert command is not None, "there is a command `version`"
        context.invoke(command, as_json=False)
        context.exit()


peercache = LateGroup(
    help="Peer-to-peer store for the KV cache of language-model servers.",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Print the versions.",
        )
    ],
    sections={
        "Run a node": {
            "node": ("peercache.cli.node:node", "Run a standalone node."),
            "health": ("peercache.cli.health:health", "Check whether this host's node serves."),
            "doctor": ("peercache.cli.doctor.checks:doctor", "Check this host."),
            "config": ("peercache.cli.config:config", "List every setting."),
        },
        "Operate a cluster": {
            "status": ("peercache.cli.operate.status:status", "Show the state of each member."),
            "members": ("peercache.cli.operate.members:members", "List the members of a cluster."),
            "top": ("peercache.cli.operate.top:top", "Show the rates of each member, live."),
            "events": (
                "peercache.cli.operate.events:events",
                "Show which pages nodes store and drop, live.",
            ),
            "slow": ("peercache.cli.operate.slow:slow", "Show the slowest calls of the last hour."),
            "slo": (
                "peercache.cli.operate.slo:slo",
                "Compare calls with their latency objectives.",
            ),
            "size": (
                "peercache.cli.operate.size:size",
                "Estimate hit rates with other memory sizes.",
            ),
            "drain": (
                "peercache.cli.operate.drain:drain",
                "Hand a node's pages over, and stop it.",
            ),
        },
        "Pages": {
            "get": ("peercache.cli.operate.pages:get_command", "Read a page."),
            "set": ("peercache.cli.operate.pages:set_command", "Store a page at this host's node."),
            "exists": ("peercache.cli.operate.pages:exists_command", "Check whether pages exist."),
            "keys": ("peercache.cli.operate.keys:keys", "List the pages of a namespace."),
            "retain": (
                "peercache.cli.operate.pages:retain_command",
                "Keep pages in memory for a time.",
            ),
            "rm": ("peercache.cli.operate.pages:remove_command", "Remove pages from every node."),
            "clear": ("peercache.cli.operate.clear:clear", "Remove a namespace from every node."),
        },
        "Certificates and disks": {
            "certs": ("peercache.cli.certs:certs", "Certificates: make, issue, revoke, show."),
            "disk": ("peercache.cli.disk:disk", "Inspect and check a disk_path."),
        },
        "Try and measure": {
            "demo": ("peercache.cli.demo.story:demo", "Try a cluster of three nodes on this host."),
            "bench": (
                "peercache.cli.bench.command:bench",
                "How fast pages move on this machine.",
            ),
        },
        "About the program": {
            "completion": ("peercache.cli.version:completion", "Print the completions of a shell."),
            "version": ("peercache.cli.version:version", "Print the versions."),
        },
    },
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `peercache` and return its exit status."""
    if instruction := os.environ.get(COMPLETION):
        from click.shell_completion import shell_complete  # noqa: PLC0415 - only for a shell

        return shell_complete(peercache, {}, "peercache", COMPLETION, instruction)
    return run(peercache, "peercache", sys.argv[1:] if arguments is None else arguments)


def run(command: click.Command, program: str, arguments: Sequence[str]) -> int:
    """Run a command and return its exit status; print each error as one sentence."""
    try:
        library.load()  # First: an incomplete installation runs no command.
        with command.make_context(program, list(arguments)) as context:
            status = command.invoke(context)
            sys.stdout.flush()
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else program
        print(f"{program}: {error.format_message()} See `{path} --help`.", file=sys.stderr)
        return EXIT_WRONG_USAGE
    except PeerCacheError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return EXIT_WRONG_USAGE
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return EXIT_BROKEN_PIPE
    return int(status or 0)


def _reader_is_gone() -> bool:
    """Return whether the reader of our output has gone, as after `peercache config | head`."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    is_gone = any(event & select.POLLERR for _, event in output.poll(0))
    if is_gone:
        # Python flushes once more at exit, and would report an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_gone
