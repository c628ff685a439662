"""The entry point that makes `peercache` a name for SGLang."""

from __future__ import annotations

import argparse
import importlib.util
import logging
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.server_args import ServerArgs

from peercache.sglang import PeerCacheStore, plugin
from tests.integration.engines import installed

HAS_LINKERS = (
    importlib.util.find_spec("sglang.srt.mem_cache.unified_cache") is not None
    and importlib.util.find_spec(plugin.LINKERS) is not None
)


class Registry:
    """What SGLang's plugins register their hooks with."""

    def __init__(self) -> None:
        self.hooks: dict[str, Any] = {}

    def register(self, target: str, hook: Any, kind: Any) -> None:
        self.hooks[target] = hook


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what is registered, by target."""
    from sglang.srt.plugins import hook_registry

    registry = Registry()
    monkeypatch.setattr(hook_registry, "HookRegistry", registry)
    plugin.register()
    return registry.hooks


def test_an_installation_brings_the_entry_point(tmp_path: Path) -> None:
    """SGLang finds it among the distributions of its Python."""
    (found,) = distributions(path=[str(installed(tmp_path))])
    (point,) = found.entry_points.select(group="sglang.srt.plugins")

    assert (point.name, point.load()) == ("peercache", plugin.register)


def test_the_command_line_takes_the_name(hooks: dict[str, Any]) -> None:
    """For a storage backend and a linker; other options are as before."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    named = ["--model-path", "tiny", "--hicache-storage-backend", "peercache"]
    with pytest.raises(SystemExit):
        parser.parse_args(named)
    hooks[plugin.ARGUMENTS](None, parser)
    if HAS_LINKERS:
        named += ["--unified-cache-external-linker-backend", "peercache"]

    parsed = parser.parse_args(named)

    assert parsed.hicache_storage_backend == "peercache"
    assert not HAS_LINKERS or parsed.unified_cache_external_linker_backend == "peercache"
    with pytest.raises(SystemExit):
        parser.parse_args(["--model-path", "tiny", "--hicache-storage-backend", "other"])


def test_a_backend_of_the_name_is_our_class_with_its_own_settings(hooks: dict[str, Any]) -> None:
    """Host buffers are used in place, unless a setting disables it; other names are SGLang's."""
    calls: list[tuple[str, Any]] = []

    def attach(
        self: Any,
        storage_backend: str,
        prefetch_threshold: int = 256,
        model_name: str | None = None,
        storage_backend_extra_config: dict[str, Any] | None = None,
    ) -> None:
        assert prefetch_threshold == 16
        calls.append((storage_backend, storage_backend_extra_config))

    hook = hooks[plugin.ATTACH]
    hook(attach, None, "peercache", prefetch_threshold=16)
    settings = {"home": "ipc:///a", "interface_v1": 0}
    hook(attach, None, "peercache", 16, "model", settings)
    hook(attach, None, storage_backend="file", prefetch_threshold=16)

    (name, first), (_, second), other = calls
    assert name == "dynamic"
    assert first == {"interface_v1": 1, **plugin.STORE}
    assert second == {**settings, **plugin.STORE}
    assert other == ("file", None)
    assert plugin.ATTACH.endswith(HiCacheController.attach_storage_backend.__qualname__)
    assert PeerCacheStore.__name__ == plugin.STORE["class_name"]


@pytest.mark.skipif(not HAS_LINKERS, reason="SGLang before 0.5.23")
def test_a_linker_of_the_name_is_our_class_with_its_own_settings(hooks: dict[str, Any]) -> None:
    """The configuration is that of PeerCache, without the name of the class."""
    created: list[dict[str, Any]] = []

    def create(server_args: Any, params: Any, *, backend: str, config: Any, components: Any) -> str:
        created.append({"backend": backend, "config": config})
        return "linker"

    hook = hooks[f"{plugin.LINKERS}.create_unified_cache_linker"]
    for backend, config in (("peercache", {"home": "ipc:///a"}), ("peercache", None), ("mori", {})):
        made = hook(create, None, None, backend=backend, config=config, components=())
        assert made == "linker"

    from peercache.sglang import PeerCacheLinker

    ours = {"linker": PeerCacheLinker.__name__, "linker_module_path": "peercache.sglang"}
    assert created == [
        {"backend": "dynamic", "config": {**ours, "linker_extra_config": {"home": "ipc:///a"}}},
        {"backend": "dynamic", "config": {**ours, "linker_extra_config": {}}},
        {"backend": "mori", "config": {}},
    ]


def test_an_sglang_without_plugins_or_linkers_keeps_working(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Older versions: one sentence where there is no registry; no hook where there is no target."""
    from sglang.srt.plugins import hook_registry

    registry = Registry()
    monkeypatch.setattr(hook_registry, "HookRegistry", registry)
    monkeypatch.setattr(plugin, "LINKERS", "sglang.srt.no_such_folder.linker_factory")
    monkeypatch.setattr(plugin, "HINTS", "sglang.srt.managers.no_such_module")
    plugin.register()
    assert set(registry.hooks) == {plugin.ARGUMENTS, plugin.ATTACH}

    monkeypatch.delattr(hook_registry, "HookType")
    with caplog.at_level(logging.WARNING):
        plugin.register()
    (line,) = caplog.messages
    assert "sglang.name_not_added" in line
    assert "use the backend `dynamic`" in line
