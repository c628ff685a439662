"""SGLang, LMCache, vLLM and a connector on one node: no engine's page is a page of another.

Here because SGLang's namespace needs its environment; the other engines have stand-ins.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("blake3", reason="SGLang's environment was made before blake3 was needed")

from peercache.connector.metadata import ConnectorMetadata
from peercache.model.keys import Namespace, page_keys
from peercache.sglang.namespace import spaces_of
from tests.unit.lmcache import fake_lmcache
from tests.unit.vllm import fake_vllm

HASH = bytes(range(32))
"""What every engine calls its page: all of them hash tokens to 32 bytes."""

MODEL = "a/model"


@pytest.fixture(autouse=True)
def engines_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the adapters imported without their engines."""
    fake_vllm.install(monkeypatch)
    fake_lmcache.install(monkeypatch)
    yield
    fake_vllm.forget()
    for name in ("peercache.lmcache", "peercache.lmcache.adapter"):
        sys.modules.pop(name, None)


def spaces(name: str) -> dict[str, Namespace]:
    """Return the namespace of each engine that has one alone, all for one model on one rank."""
    of_vllm = importlib.import_module("peercache.vllm.namespace").namespace_of
    storage = SimpleNamespace(model_name=MODEL, tp_rank=0, tp_size=1)
    pool = SimpleNamespace(dtype="torch.bfloat16", layout="NHD", page_size=16)
    metadata = ConnectorMetadata(model=MODEL, dtype="bfloat16", page_tokens=16, namespace=name)
    return {
        "sglang": spaces_of(storage, pool, 4096, name, {}).shared,
        "vllm": of_vllm(fake_vllm.spec().config, 4096, "0.32.0", name),
        "connector": metadata.space(),
    }


def test_one_hash_is_another_page_in_every_engine() -> None:
    """Even under one namespace's name, where all engines give a page the same hash."""
    digests = {engine: space.digest() for engine, space in spaces("shared").items()}
    keys = {engine: page_keys([HASH.hex()], digest)[0] for engine, digest in digests.items()}
    addresses = importlib.import_module("peercache.lmcache.adapter").Addresses("shared")
    keys["lmcache"] = addresses.of([fake_lmcache.ObjectKey(HASH)], [""])[0]
    assert len(set(map(bytes, keys.values()))) == len(keys), keys
