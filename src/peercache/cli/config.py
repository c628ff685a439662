"""`peercache config`: the table of settings, for people and as a TOML file."""

from __future__ import annotations

import json
import textwrap

import click
from rich.text import Text

from peercache.cli.options import json_option
from peercache.cli.terminal import console, table
from peercache.config.settings import SETTINGS


@click.command
@click.option("--toml", is_flag=True, help="Print an example file instead.")
@json_option
def config(*, toml: bool, as_json: bool) -> None:
    """List every setting, its default and meaning."""
    if as_json:
        rows = {
            name: {"default": row.written_default, "meaning": row.meaning}
            for name, row in SETTINGS.items()
        }
        print(json.dumps(rows))
        return
    if toml:
        print(example_toml(), end="")
        return
    shown = table("setting", "default", "meaning")
    for name, row in SETTINGS.items():
        shown.add_row(Text(name, "bold"), Text(row.written_default), Text(row.meaning))
    console().print(shown)
    row = SETTINGS["pool_size"]
    print(
        f"\nA setting is a flag ({row.flag}), an environment variable ({row.environment}), a line "
        "of the TOML file,\na keyword of Client.open, and a key of SGLang's extra-config JSON."
    )


def example_toml() -> str:
    """Return a TOML file with every setting at its default, commented out."""
    lines = [
        "# Settings of PeerCache: uncomment what you change.",
        "# A flag (--pool-size) or the environment (PEERCACHE_POOL_SIZE) wins over this file.",
    ]
    for name, row in SETTINGS.items():
        lines += ["", *(f"# {line}" for line in textwrap.wrap(row.meaning, 97))]
        lines.append(f"# {name} = {row.toml_default}")
    return "\n".join(lines) + "\n"
