"""Groups of commands: a command is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class LateGroup(click.Group):
    """A group of commands, each of which is imported when it is chosen.

    So `peercache version` starts quickly, and works even if the modules of a node cannot be
    imported.
    """

    def __init__(
        self,
        *,
        help: str,  # noqa: A002 - click's name
        sections: Mapping[str, Mapping[str, tuple[str, str]]],
        params: list[click.Parameter],
    ) -> None:
        """sections: by title, and by command name: "module:attribute" and a line of help."""
        super().__init__(help=help, no_args_is_help=False, params=params)
        self._sections = sections
        self._table = {name: row for rows in sections.values() for name, row in rows.items()}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Print the help if there is no argument."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names, in the order of the table."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command; None for an unknown name."""
        if cmd_name not in self._table:
            return None
        module, _, attribute = self._table[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        command.short_help = self._table[cmd_name][1]
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names; suggest similar names."""
        if args[0] not in self._table and not args[0].startswith("-"):
            similar = get_close_matches(args[0], self._table)
            meant = f" Did you mean {' or '.join(similar)}?" if similar else ""
            ctx.fail(f"No such command {args[0]!r}.{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands by section, without importing them."""
        widest = max(map(len, self._table))
        for title, rows in self._sections.items():
            with formatter.section(title):
                # One column for all sections.
                formatter.write_dl([(f"{name:{widest}}", line) for name, (_, line) in rows.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of commands without importing them, and options."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415 - only for a shell

        names = [
            CompletionItem(name, help=line)
            for name, (_, line) in self._table.items()
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)
