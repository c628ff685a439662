"""Options that several commands take: settings, sizes, --json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from peercache.config.quantities import parse_size
from peercache.config.settings import SETTINGS
from peercache.config.table import Setting

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


def settings_options(command: Callback) -> Callback:
    """Add `--config FILE` and a flag for every setting; the callback gets them as keywords."""
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
