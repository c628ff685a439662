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


def digest(*given: Any, name: str = "", reset: str = "", engine: Any = None, **other: Any) -> bytes:
    """Return the digest of an engine's namespace."""
    from peercache.vllm.namespace import namespace_of, weights_of

    chunk_bytes, version = given or (4096, "0.32.0")
    config = fake_vllm.spec(**other).config
    weights = weights_of(engine or fake_vllm.engine(), config.model.name)
    return namespace_of(config, chunk_bytes, version, name, weights, reset).digest()


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


@pytest.mark.parametrize(
    "other",
    [
        {"revision": "v2"},
        {"model_weights": "s3://bucket/tuned"},
        {"dtype": "torch.float16"},
        {"quantization": "fp8"},
        {"quantization_config": {"linear": "fp8"}},
        {"hf_overrides": {"rope_theta": 5e5}},
        {"hf_overrides": dict},
        {"model_loader_extra_config": {"path": "x"}},
        {"kv_cache_dtype_skip_layers": ["0"]},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 1},
    ],
)
def test_each_way_to_compute_separates_unless_a_name_stands_for_it(other: dict[str, Any]) -> None:
    """The same files make other chunks in another revision, quantization or configuration."""
    engine = fake_vllm.engine(**other)
    assert digest(engine=engine) not in {digest(), digest(engine=fake_vllm.engine(seed=1))}
    assert digest(engine=engine) == digest(engine=fake_vllm.engine(**other))
    assert digest(engine=engine, name="named") == digest(name="named")


def test_what_computes_the_same_shares() -> None:
    """Neither how weights are read nor a seed of the sampler changes a chunk."""
    same = fake_vllm.engine(load_format="safetensors", seed=7, model_loader_extra_config={})
    assert digest(engine=same) == digest()
    overrides = [{"a": 1, "b": 2}, {"b": 2, "a": 1}]
    first, second = (fake_vllm.engine(hf_overrides=each) for each in overrides)
    assert digest(engine=first) == digest(engine=second)


def test_dummy_weights_of_other_seeds_separate() -> None:
    first, second = (fake_vllm.engine(load_format="dummy", seed=each) for each in (1, 2))
    assert digest(engine=first) != digest(engine=second)


def test_drafts_separate() -> None:
    """Their layers lie in the same chunks."""
    drafts = [(), ("a/draft", None), ("a/draft", "v2"), ("b/draft", None)]
    assert len({digest(engine=fake_vllm.engine(*draft)) for draft in drafts}) == 4


def test_the_version_and_the_size_separate() -> None:
    """A row's inside is vLLM's own affair."""
    assert len({digest(4096, "0.32.0"), digest(4096, "0.33.0"), digest(8192, "0.32.0")}) == 3
    assert digest(4096, "0.32.0") == digest()


def test_lookups_of_requests_that_never_end_do_not_grow() -> None:
    """A lost end of a request costs its memory once, and no more than the bound."""
    from peercache.vllm.tier import REQUESTS_MAX, Lookups

    lookups = Lookups(lambda request, keys: None)
    for number in range(REQUESTS_MAX):
        lookups.verdict(str(number), b"k")
    assert lookups.verdict("one more", b"k") is False
    lookups.forget("7")
    assert lookups.verdict("one more", b"k") is None
