"""The secondary tier of vLLM: its namespace, lookups, jobs, rows, and nothing raised."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from peercache.errors import ConfigError
from tests.pace import TIMEOUT_S, wait_until
from tests.unit.engines.fake_client import FakeClient
from tests.unit.events.test_held import Node
from tests.unit.vllm import fake_vllm
from tests.unit.vllm.fake_vllm import LookupResult, job

ROW_BYTES = 64
KEYS = [bytes([i]) * 32 + (0).to_bytes(4, "big") for i in range(4)]
ASKS = SimpleNamespace(req_id="asks")
LOST = "vllm:kv_offload_peercache_home_lost"
ANSWERED = "vllm:kv_offload_peercache_home_answered_seconds"
ENGINE = fake_vllm.engine()


@pytest.fixture
def fake() -> FakeClient:
    """Return the client of the tier."""
    return FakeClient()


@pytest.fixture
def rows() -> Any:
    """Return vLLM's CPU cache: eight chunks of other bytes."""
    return np.arange(8 * ROW_BYTES, dtype=np.uint16).astype(np.int8).reshape(8, ROW_BYTES)


@pytest.fixture
def tier(fake: FakeClient, rows: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a tier over the fake client."""
    fake_vllm.install(monkeypatch)
    tier = make(fake, rows)
    yield tier
    fake.may_answer.set()
    tier.shutdown()
    fake_vllm.forget()


def make(
    fake: FakeClient,
    rows: Any,
    vllm_config: Any = ENGINE,
    *,
    detector: Any = None,
    spec: Any = None,
    **settings: Any,
) -> Any:
    """Build a tier as vLLM's scheduler does, which has the engine's configuration.

    A lookup that waits for a quarter of `op_timeout_s` before a thread takes it is a miss.
    """
    settings = {"op_timeout_s": 4 * TIMEOUT_S, **settings}
    module = importlib.import_module("peercache.vllm")
    return module.PeerCacheTier(
        offloading_spec=spec or fake_vllm.spec(),
        primary_kv_view=memoryview(rows),
        tier_type="PeerCacheTier",
        backpressure_detector=detector,
        client_factory=fake.open,
        **settings,
    )


def results(tier: Any, *numbers: int) -> dict[int, Any]:
    """Return the results of jobs, when all of them are there."""
    done: dict[int, Any] = {}

    def have_come() -> bool:
        done.update((each.job_id, each) for each in tier.get_finished_jobs())
        return set(done) >= set(numbers)

    wait_until(have_come)
    assert set(done) == set(numbers)
    return done


def verdicts(tier: Any, keys: list[bytes], asks: Any = ASKS) -> list[Any]:
    """Look keys up until all are known, as vLLM's scheduler does in its steps."""
    answers: list[Any] = []

    def are_known() -> bool:
        answers[:] = [tier.lookup(key, asks) for key in keys]
        tier.on_schedule_end(None)
        return LookupResult.RETRY not in answers

    wait_until(are_known)
    return answers


def test_what_was_stored_is_found_and_loaded_into_other_rows(tier: Any, rows: Any) -> None:
    """Rows are pages, read and written in place."""
    stored, other = rows[2].copy(), rows[5].copy()
    tier.submit_store(job(1, KEYS[:2], [2, 5]))
    done = results(tier, 1)[1]
    assert (done.success, done.transfer_bytes) == (True, 2 * ROW_BYTES)
    assert verdicts(tier, KEYS[:3]) == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS]
    before = rows.copy()
    tier.submit_load(job(2, [KEYS[1], KEYS[0]], [6, 7], request="asks"))
    assert results(tier, 2)[2].success
    assert (rows[6] == other).all()
    assert (rows[7] == stored).all()
    assert (rows[:6] == before[:6]).all()


def test_a_lookup_never_waits_and_a_step_is_one_question(tier: Any, fake: FakeClient) -> None:
    """The scheduler gets "later" until the answer is there, and asks once."""
    fake.may_answer.clear()
    assert [tier.lookup(key, ASKS) for key in KEYS] == [LookupResult.RETRY] * 4
    tier.on_schedule_end(None)
    assert tier.lookup(KEYS[0], ASKS) == LookupResult.RETRY
    fake.may_answer.set()
    assert verdicts(tier, KEYS) == [LookupResult.MISS] * 4
    assert fake.touched == [4]


