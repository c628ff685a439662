"""Options that several commands take: settings, sizes, --json."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from peercache.config.quantities import parse_seconds, parse_size, written_duration
from peercache.config.settings import SETTINGS
from peercache.config.table import SWITCH, Setting

Callback = TypeVar("Callback", bound=Callable[..., Any])


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
            self.fail(f"{value!r} must be a multiple of {self._multiple_of}", param, ctx)
        return size


class DurationType(click.ParamType[float]):
    """Seconds, also written 90s, 15m or 10d."""

    name = "duration"

    def __init__(self, low: float = 0.0, high: float = math.inf) -> None:
        """Accept durations from `low` to `high`, in seconds."""
        self._low, self._high = low, high

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the seconds."""
        try:
            seconds = parse_seconds(value)
        except ValueError as error:
            self.fail(f"{value!r} {error}", param, ctx)
        if not self._low <= seconds <= self._high:
            is_open = self._high == math.inf
            end = "or more" if is_open else f"to {written_duration(self._high)}"
            self.fail(f"{value!r} wants {written_duration(self._low)} {end}", param, ctx)
        return seconds


class _SettingType(click.ParamType[str]):
    """The text of a setting as it was written: only `Config` validates it, with the same errors for
    every source.
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


BASIC = frozenset(
    (
        "cluster", "insecure", "discovery_addr", "listen", "data_port", "advertise", "home",
        "tls_ca", "tls_cert", "tls_key", "share_uids", "share_group",
        "pool_size", "disk_enabled", "disk_path", "disk_size",
        "http_listen", "http_open",
    )
)  # fmt: skip
"""Settings that `--help` shows: those that a first cluster needs. `--help-all` shows the others."""


class SettingsCommand(click.Command):
    """A command with a flag for every setting. Its help shows the basic ones."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options; the settings that are not basic only for --help-all."""
        is_whole = ctx.meta.get(_WHOLE, False)
        shown = [
            record
            for parameter in self.get_params(ctx)
            if is_whole or parameter.name not in SETTINGS or parameter.name in BASIC
            if (record := parameter.get_help_record(ctx)) is not None
        ]
        with formatter.section("Options"):
            formatter.write_dl(shown)


def alone(row: Setting) -> dict[str, Any]:
    """Return arguments of click.option: for a switch, `--insecure` alone is `--insecure true`."""
    return {"is_flag": False, "flag_value": "true"} if row.kind is SWITCH else {}


_WHOLE = "peercache.help_all"


def _print_whole_help(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:  # noqa: FBT001 - click's signature
    if is_wanted and not context.resilient_parsing:
        context.meta[_WHOLE] = True
        click.echo(context.get_help())
        context.exit()


def settings_options(command: Callback) -> Callback:
    """Add `--config FILE` and a flag for every setting; the callback gets them as keywords.

    The command is a SettingsCommand.
    """
    command = click.option(
        "--help-all",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_print_whole_help,
        help="Show every setting, and exit.",
    )(command)
    for name, row in reversed(SETTINGS.items()):
        command = click.option(
            name,
            row.flag,
            *row.aliases,
            type=_SettingType(row),
            metavar=row.kind.metavar,
            help=row.meaning,
            **alone(row),
        )(command)
    return click.option(
        "--config",
        metavar="FILE",
        help="TOML file with settings under the names of these flags. The environment "
        "(PEERCACHE_POOL_SIZE) wins over the file, a flag over both.",
    )(command)


_FORMAT = "peercache.format"
TABLE, JSON = "table", "json"


def _note_format(context: click.Context, _: click.Parameter, value: str | None) -> None:
    context.meta[_FORMAT] = value


def _is_json(context: click.Context, _: click.Parameter, value: bool) -> bool:  # noqa: FBT001 - click's signature
    if value and context.meta.get(_FORMAT) == TABLE:
        raise click.UsageError("--json contradicts -w table.")
    return value or context.meta.get(_FORMAT) == JSON


def json_option(command: Callback) -> Callback:
    """Add `-w table|json` and `--json`; the callback gets `as_json`."""
    command = click.option(
        "--json",
        "as_json",
        is_flag=True,
        callback=_is_json,
        help="Print JSON, and no progress: short for -w json.",
    )(command)
    return click.option(
        "-w",
        "--write-out",
        type=click.Choice([TABLE, JSON]),
        is_eager=True,
        expose_value=False,
        callback=_note_format,
        help="The format of the output. Default: table.",
    )(command)
