"""The API reference: what it has of the public names, and how it reads their docstrings."""

from __future__ import annotations

import importlib
import re
import sys
from types import ModuleType
from typing import Any

import pytest

import peercache
from peercache import Client, connector, content, errors
from tests.house.docstrings import with_listed_names
from tests.house.reference_pages import ROOT

API = ROOT / "docs" / "reference" / "api"
SHOWN = {
    name
    for page in sorted(API.glob("*.md"))
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
}


def found(path: str) -> Any:
    """Return what a dotted path names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("package", [peercache, connector, content], ids=lambda each: each.__name__)
def test_every_stable_name_is_on_its_page(package: ModuleType) -> None:
    """By the place of its definition; `errors` has a page of its own."""
    shown = [found(path) for path in SHOWN] + list(vars(errors).values())

    assert [name for name in package.__all__ if getattr(package, name) not in shown] == []


def test_the_table_of_imports_is_complete() -> None:
    """The overview names each stable name, with the package that it is imported from."""
    table = (API / "README.md").read_text()
    rows = "\n".join(line for line in table.splitlines() if line.startswith("| "))

    for package in (peercache, connector, content):
        assert [name for name in package.__all__ if f"`{name}`" not in rows] == []


def test_names_are_loaded_late() -> None:
    """A node does not load what only a client needs; a wrong name is an AttributeError."""
    assert set(peercache.__all__) <= set(dir(peercache))
    with pytest.raises(AttributeError, match="no attribute 'Klient'"):
        getattr(peercache, "Klient")  # noqa: B009 - it is not there
    source = (ROOT / "src" / "peercache" / "__init__.py").read_text()
    assert "peercache.client.client" in sys.modules
    assert not re.findall(r"^from peercache", source, re.MULTILINE)


def test_lines_of_names_are_items() -> None:
    """With their continuation; a sentence after them is a paragraph, and examples stay."""
    text = """Read a page.

keys: names,
      or page keys.
one, other: numbers. True
means yes.
Raises ConfigError.

    with x: y"""

    assert (
        with_listed_names(text)
        == """Read a page.

* `keys`: names,
    or page keys.
* `one`, `other`: numbers. True
    means yes.

Raises ConfigError.

    with x: y"""
    )


def test_docstrings_of_the_client_state_the_deadline_of_lookups() -> None:
    """Those that have the short one: a reader would expect the usual one."""
    for name in ("batch_exists", "contains", "lengths", "touch"):
        assert "`exists_timeout_s`" in str(getattr(Client, name).__doc__), name
