"""Which servers share pages: names that cannot collide, and the identity of the weights.

The server's configuration is SGLang's own, published as its launcher publishes it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context

import peercache.sglang.registration as registration_module
from peercache.engines.weights import BLOCK_BYTES, SAMPLES, content_digest, weights_identity
from peercache.errors import Rejected
from peercache.observability import reasons
from peercache.sglang import PeerCacheStore
from tests.integration.sglang_fakes import FakeCluster
from tests.integration.sglang_pools import PAGE_TOKENS
from tests.integration.sglang_rig import prompt
from tests.integration.test_sglang_store import KEYS, SLOTS, filled, open_store
from tests.pace import wait_until

Publish = Callable[..., None]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def publish() -> Iterator[Publish]:
    """Return a function that gives this process the configuration of another server."""
    installed: list[Any] = []

    def put(**options: Any) -> None:
        while installed:
            installed.pop().restore()
        installed.append(get_context().override_server_args(**options))
        installed[-1].install()

    yield put
    while installed:
        installed.pop().restore()


def weights_in(folder: Path, fill: bytes = b"w", size: int = 100_000) -> Path:
    """Write a model's folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "model-00001-of-00001.safetensors").write_bytes(fill * size)
    return folder


def shares(first: PeerCacheStore, second: PeerCacheStore) -> bool:
    """Return whether the second server hits what the first one stored."""
    assert first.batch_set_v1(KEYS, SLOTS) == [True] * 3
    assert first.batch_exists(KEYS) == 3
    found = second.batch_exists(KEYS)
    assert found in {0, 3}
    return found == 3


def stores_after_a_flush(store: PeerCacheStore) -> bool:
    """Return whether a new backup thread, which SGLang starts with each flush, stores pages."""
    with ThreadPoolExecutor(1) as backup:
        return all(backup.submit(store.batch_set_v1, KEYS, SLOTS).result())


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [("org/model", "org-model"), ("meta/llama-3", "meta-llama/3"), ("a", "a ")],
)
def test_names_that_look_alike_share_nothing(cluster: FakeCluster, one: str, other: str) -> None:
    first, second = open_store(cluster, model_name=one), open_store(cluster, model_name=other)

    assert not shares(first, second)
    assert cluster.opened[0].namespace.name == one


def test_a_name_that_ends_as_a_page_format_does_is_another(cluster: FakeCluster) -> None:
    """SGLang appends the host pool's format to the model's name."""
    tagged = filled("mha", "page_first")
    tagged.__dict__["storage_format_tag"] = "v2"
    first = open_store(cluster, tagged, model_name="chat-v2")
    second = open_store(cluster, model_name="chat-v2")

    assert not shares(first, second)
    assert [client.namespace.name for client in cluster.opened] == ["chat", "chat-v2"]


