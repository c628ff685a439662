"""Which facts of a vLLM engine tell its chunks from others'."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.vllm import fake_vllm


@pytest.fixture(autouse=True)
def vllm_stands_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the package imported without vLLM."""
    fake_vllm.install(monkeypatch)
    yield
    fake_vllm.forget()


def digest(*given: Any, name: str = "", reset: str = "", **other: Any) -> bytes:
    """Return the digest of an engine's namespace."""
    from peercache.vllm.namespace import namespace_of

    chunk_bytes, version = given or (4096, "0.32.0")
    return namespace_of(fake_vllm.spec(**other).config, chunk_bytes, version, name, reset).digest()


@pytest.mark.parametrize(
    "other",
    [
        {"model": SimpleNamespace(name="b/model", dtype="torch.bfloat16")},
        {"model": SimpleNamespace(name="a/model", dtype="torch.float16")},
        {"cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1)},
        {"cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2)},
        {"groups": (SimpleNamespace(tokens_per_block=16, layer_names=("layer.1",)),)},
        {"parallel": SimpleNamespace(tp_size=2, pp_size=1, pcp_size=1, dcp_size=1)},
        {"parallel": SimpleNamespace(tp_size=1, pp_size=2, pcp_size=1, dcp_size=1)},
        {"kv_cache_layout": "HND"},
        {"canonical_layout": True},
        {"replicated_layout": True},
        {"name": "named"},
        {"reset": "1f"},
    ],
)
def test_each_fact_separates(other: dict[str, Any]) -> None:
    """Engines that differ in what a row means share no page."""
    assert digest(**other) != digest()


def test_the_version_and_the_size_separate() -> None:
    """A row's inside is vLLM's own affair."""
    assert len({digest(4096, "0.32.0"), digest(4096, "0.33.0"), digest(8192, "0.32.0")}) == 3
    assert digest(4096, "0.32.0") == digest()


def test_lookups_of_requests_that_never_end_do_not_grow() -> None:
    """A lost end of a request costs its memory once, and no more than the bound."""
    from peercache.vllm.lookups import REQUESTS_MAX, Lookups

    lookups = Lookups(lambda request, keys: None)
    for number in range(REQUESTS_MAX):
        lookups.verdict(str(number), b"k")
    assert lookups.verdict("one more", b"k") is False
    lookups.forget("7")
    assert lookups.verdict("one more", b"k") is None
