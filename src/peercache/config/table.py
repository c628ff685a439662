"""A row of the table of settings: how a value is written, and which values are allowed.

`settings.Config` is the table itself. Flags, TOML, environment, SGLang's JSON, the reference pages
and the validation all read these rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs

from peercache.config import quantities
from peercache.config.entries import (
    parse_discovery,
    parse_engines,
    parse_quotas,
    written_engines,
    written_quotas,
)
from peercache.errors import ConfigError

ENVIRONMENT_PREFIX = "PEERCACHE_"


@attrs.frozen
class Kind:
    """How values of one kind are written.

    metavar: the placeholder of the value in `--help`.
    parse:   returns the value; raises a ValueError or TypeError that explains what is allowed.
    written: writes a value so that `parse` reads it.
    measure, unit: the quantity that the bounds limit, and its unit.
    """

    metavar: str
    parse: Callable[[Any], Any]
    written: Callable[[Any], str] = str
    measure: Callable[[Any], Any] = attrs.field(default=lambda value: value)
    unit: str = ""


TEXT = Kind("TEXT", quantities.parse_text, measure=len, unit=" characters")
FOLDER = attrs.evolve(TEXT, metavar="FOLDER")
FILE = attrs.evolve(TEXT, metavar="FILE")
HOST = attrs.evolve(TEXT, metavar="HOST")
LISTEN = Kind("HOST:PORT", quantities.parse_listen)
PEERS = Kind("HOST:PORT[,HOST:PORT...]", parse_discovery, ",".join)
HOME = Kind("ipc://PATH", quantities.parse_ipc)
USERS = Kind("USER[,USER...]", quantities.parse_users, ",".join)
DEVICES = Kind("DEVICE[,DEVICE...]", quantities.parse_names, ",".join)
NETWORKS = Kind("NETWORK[,NETWORK...]", quantities.parse_networks, ",".join)
QUOTAS = Kind("NAME=SHARE[;NAME=SHARE...]", parse_quotas, written_quotas)
ENGINES = Kind("NAME=ENDPOINT[+REPLAY][,...]", parse_engines, written_engines)
SIZE = Kind("SIZE", quantities.parse_size, quantities.exact_size)
POWER_OF_TWO = Kind("SIZE", quantities.parse_power_of_two, quantities.exact_size)
WHOLE = Kind("N", quantities.parse_whole)
REPLICAS = Kind(
    "N",
    quantities.parse_replicas,
    measure=lambda value: 1 if value == quantities.AUTO else value,
)
SECONDS = Kind("DURATION", quantities.parse_seconds)
MILLISECONDS = Kind("MILLISECONDS", quantities.parse_milliseconds)
SHARE = Kind("SHARE", quantities.parse_share)
SWITCH = Kind("true|false", quantities.parse_switch, lambda value: str(value).lower())


def choice(*choices: str) -> Kind:
    """Return the kind of a text with a few allowed values."""

    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return str(value)

    return Kind("|".join(choices), parse)


def environment_name(name: str) -> str:
    """Return the environment variable of a setting."""
    return ENVIRONMENT_PREFIX + name.upper()


@attrs.frozen(kw_only=True)
class Setting:
    """One setting.

    low, high: the bounds that belong to the allowed values; above, below: those that do not.
    aliases: other spellings of the flag.
    """

    name: str = ""
    kind: Kind
    default: Any
    help: str
    low: Any = None
    high: Any = None
    above: Any = None
    below: Any = None
    aliases: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The flag: `pool_size` is `--pool-size`."""
        return "--" + self.name.replace("_", "-")

    @property
    def environment(self) -> str:
        """The environment variable: `pool_size` is `PEERCACHE_POOL_SIZE`."""
        return environment_name(self.name)

    @property
    def choices(self) -> list[str]:
        """The allowed texts of a choice, [] for other settings."""
        return self.kind.metavar.split("|") if "|" in self.kind.metavar else []

    @property
    def written_default(self) -> str:
        """The default as written for a flag; "" for none."""
        return self.kind.written(self.default)

    @property
    def toml_default(self) -> str:
        """The default as TOML."""
        if isinstance(self.default, tuple):
            return json.dumps(list(self.default))
        written = self.written_default
        is_text = isinstance(self.default, str) or (
            self.kind.written is quantities.exact_size and not written.isdigit()
        )
        return json.dumps(written) if is_text else json.dumps(self.default)

    @property
    def allowed(self) -> str:
        """The bounds in words, "" for none."""
        unit = self.kind.unit
        write = str if unit else self.kind.written
        parts = []
        if self.low is not None and self.high is not None:
            parts.append(f"{write(self.low)} to {write(self.high)}{unit}")
        elif self.low is not None:
            parts.append(f"{write(self.low)} or more{unit}")
        if self.above is not None:
            parts.append(f"more than {write(self.above)}{unit}")
        if self.below is not None:
            parts.append(f"less than {write(self.below)}{unit}")
        return ", ".join(parts)

    @property
    def meaning(self) -> str:
        """The help, and the allowed values."""
        if self.choices and self.kind is not SWITCH:
            return f"{self.help} One of {', '.join(self.choices)}."
        return f"{self.help} Allowed: {self.allowed}." if self.allowed else self.help

    def parse(self, value: Any) -> Any:
        """Return the value that the configuration keeps; raise ConfigError for a wrong one."""
        shown = f"{value!r}: "
        try:
            parsed = self.kind.parse(value)
        except (ValueError, TypeError) as error:
            raise ConfigError(self.name, f"{shown}{error}") from error
        measured = self.kind.measure(parsed)
        is_allowed = (
            (self.low is None or measured >= self.low)
            and (self.high is None or measured <= self.high)
            and (self.above is None or measured > self.above)
            and (self.below is None or measured < self.below)
        )
        if not is_allowed:
            raise ConfigError(self.name, f"{shown}must be {self.allowed}")
        return parsed


def setting(kind: Kind, default: Any, help_text: str, **more: Any) -> Any:
    """Return the configuration field that one row of the table describes."""
    row = Setting(kind=kind, default=default, help=help_text, **more)
    return attrs.field(default=default, kw_only=True, metadata={"row": row})


def switch(help_text: str, *, is_on: bool = False) -> Any:
    """Return the field of a setting that is on or off, by default `is_on`."""
    return setting(SWITCH, is_on, help_text)