def test_a_load_that_failed_is_a_miss_for_its_request(tier: Any, fake: FakeClient) -> None:
    """Else the scheduler would load the same chunk in every step; another request may try."""
    tier.submit_store(job(1, KEYS[:2], [0, 1]))
    results(tier, 1)
    assert verdicts(tier, KEYS[:2]) == [LookupResult.HIT] * 2
    gone = min(fake.pages)
    fake.pages[gone] = b"short"
    tier.submit_load(job(2, KEYS[:2], [6, 7], request="asks"))
    done = results(tier, 2)[2]
    assert not done.success
    assert len(done.successful_keys) == 1
    again = [tier.lookup(key, ASKS) for key in KEYS[:2]]
    assert sorted(each.name for each in again) == ["HIT", "MISS"]
    tier.on_request_finished(ASKS)
    assert verdicts(tier, KEYS[:2], SimpleNamespace(req_id="other")) == [LookupResult.HIT] * 2


def test_a_client_that_raises_is_a_miss_with_a_result(tier: Any, fake: FakeClient) -> None:
    """An exception would end vLLM's EngineCore; a job without a result would pin its rows."""
    fake.problem = RuntimeError("a bug")
    tier.submit_store(job(1, KEYS, [0, 1, 2, 3]))
    tier.submit_load(job(2, KEYS, [0, 1, 2, 3], request="asks"))
    done = results(tier, 1, 2)
    assert not done[1].success
    assert not done[2].success
    assert verdicts(tier, KEYS) == [LookupResult.MISS] * 4


def test_rows_that_are_none_of_vllms_are_not_touched(tier: Any, rows: Any) -> None:
    """A wrong row would be another's memory."""
    before = rows.copy()
    tier.submit_store(job(1, KEYS[:2], [0, 1]))
    results(tier, 1)
    tier.submit_load(job(2, KEYS[:2], [0, 8], request="asks"))
    tier.submit_load(job(3, KEYS[:2], [-1, 0], request="asks"))
    tier.submit_load(job(4, KEYS[:2], [0], request="asks"))
    assert [each.success for each in results(tier, 2, 3, 4).values()] == [False] * 3
    assert (rows == before).all()


def test_nothing_raises_whatever_comes(tier: Any) -> None:
    """Nonsense has a harmless answer."""
    assert tier.lookup(None, None) == LookupResult.MISS
    assert tier.on_new_request(None) == fake_vllm.RequestOffloadingContext()
    tier.on_request_finished(None)
    tier.touch(None, None)
    tier.touch(KEYS, ASKS)
    tier.on_schedule_end(None)
    assert tier.get_finished_jobs() == []


def test_a_drain_ends_all_jobs_and_leaves_the_chunks_before_it(tier: Any, fake: FakeClient) -> None:
    """After an update of weights vLLM resets its caches: chunks of the old ones are not served."""
    tier.submit_store(job(1, KEYS, [0, 1, 2, 3]))
    results(tier, 1)
    tier.submit_load(job(2, KEYS, [4, 5, 6, 7], request="asks"))
    tier.drain_jobs()
    assert [each.job_id for each in tier.get_finished_jobs()] == [2]
    fresh = SimpleNamespace(req_id="fresh")
    assert verdicts(tier, KEYS, fresh) == [LookupResult.MISS] * 4
    tier.submit_store(job(3, KEYS, [0, 1, 2, 3]))
    results(tier, 3)
    assert verdicts(tier, KEYS, SimpleNamespace(req_id="later")) == [LookupResult.HIT] * 4


def test_a_drain_waits_for_what_touches_a_row(tier: Any, fake: FakeClient) -> None:
    """Its rows are given to others next."""
    fake.may_answer.clear()
    fake.entered.clear()
    tier.submit_load(job(1, KEYS, [4, 5, 6, 7], request="asks"))
    assert fake.entered.wait(30)
    tier.submit_load(job(2, KEYS, [0, 1, 2, 3], request="asks"))
    drain = threading.Thread(target=tier.drain_jobs)
    drain.start()
    drain.join(0.05)
    assert drain.is_alive()
    fake.may_answer.set()
    drain.join(30)
    assert sorted(each.job_id for each in tier.get_finished_jobs()) == [1, 2]


