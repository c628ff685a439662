"""The public names of this checkout: what programs, scripts and dashboards of users refer to."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import os
import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest import mock

import peercache
from peercache import Client, connector, content, errors

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "docs" / "reference"

COMMANDS = (
    "demo", "bench", "bench disk", "bench serve", "bench drive", "bench replay", "doctor",
    "certs init", "certs issue", "certs revoke", "certs show",
    "status", "top", "members", "events", "drain", "slow", "slo", "size",
    "get", "set", "exists", "keys", "retain", "rm", "clear",
    "node", "health", "disk", "disk check", "disk stats", "config", "version",
)  # fmt: skip


CLASSES: dict[type[Any], str] = {
    connector.RemoteKVConnector: "register_kv_buffers num_external_matched_tokens "
    "retrieve_kv_async store_kv_async finish_req close",
    peercache.Chain: "digests keys salted",
    peercache.ClusterFollower: "next close",
    peercache.Index: "apply holders nodes pages prefix",
    peercache.Namespace: "of digest",
    peercache.Operator: "status statuses close",
    peercache.Overlap: "run stored pages",
    peercache.Target: "of",
}
"""In addition to `Client`: the methods that the API reference describes."""


@functools.cache
def names() -> dict[str, Any]:
    """Return all public names, in kinds."""
    return {
        "peercache": sorted(peercache.__all__),
        "peercache.connector": sorted(connector.__all__),
        "peercache.content": sorted(content.__all__),
        "Client": methods_of(Client),
        "classes": {
            kind.__name__: {name: methods_of(kind)[name] for name in methods.split()}
            for kind, methods in CLASSES.items()
        },
        "PeerCacheStore": store_methods(),
        "errors": {
            name: [base.__name__ for base in inspect.getmro(kind)[1:] if base is not object]
            for name, kind in vars(errors).items()
            if inspect.isclass(kind) and issubclass(kind, errors.PeerCacheError)
        },
        "error facts": {row[0]: row[1] for row in table("errors.md", "exception")},
        "settings": {row[0]: row[1:4] for row in table("configuration.md", "setting")},
        "metrics": {row[0]: row[1:3] for row in table("metrics.md", "metric")},
        "miss reasons": sorted(row[0] for row in table("metrics.md", "reason")),
        "commands": {command: flags_of(command) for command in COMMANDS},
    }


def table(page: str, head: str) -> list[list[str]]:
    """Return the rows of the table whose first column has this head; `make docs` makes them.

    tests/house/test_docs.py keeps the pages equal to the code.
    """
    rows: list[list[str]] = []
    inside = False
    for line in (REFERENCE / page).read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            inside = False
        elif cells[0] == head:
            inside = True
        elif inside and set(cells[0]) != {"-"}:
            rows.append(cells)
    return rows


def methods_of(kind: type[Any]) -> dict[str, list[str]]:
    """Return the parameters of each public method."""
    return {
        name: [str(one.replace(annotation=one.empty)) for one in parameters_of(kind, name)]
        for name, method in inspect.getmembers(kind)
        if callable(method) and not name.startswith("_")
    }


def parameters_of(kind: type[Any], name: str) -> list[inspect.Parameter]:
    """Return the parameters of a method, `self` and `cls` left out."""
    signature = inspect.signature(getattr(kind, name))
    return [one for one in signature.parameters.values() if one.name not in ("self", "cls")]


def store_methods() -> dict[str, list[str]]:
    """Return the parameters of each public method of PeerCacheStore; SGLang need not be there."""
    source = (ROOT / "src" / "peercache" / "sglang" / "store.py").read_text()
    kinds = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    store = next(kind for kind in kinds if kind.name == "PeerCacheStore")
    found = {}
    for node in store.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            given = node.args
            plain = [one.arg for one in given.posonlyargs + given.args + given.kwonlyargs]
            more = [f"*{one.arg}" for one in (given.vararg, given.kwarg) if one]
            found[node.name] = [name for name in plain if name != "self"] + more
    return found


def flags_of(command: str) -> list[str]:
    """Return the flags that a command lists in its help, and in its complete one."""
    found = _flags_in(command, "--help")
    return _flags_in(command, "--help-all") if "--help-all" in found else found


def _flags_in(command: str, wanted: str) -> list[str]:
    main = next(iter(entry_points(group="console_scripts", name="peercache"))).load()
    said = io.StringIO()
    argv = ["peercache", *command.split(), wanted]
    wide = {"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}
    with (
        mock.patch.dict(os.environ, wide),
        mock.patch("sys.argv", argv),
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
    ):
        main()
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", said.getvalue())))
