"""Contexts: named clusters of one user, so that an operator types `--context prod` and no address.

    # ~/.config/peercache/contexts.toml
    [prod]
    at = "10.0.0.7:31998"
    cluster = "prod"
    tls_ca = "prod/ca.pem"
    tls_cert = "prod/operator.pem"
    tls_key = "prod/operator.key"

A file that is wrong anywhere is refused as a whole, by one sentence with the line.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peercache.config.quantities import DEFAULT_CONTROL_PORT, parse_address
from peercache.config.settings import SETTINGS
from peercache.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same library under its name before 3.11
    import tomli as tomllib

AT = "at"
"""The address of a context: HOST:PORT, or ipc://PATH of a home."""

FILES = ("tls_ca", "tls_cert", "tls_key", "tls_crl")
KNOWN = (AT, "cluster", *FILES)
"""What a context has. Paths of files begin at the folder of the file of contexts."""

BYTES_MAX = 2**20


def contexts_file(environment: Mapping[str, str]) -> Path:
    """Return the path of the file of contexts in this user's configuration folder."""
    folder = environment.get("XDG_CONFIG_HOME", "")
    base = Path(folder) if folder.startswith("/") else Path("~/.config").expanduser()
    return base / "peercache" / "contexts.toml"


def read_contexts(path: Path) -> dict[str, dict[str, str]]:
    """Return the contexts in a file, by name; raise ConfigError for a wrong one."""
    try:
        with path.open("rb") as file:
            raw = file.read(BYTES_MAX)
    except OSError as error:
        raise ConfigError("context", f"cannot read {path}: {error.strerror}") from error
    try:
        text = raw.decode()
        found = tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError("context", f"{path}, line {line}: not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        what, _, place = str(error).partition(" (at ")
        named = re.match(r"line (\d+)", place)
        line = int(named[1]) if named else len(text.splitlines())
        raise ConfigError("context", f"{path}, line {line}: {what}") from error
    return {name: _read(path, text, name, values) for name, values in found.items()}


def context_named(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return a context; raise ConfigError if there is none of this name."""
    path = contexts_file(environment)
    contexts = read_contexts(path)
    if name not in contexts:
        known = ", ".join(contexts) or "none"
        raise ConfigError("context", f"{path} has no context {name!r}; it has {known}")
    return contexts[name]


def _read(path: Path, text: str, name: str, values: Any) -> dict[str, str]:
    """Return the values of one context, with paths of files from the root."""

    def wrong(key: str, problem: str) -> ConfigError:
        return ConfigError("context", f"{path}, line {_line_of(text, name, key)}: {problem}")

    if not isinstance(values, dict):
        raise wrong("", f"{name} is in no context: write [NAME] above it")
    for key, value in values.items():
        if key not in KNOWN:
            raise wrong(key, f"a context has no {key}; it has {', '.join(KNOWN)}")
        if not isinstance(value, str) or not value:
            raise wrong(key, f"{key} must be a text, and not empty")
        try:
            _check(key, value)
        except (ConfigError, ValueError) as error:
            raise wrong(key, f"{key} {getattr(error, 'problem', error)}") from error
    if AT not in values:
        raise wrong("", f'the context {name} has no address: add {AT} = "HOST:PORT"')
    folder = path.parent
    return {
        key: str(folder / Path(value).expanduser()) if key in FILES else value
        for key, value in values.items()
    }


def _check(key: str, value: str) -> None:
    """Raise a ConfigError or ValueError for an invalid value."""
    if key == AT and not value.startswith("ipc://"):
        parse_address(value, default_port=DEFAULT_CONTROL_PORT)
    elif key in SETTINGS:
        SETTINGS[key].parse(value)


def _line_of(text: str, name: str, key: str) -> int:
    """Return the number of the line with a key of a context; else that of the context's head."""
    head, opened = 0, None
    for number, line in enumerate(text.splitlines(), 1):
        if table := re.match(r"\s*\[\s*(.*?)\s*\]", line):
            opened = table[1].strip("\"'")
            head = number if opened == name else head
        elif key and opened == name and _begins_with(line, key):
            return number
        elif opened is None and _begins_with(line, name):
            head = number
    return head


def _begins_with(line: str, key: str) -> bool:
    return re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line) is not None
