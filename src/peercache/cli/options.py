"""Parts that commands are made of: options with the types of PeerCache, groups that load late."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from peercache.config.quantities import parse_size
from peercache.config.settings import SETTINGS
from peercache.config.table import Setting

Callback = TypeVar("Callback", bound=Callable[..., Any])


class LateGroup(click.Group):
    """A group whose commands are imported when one is chosen.

    So `peercache version` starts quickly, and works where a node cannot be imported.
    """

    def __init__(self, *, help: str, table: Mapping[str, tuple[str, str]]) -> None:  # noqa: A002 - click's name
        """Take the commands: by name, "module:attribute" and a line of help."""
        super().__init__(help=help, no_args_is_help=False)
        self._table = table

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
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._table.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of commands without importing them, and options."""
        names = [
            CompletionItem(name, help=line)
            for name, (_, line) in self._table.items()
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)


class SizeType(click.ParamType[int]):
    """Bytes, also written 4GiB."""

    name = "size"

    def __init__(self, *, multiple_of: int = 1) -> None:
        """Accept multiples of a number of bytes above 0."""
        self._multiple_of = multiple_of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes."""
        try:
            size = parse_size(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}", param, ctx)
        if size < self._multiple_of or size % self._multiple_of:
            self.fail(f"{value!r} wants a multiple of {self._multiple_of}", param, ctx)
        return size


class _SettingType(click.ParamType[str]):
    """The text of a setting as it was written: only `Config` judges, in the same words for every
    source.
    """

    name = "text"

    def __init__(self, row: Setting) -> None:
        self._row = row

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's signature
        param: click.Parameter,  # noqa: ARG002
        incomplete: str,
    ) -> list[CompletionItem]:
        """Complete the choices of a setting that has some."""
        return [CompletionItem(each) for each in self._row.choices if each.startswith(incomplete)]


def settings_options(command: Callback) -> Callback:
    """Add `--config FILE` and a flag for every setting; the callback gets all by their names."""
    for name, row in reversed(SETTINGS.items()):
        command = click.option(
            name,
            row.flag,
            *row.aliases,
            type=_SettingType(row),
            metavar=row.kind.metavar,
            help=row.meaning,
        )(command)
    return click.option(
        "--config",
        metavar="FILE",
        help="TOML file with settings under the names of these flags. The environment "
        "(PEERCACHE_POOL_SIZE) wins over the file, a flag over both.",
    )(command)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, and no progress.")
