"""Where values of settings come from: each keeps its source, which an error about it names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, final

import attrs

from peercache.config.table import ENVIRONMENT_PREFIX, environment_name
from peercache.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same library under its name before 3.11
    import tomli as tomllib

MISSPELT = 0.78
"""How similar to a setting a variable must be, without the prefix, to be taken for a mistake. Other
tools set variables under the same prefix, and so does Kubernetes for a service of this name:
PEERCACHE_SERVICE_PORT is 0.75 like metrics_port."""


@final
@attrs.define(eq=False)
class Given:
    """The values that were given, and the source of each: the last source of a name wins."""

    values: dict[str, Any] = attrs.field(factory=dict)
    _sources: dict[str, str] = attrs.field(factory=dict)

    def add(
        self, values: Mapping[str, Any], source_of: Callable[[str], str] = lambda _: ""
    ) -> None:
        """Take values over those of earlier sources. source_of: of a setting's name."""
        self.values |= values
        self._sources |= {name: source_of(name) for name in values}

    def located(self, error: ConfigError) -> ConfigError:
        """Return the error with the source of the value that it names.

        A flag or an argument has the setting's own name, which the error says anyway.
        """
        source = self._sources.get(error.name, "")
        return ConfigError(error.name, f"{error.problem} (in {source})") if source else error


def from_environment(
    environment: Mapping[str, str], known: Collection[str], removed: Collection[str]
) -> dict[str, str]:
    """Return the values of settings that variables hold; raise ConfigError for a misspelt one."""
    found = {}
    for variable, value in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        is_spelt = environment_name(name) == variable
        if is_spelt and (name in known or name in removed):
            found[name] = value
        elif meant := get_close_matches(name, known, n=1, cutoff=MISSPELT):
            problem = f"no setting has this variable: is {environment_name(meant[0])} meant?"
            raise ConfigError(variable, problem)
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """Return the settings of a TOML file; raise ConfigError for one that cannot be read."""
    try:
        with path.open("rb") as file:
            settings: dict[str, Any] = tomllib.load(file)
    except OSError as error:
        raise ConfigError("config", f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError("config", f"cannot read {path}: {error}") from error
    for name, value in settings.items():
        if isinstance(value, dict):
            raise ConfigError("config", f"{path} has a table [{name}]: settings stand in none")
    return settings
