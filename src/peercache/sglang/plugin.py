"""Makes `peercache` a name that SGLang knows: an entry point of the group `sglang.srt.plugins`.

SGLang calls `register` in each of its processes before it parses arguments. `peercache` is then a
storage backend and a linker like its own, without `module_path` and `class_name`:

* the command line accepts the name;
* where a storage backend is attached, or a linker created, the name becomes `dynamic` with the
  configuration that loads our class. All else is SGLang's own way of loading a class by name.

It also hands the hints of requests (`kv_hints`) to our stores: SGLang itself hands them to no
storage backend.

An SGLang without one of these places keeps working: it does not know the name, and says so.
"""

from __future__ import annotations

import sys
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

STORE_HINTS = "peercache.sglang.request_hints"
"""Imported with the first store: the tokenizer's process has none."""

OPTIONS = {"hicache_storage_backend", "unified_cache_external_linker_backend"}
"""Options of the command line that name a backend."""

ARGUMENTS = "sglang.srt.server_args.ServerArgs.add_cli_args"
ATTACH = "sglang.srt.managers.cache_controller.HiCacheController.attach_storage_backend"
HINTS = "sglang.srt.managers.kv_hints"
REQUEST = "sglang.srt.managers.schedule_batch.Req.__init__"
RELEASE = "sglang.srt.mem_cache.common.release_kv_cache"
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
        if _exists(HINTS):
            hooks.HookRegistry.register(REQUEST, _take_request, kind.AFTER)
            hooks.HookRegistry.register(RELEASE, _take_release, kind.AFTER)
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


def _take_request(result: Any, *arguments: Any, **options: Any) -> None:
    """Hand a new request to the stores of this process, if it has any."""
    if (hints := sys.modules.get(STORE_HINTS)) is not None:
        hints.begun(result, *arguments, **options)


def _take_release(result: Any, *arguments: Any, **options: Any) -> None:
    """Hand a request that has ended to them."""
    if (hints := sys.modules.get(STORE_HINTS)) is not None:
        hints.ended(result, *arguments, **options)


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
