"""Every server that a page of the documentation starts: SGLang and PeerCache know all it is given.

test_sglang_pages.py and test_sglang_three_hosts.py start some of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from peercache.config.settings import Config
from peercache.sglang import plugin
from tests.integration.test_sglang_plugin import Registry
from tests.shown import BLOCK, ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SERVER = ["-m", "sglang.launch_server"]
PRINTS = """python() { "$PYTHON" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@"; }"""
STORAGE = "hicache_storage_backend_extra_config"
LINKER = "unified_cache_external_linker_config"


def servers() -> list[Any]:
    """Return the arguments of each server, as its block's shell passes them."""
    found = []
    for page in PAGES:
        for language, text in BLOCK.findall(page.read_text()):
            if language != "sh" or SERVER[1] not in text:
                continue
            # The file with the variables is shown on the same page.
            block = text.replace(". /etc/peercache/sglang.sh", variables_of(page.read_text()))
            done = subprocess.run(
                ["bash", "-e", "-c", f"{PRINTS}\n{block}"], env={"PYTHON": sys.executable},
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            commands = [json.loads(line) for line in done.stdout.splitlines()]
            for number, words in enumerate(words for words in commands if words[:2] == SERVER):
                found.append(pytest.param(words[2:], id=f"{page.relative_to(ROOT)}-{number}"))
    return found


def variables_of(page: str) -> str:
    """Return the block of a page that sets variables for others, "" for none."""
    blocks = [text for _, text in BLOCK.findall(page)]
    return next((text for text in blocks if "SHARED=" in text and SERVER[1] not in text), "")


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """Return SGLang's parser, with the names that PeerCache registers."""
    registry = Registry()
    monkeypatch.setattr("sglang.srt.plugins.hook_registry.HookRegistry", registry)
    plugin.register()
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    registry.hooks[plugin.ARGUMENTS](None, parser)
    return parser


@pytest.mark.parametrize("words", servers())
def test_flags_and_settings_of_a_shown_server_are_known(
    words: list[str], parser: argparse.ArgumentParser
) -> None:
    """Each flag has a value that SGLang accepts, and each setting one that PeerCache accepts."""
    parsed, unknown = parser.parse_known_args(words)

    assert unknown == []
    storage, linker = getattr(parsed, STORAGE), getattr(parsed, LINKER)
    assert storage or linker
    if storage:
        Config.from_sglang(json.loads(storage))
    else:
        settings = {**linker.get("linker_extra_config", linker)}
        Config.load({name: settings[name] for name in settings if name != "staging_size"})


def test_servers_are_found() -> None:
    """A search that finds nothing proves nothing."""
    assert len(servers()) >= 9
