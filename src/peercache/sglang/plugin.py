"""Makes `peercache` a name that SGLang knows: an entry point of the group `sglang.srt.plugins`.

SGLang calls `register` in each of its processes before it parses arguments. `peercache` is then a
storage backend and a linker like its own, without `module_path` and `class_name`:

* the command line accepts the name;
* where a storage backend is attached, or a linker created, the name becomes `dynamic` with the
  configuration that loads our class. All else is SGLang's own way of loading a class by name.

An SGLang without one of these places keeps working: it does not know the name, and says so.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

from peercache.observability import log

NAME = "peercache"
STORE = {"backend_name": NAME, "module_path": "peercache.sglang", "class_name": "PeerCacheStore"}
LINKER = {"linker": "PeerCacheLinker", "linker_module_path": "peercache.sglang"}

OPTIONS = {"hicache_storage_backend", "unified_cache_external_linker_backend"}
"""Options of the command line that name a backend."""

ARGUMENTS = "sglang.srt.server_args.ServerArgs.add_cli_args"
ATTACH = "sglang.srt.managers.cache_controller.HiCacheController.attach_storage_backend"
LINKERS = "sglang.srt.mem_cache.unified_cache.linker_factory"


def register() -> None:
    """Add the name to SGLang."""
    try:
        hooks = import_module("sglang.srt.plugins.hook_registry")
        kind = hooks.HookType
        hooks.HookRegistry.register(ARGUMENTS, _accept_name, kind.AFTER)
        hooks.HookRegistry.register(ATTACH, _load_store, kind.AROUND)
        if _exists(LINKERS):
            hooks.HookRegistry.register(
                f"{LINKERS}.create_unified_cache_linker", _load_linker, kind.AROUND
            )
    except Exception as error:
        # It starts without the name; the backend `dynamic` needs none of this.
        log.log_into("sglang")
        log.get_logger(component="sglang").warning(
            "sglang.name_not_added", why=repr(error), hint="use the backend `dynamic`"
        )


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def _accept_name(_: Any, parser: ArgumentParser, *__: Any, **___: Any) -> None:
    """Let the parser accept the name."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to find an option
        choices = action.choices
        if action.dest in OPTIONS and choices is not None and NAME not in choices:
            action.choices = [*choices, NAME]


def _load_store(attach: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Attach our store by the name of its class, where our name is given."""
    call = signature(attach).bind(*arguments, **options)
    if call.arguments.get("storage_backend") == NAME and not _is_built_in():
        settings = call.arguments.get("storage_backend_extra_config") or {}
        call.arguments["storage_backend"] = "dynamic"
        call.arguments["storage_backend_extra_config"] = {"interface_v1": 1, **settings, **STORE}
    return attach(*call.args, **call.kwargs)


def _is_built_in() -> bool:
    """Return whether the patch of integrations/sglang is applied."""
    factory = import_module("sglang.srt.mem_cache.storage.backend_factory")
    return NAME in factory.StorageBackendFactory._registry  # noqa: SLF001 - has no other way


def _load_linker(create: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Create our linker by the name of its class, where our name is given."""
    call = signature(create).bind(*arguments, **options)
    if call.arguments.get("backend") == NAME:
        settings = dict(call.arguments.get("config") or {})
        call.arguments["backend"] = "dynamic"
        call.arguments["config"] = {**LINKER, "linker_extra_config": settings}
    return create(*call.args, **call.kwargs)