@pytest.mark.parametrize("name", [None, ""])
def test_unnamed_models_share_nothing_and_one_warning_names_the_setting(
    cluster: FakeCluster, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = open_store(cluster, model_name=name), open_store(cluster, model_name=name)

    assert not shares(first, second)
    first.register_mem_pool_host(filled("mha", "page_first"))
    warnings = [line for line in caplog.messages if "sglang.model_unnamed" in line]
    assert len(warnings) == 2  # one a process
    assert all("`namespace`" in line for line in warnings)
    assert first.batch_exists(KEYS) == 3  # registered again, it is still the same process


def test_an_unnamed_model_with_known_weights_is_named_by_them(
    cluster: FakeCluster, publish: Publish
) -> None:
    publish(model_path="org/model", revision=COMMIT)

    first, second = (open_store(cluster, model_name=None) for _ in range(2))

    assert shares(first, second)


def test_the_setting_wins(cluster: FakeCluster, publish: Publish, tmp_path: Path) -> None:
    """It replaces the model's name and the identity of its weights."""
    stores = []
    for name in ("one", "other"):
        publish(model_path=str(weights_in(tmp_path / name, fill=name.encode())))
        extra = {"namespace": "team-a/chat"}
        stores.append(open_store(cluster, model_name=name, extra_config=extra))

    assert shares(*stores)
    assert cluster.opened[0].namespace.name == "team-a/chat"
    third = open_store(cluster, model_name="other", extra_config={"namespace": "team-b/chat"})
    assert third.batch_exists(KEYS) == 0


@pytest.mark.parametrize(
    "option",
    [
        {"kv_cache_dtype": "fp8_e5m2"},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"json_model_override_args": '{"rope_scaling": {"rope_type": "yarn"}}'},
        {"load_format": "dummy"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_the_setting_replaces_no_option(
    cluster: FakeCluster, publish: Publish, option: dict[str, Any]
) -> None:
    """Who sets it guarantees equal weights, not that servers compute the same with them."""
    stores = []
    for options in ({}, option):
        publish(model_path="org/model", **options)
        stores.append(open_store(cluster, extra_config={"namespace": "team-a/chat"}))

    assert not shares(*stores)


# --- weights ------------------------------------------------------------------------------------


def test_the_same_weights_in_two_places_share(
    cluster: FakeCluster, publish: Publish, tmp_path: Path
) -> None:
    """Hosts mount a model where they like, and copy it without its times."""
    publish(model_path=str(weights_in(tmp_path / "host-1/models/chat")))
    first = open_store(cluster, model_name="chat")
    shutil.copytree(tmp_path / "host-1", tmp_path / "mnt", copy_function=shutil.copyfile)
    (tmp_path / "mnt/models/chat/README.md").write_text("not a weight")

    publish(model_path=str(tmp_path / "mnt/models/chat"))
    second = open_store(cluster, model_name="chat")

    assert shares(first, second)


@pytest.mark.parametrize(
    "change",
    [
        {"weights": b"x"},
        {"config": '{"hidden_size": 64, "rope_theta": 1e6}'},
        {"quantization": "fp8"},
        {"dtype": "float16"},
        {"json_model_override_args": '{"rope_scaling": {"type": "yarn"}}'},
        {"load_format": "dummy"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_weights_under_one_name_share_nothing(
    cluster: FakeCluster, publish: Publish, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Two fine-tunes are both served as "chat"."""
    folder = weights_in(tmp_path / "chat")
    publish(model_path=str(folder))
    first = open_store(cluster, model_name="chat")
    options = dict(change)
    if fill := options.pop("weights", None):
        (folder / "model-00001-of-00001.safetensors").write_bytes(fill * 100_000)
    if config := options.pop("config", None):
        (folder / "config.json").write_text(config)
    publish(model_path=str(folder), **options)
    second = open_store(cluster, model_name="chat")

    assert not shares(first, second)
    one, other = (client.namespace for client in cluster.opened)
    # A new version replaces the old one host by host: no node may refuse either.
    assert (one.name, one.geometry, one.space_tag()) == (
        other.name, other.geometry, other.space_tag(),
    )  # fmt: skip


def test_a_repository_is_the_commit_that_the_cache_holds(tmp_path: Path) -> None:
    """`main` moves; a commit does not. But files of a snapshot may be edited."""
    cache = tmp_path / "hub"
    snapshot = weights_in(cache / f"models--org--model/snapshots/{COMMIT}")
    refs = cache / "models--org--model/refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)

    identity = weights_identity("org/model", None, str(cache))
    assert identity == f"org/model@{COMMIT} {content_digest(snapshot)}"
    assert weights_identity(str(snapshot)) == identity
    (refs / "main").write_text("f" * 40)
    assert weights_identity("org/model", None, str(cache)) == "org/model"
    assert weights_identity("org/model", "v2", str(cache)) == "org/model@v2"
    assert weights_identity("s3://bucket/model") == "s3://bucket/model"


@pytest.mark.parametrize("place", [0, 40, 99])
def test_a_part_of_the_weights_that_changes_is_seen(tmp_path: Path, place: int) -> None:
    """Wherever a hundredth of a large model is trained on, a sample falls into it."""
    size = 4 * SAMPLES * BLOCK_BYTES
    folder = weights_in(tmp_path / "model", fill=b"", size=0)
    file = folder / "model-00001-of-00001.safetensors"
    with file.open("wb") as sparse:
        sparse.truncate(size)
    before = content_digest(folder)
    with file.open("r+b") as weights:
        weights.seek(place * size // 100)
        weights.write(b"t" * (size // 100))

    assert content_digest(folder) != before


def test_a_new_version_of_the_weights_begins_a_new_namespace(
    cluster: FakeCluster, publish: Publish
) -> None:
    """A trainer names a version with each update; the pages of the one before are misses."""
    publish(model_path="org/model")
    store = open_store(cluster)
    store.batch_set_v1(KEYS, SLOTS)

    get_context().override("trainer", weight_version="step-2")

    assert store.batch_exists(KEYS) == 0
    assert store.stats()["refused"]["exists"][reasons.WEIGHTS_CHANGED] == 3
    wait_until(lambda: stores_after_a_flush(store), "the store opens again")
    assert [client.closed for client in cluster.opened] == [True, False]
    assert len(cluster.pages) == 6
    store.close()


def test_pages_of_the_old_weights_are_not_stored_as_those_of_the_new(
    cluster: FakeCluster, publish: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a flush SGLang backs up what it computed before the update, in the same thread."""
    publish(model_path="org/model")
    store = open_store(cluster)
    with ThreadPoolExecutor(1) as backup:

        def back_up() -> list[bool]:
            return backup.submit(store.batch_set_v1, KEYS, SLOTS).result()

        assert back_up() == [True] * 3
        get_context().override("trainer", weight_version="step-2")
        store.batch_exists(KEYS)
        wait_until(lambda: len(cluster.opened) == 2, "the store opens again")
        wait_until(lambda: store.stats().get("pages") is not None, "the store serves again")

        assert back_up() == [False] * 3
        assert any("/flush_cache" in line for line in caplog.messages)
        # Not even where the old version comes back: the caches hold pages of both by now.
        get_context().override("trainer", weight_version="default")
        store.batch_exists(KEYS)
        wait_until(lambda: len(cluster.opened) == 3, "the store opens again")
        wait_until(lambda: store.stats().get("pages") is not None, "the store serves again")
        assert back_up() == [False] * 3

    assert stores_after_a_flush(store)
    assert len(cluster.pages) == 3
    store.close()


def test_a_refused_client_of_new_weights_is_tried_again(
    cluster: FakeCluster,
    publish: Publish,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A home node that restarts during a weight update is no end of the cache."""
    monkeypatch.setattr(registration_module, "REOPEN_RETRY_S", 0.01)
    publish(model_path="org/model")
    store = open_store(cluster, extra_config={"namespace": "chat"})
    cluster.refuse_to_open = Rejected("cluster", "it is starting")

    get_context().override("trainer", weight_version="step-2")

    assert store.batch_get_v1(KEYS, SLOTS) == [False] * 3
    wait_until(lambda: "sglang.reopen_failed" in caplog.text, "the client is refused")
    assert store.batch_get_v1(KEYS, SLOTS) == [False] * 3
    cluster.refuse_to_open = None
    wait_until(lambda: stores_after_a_flush(store), "the store opens again")
    store.close()
    assert cluster.opened[-1].closed


# --- adapters and salts -------------------------------------------------------------------------


def adapter(folder: Path, fill: bytes) -> Path:
    """Write a LoRA adapter's folder."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(fill * 1000)
    return folder


def test_an_adapter_that_was_trained_again_has_pages_of_its_own(
    cluster: FakeCluster, publish: Publish, tmp_path: Path
) -> None:
    """SGLang's hash knows an adapter by its name and path, which stay."""
    stores = []
    for fill in (b"1", b"2"):
        path = str(adapter(tmp_path / "sql", fill))
        lora = LoRARef(
            lora_id=LoRARef.deterministic_id("sql", path), lora_name="sql", lora_path=path
        )
        publish(model_path="org/model", enable_lora=True, lora_paths=[lora])
        stores.append(open_store(cluster))

    assert not shares(*stores)


def test_requests_of_two_adapters_or_salts_have_other_keys() -> None:
    """SGLang puts both into the chain of page hashes, which PeerCache relies on."""
    tokens = prompt(pages=2, seed=1)
    requests = [
        RadixKey(tokens),
        RadixKey(tokens, extra_key="lora-1"),
        RadixKey(tokens, extra_key="lora-2"),
        RadixKey(tokens, cache_salt="lora-1"),
        RadixKey(tokens, cache_salt="tenant-b"),
    ]

    keys = {page for key in requests for page in get_storage_hash_str(key, None, PAGE_TOKENS)}

    assert len(keys) == 2 * len(requests)


def test_adapters_are_not_served_where_hashes_ignore_them(
    cluster: FakeCluster,
    publish: Publish,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before 0.5.20 a prompt has the same hashes under every adapter, and under every salt."""
    monkeypatch.setattr(registration_module, "separates_requests", lambda: False)
    publish(model_path="org/model", enable_lora=True)
    store = open_store(cluster)

    assert store.batch_set_v1(KEYS, SLOTS) == [False] * 3
    assert not cluster.opened
    assert any("LoRA" in line and "0.5.20" in line for line in caplog.messages)

    publish(model_path="org/model")
    plain = open_store(cluster)
    assert plain.batch_set_v1(KEYS, SLOTS) == [True] * 3
    assert any("sglang.salts_not_separated" in line for line in caplog.messages)