def test_a_shutdown_leaves_vllm_its_memory(tier: Any, fake: FakeClient, rows: Any) -> None:
    """No array may refer to the cache that vLLM unmaps next. Later calls are misses."""
    view = memoryview(rows)
    tier = make(fake, view)
    tier.shutdown()
    assert fake.is_closed
    view.release()  # A BufferError, if an array refers to it.
    assert fake.registered[-1] == (rows.ctypes.data, rows.nbytes)
    tier.submit_load(job(9, KEYS, [0, 1, 2, 3], request="asks"))
    assert not results(tier, 9)[9].success
    tier.shutdown()


def test_engines_that_compute_alike_share_and_others_do_not(
    tier: Any, fake: FakeClient, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the engine's configuration, or with adapters, a tier shares with itself alone."""
    tier.submit_store(job(1, KEYS[:1], [1]))
    results(tier, 1)
    found = []
    adapters = SimpleNamespace(**vars(fake_vllm.engine()), lora_config=SimpleNamespace(max_loras=1))
    for engine in (ENGINE, fake_vllm.engine(quantization="fp8"), adapters, None):
        caplog.clear()
        other = make(fake, rows, engine)
        found.append(verdicts(other, KEYS[:1])[0])
        other.shutdown()
        assert ("vllm.engine_unknown" in caplog.text) == (engine is None)
        assert ("vllm.adapters_not_known" in caplog.text) == (engine is adapters)

    assert found == [LookupResult.HIT, *[LookupResult.MISS] * 3]
    for number, engine in enumerate((adapters, None), start=2):
        one, two = (make(fake, rows, engine) for _ in range(2))
        one.submit_store(job(number, KEYS[:1], [1]))
        results(one, number)
        assert [verdicts(each, KEYS[:1])[0] for each in (one, two)] == [
            LookupResult.HIT,
            LookupResult.MISS,
        ]
        for each in (one, two):
            each.shutdown()


@pytest.mark.usefixtures("tier")
def test_an_engine_that_has_an_option_elsewhere_starts_and_shares_with_itself(
    fake: FakeClient, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A later vLLM may: its start does not fail by that."""
    engine = fake_vllm.engine()
    del engine.load_config.download_dir
    make(fake, rows, engine).shutdown()
    assert "vllm.engine_unknown" in caplog.text


@pytest.mark.usefixtures("tier")
def test_engines_with_adapters_share_by_a_namespace_that_is_given(
    fake: FakeClient, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = SimpleNamespace(**vars(fake_vllm.engine()), lora_config=SimpleNamespace(max_loras=1))
    one, two = (make(fake, rows, adapters, namespace="french") for _ in range(2))
    one.submit_store(job(2, KEYS[:1], [1]))
    results(one, 2)
    assert [verdicts(each, KEYS[:1])[0] for each in (one, two)] == [LookupResult.HIT] * 2
    assert "vllm.adapters_not_known" not in caplog.text
    for each in (one, two):
        each.shutdown()


def test_a_named_namespace_wants_no_configuration(fake: FakeClient, tier: Any, rows: Any) -> None:
    """Its name stands for what computes the chunks."""
    one, two = (make(fake, rows, None, namespace="mine") for _ in range(2))
    one.submit_store(job(1, KEYS[:1], [1]))
    results(one, 1)

    assert verdicts(two, KEYS[:1]) == [LookupResult.HIT]
    for each in (one, two):
        each.shutdown()


def test_a_wrong_setting_is_named(tier: Any, fake: FakeClient, rows: Any) -> None:
    """A person reads it as the engine starts."""
    with pytest.raises(ConfigError, match="hom"):
        make(fake, rows, hom="x")


def test_without_vllm_the_import_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear error in place of a stack of theirs."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    fake_vllm.forget()
    with pytest.raises(ImportError, match=r"install vllm 0\.32\.0 or later"):
        importlib.import_module("peercache.vllm")


def test_vllm_shows_whether_the_home_node_answers(tier: Any, fake: FakeClient) -> None:
    """And why not: a dead home node looks like a cache that nothing is found in."""

    def shown() -> tuple[dict[str, float], bool]:
        gauges = tier.get_stats().gauges
        assert {name: set(map(len, values)) for name, values in gauges.items()} == {
            name: {len(metadata.labelnames)}
            for name, metadata in tier.build_metric_definitions({}).items()
            if name in gauges
        }
        lost = {labels[2]: value for labels, value in gauges[LOST].items()}
        assert {labels[:2] for labels in gauges[LOST]} == {(fake.home_address, fake.namespace.name)}
        return lost, ANSWERED in gauges

    fake.home_state = attrs.evolve(fake.home_state, answered_s=time.monotonic() - 7)
    assert shown() == ({"not_open": 0, "no_answer": 0, "refused": 0}, True)
    assert min(tier.get_stats().gauges[ANSWERED].values()) >= 7
    fake.home_state = attrs.evolve(fake.home_state, is_lost=True, reason="no_answer")
    assert shown() == ({"not_open": 0, "no_answer": 1, "refused": 0}, True)


def counts(tier: Any) -> dict[tuple[str, str], float]:
    """Return the counts since the last call, by the end of a metric's name, and the reason."""
    counters = tier.get_stats().counters
    definitions = tier.build_metric_definitions({})
    return {
        (name.rpartition("peercache_")[2], labels[2]): value
        for name, values in counters.items()
        for labels, value in values.items()
        if len(definitions[name].labelnames) == len(labels)
    }


def test_vllm_shows_what_was_not_moved_and_why(tier: Any, fake: FakeClient, rows: Any) -> None:
    """Each chunk once, by the client's reason."""
    tier.submit_store(job(1, KEYS[:2], [0, 1]))
    results(tier, 1)
    tier.submit_load(job(2, KEYS[:3], [2, 3, 4], request="r"))
    results(tier, 2)
    assert counts(tier) == {("missed_chunks", "absent"): 1}
    assert counts(tier) == {}
    fake.problem = RuntimeError("a bug")
    tier.submit_store(job(3, KEYS[2:], [2, 3]))
    results(tier, 3)
    assert counts(tier) == {("not_stored_chunks", "deadline"): 2}
    tier.shutdown()
    tier = make(fake, rows)
    tier.submit_store(job(4, KEYS[:1], [0]))
    tier.submit_load(job(5, KEYS[:1], [0], request="r"))
    results(tier, 4, 5)
    assert counts(tier) == {("not_stored_chunks", "not_open"): 1, ("missed_chunks", "not_open"): 1}
    tier.shutdown()


def test_chunks_that_were_stored_before_count_for_vllms_back_pressure(tier: Any) -> None:
    """It divides the time of a job by its bytes: a job of known chunks would look slow."""
    tier.submit_store(job(1, KEYS[:1], [0]))
    tier.submit_store(job(2, KEYS[:2], [0, 1]))
    done = results(tier, 1, 2)
    assert [done[number].transfer_bytes for number in (1, 2)] == [ROW_BYTES, 2 * ROW_BYTES]


def test_the_log_reports_once_that_vllm_shuts_the_tier_out(
    fake: FakeClient, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With what to do, and that it is over; vLLM's metrics show it, too."""
    detector = fake_vllm.Detector()
    tier = make(fake, rows, detector=detector, log_level="info")

    def shut_out() -> list[float]:
        return list(tier.get_stats().gauges["vllm:kv_offload_peercache_shut_out"].values())

    for is_pressed in (False, True, True, False, True):
        detector.is_pressed = is_pressed
        tier.on_schedule_end(None)
        assert shut_out() == [is_pressed]
    assert caplog.text.count("vllm.stores_shut_out") == 2
    assert caplog.text.count("vllm.stores_admitted") == 1
    assert "seconds_per_mib=0.1235" in caplog.text
    assert "high_water_s" in caplog.text
    tier.shutdown()


def test_settings_of_vllms_own_tiers_are_taken(fake: FakeClient, rows: Any) -> None:
    """With `locality` vLLM chooses the limits of its back-pressure; a wrong one is named."""
    for named in ("REMOTE", "LOCAL"):
        tier = make(fake, rows, locality=named)
        assert tier.locality.value == named
        tier.shutdown()
    with pytest.raises(ConfigError, match=r"locality.*NEAR"):
        make(fake, rows, locality="NEAR")


@pytest.fixture
def node(fake: FakeClient, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Return the home node, whose changes a tier follows."""
    node = Node()
    node.report(again=True)
    operator = SimpleNamespace(__enter__=lambda: node)
    module = importlib.import_module("peercache.vllm.tier")
    monkeypatch.setattr(module, "Operator", lambda _: operator)
    return node


def test_events_say_what_the_home_node_holds_of_the_engine(
    fake: FakeClient, rows: Any, node: Node
) -> None:
    """Stored and removed alternate for each chunk, whatever happens between two steps."""
    other = make(fake, rows)
    other.submit_store(job(0, KEYS, [0, 1, 2, 3]))
    results(other, 0)
    other.shutdown()
    names = list(fake.pages)
    fake.pages.clear()
    tier = make(fake, rows, enable_kv_events=True)

    def events() -> list[tuple[bool, list[bytes]]]:
        return [(each.removed, each.keys) for each in tier.take_events()]

    def come(*wanted: tuple[bool, list[bytes]]) -> None:
        found: list[tuple[bool, list[bytes]]] = []
        wait_until(lambda: found.extend(events()) or found == list(wanted))  # type: ignore[func-returns-value]

    tier.submit_store(job(1, KEYS[:2], [0, 1]))
    results(tier, 1)
    assert events() == []
    node.report((names[0], 1), (names[1], 2), (names[2], 1))
    come((False, KEYS[:2]))
    node.report((names[0], 0), (names[0], 1), (names[1], 0))
    come((True, [KEYS[1]]))
    tier.submit_store(job(2, KEYS[2:3], [2]))
    results(tier, 2)
    come((False, [KEYS[2]]))

    tier.drain_jobs()
    come((True, [KEYS[0], KEYS[2]]))
    tier.shutdown()
    assert events() == []


def test_events_are_for_routers_that_know_the_tier(fake: FakeClient, rows: Any, node: Node) -> None:
    """The home node is on this host; with an owner vLLM keeps the tokens until the removal."""
    tier = make(fake, rows, enable_kv_events=True)
    tier.submit_store(job(1, KEYS[:1], [0]))
    results(tier, 1)
    (name,) = fake.pages
    node.report((name, 1))
    found: list[Any] = []
    wait_until(lambda: found.extend(tier.take_events()) or bool(found))  # type: ignore[func-returns-value]
    (event,) = found
    assert (event.medium.value, event.locality.value) == ("STORAGE", "LOCAL")
    assert (event.ownership, event.removal_expected) == ("peercache", True)
    tier.shutdown()


def test_events_want_vllms_own_to_be_on(
    fake: FakeClient, rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise vLLM would never take them."""
    spec = fake_vllm.spec()
    spec.kv_events_config.enable_kv_cache_events = False
    tier = make(fake, rows, spec=spec, enable_kv_events=True)
    assert "vllm.events_off" in caplog.text
    assert list(tier.take_events()) == []
    tier.shutdown()


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
    """Their layers are in the same chunks."""
    drafts = [(), ("a/draft", None), ("a/draft", "v2"), ("b/draft", None)]
    assert len({digest(engine=fake_vllm.engine(*draft)) for draft in drafts}) == 4


def test_the_version_and_the_size_separate() -> None:
    """A row's inside is vLLM's own affair."""
    assert len({digest(4096, "0.32.0"), digest(4096, "0.33.0"), digest(8192, "0.32.0")}) == 3
    assert digest(4096, "0.32.0") == digest()


def test_lookups_of_requests_that_never_end_do_not_grow() -> None:
    """A lost end of a request costs its memory once, and no more than the bound."""
    from peercache.vllm.tier import REQUESTS_MAX, Lookups

    lookups = Lookups(lambda context, keys: None)
    for number in range(REQUESTS_MAX):
        lookups.verdict(SimpleNamespace(req_id=str(number)), b"k")
    one_more = SimpleNamespace(req_id="one more")
    assert lookups.verdict(one_more, b"k") is False
    lookups.forget("7")
    assert lookups.verdict(one_more, b"k") is None
