"""PeerCache as a built-in storage backend: what the factory makes stores and returns pages.

python -m pytest test/registered/unit/mem_cache/test_hicache_peercache_storage.py
"""

import importlib.util
import unittest
import uuid
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

PAGE_TOKENS, PAGES = 4, 8


def host_pool() -> SimpleNamespace:
    """An MHA host pool in layout page_first, as far as a storage backend looks at it."""
    layers, heads, head_dim = 2, 2, 8
    buffer = torch.zeros(
        (2, PAGES * PAGE_TOKENS, layers, heads, head_dim), dtype=torch.bfloat16
    )
    run = PAGE_TOKENS * layers * heads * head_dim * buffer.element_size()

    def page_buffer_meta(indices):
        pointers = []
        for slot in indices.tolist()[::PAGE_TOKENS]:
            offset = slot // PAGE_TOKENS * run
            pointers += [buffer[0].data_ptr() + offset, buffer[1].data_ptr() + offset]
        return pointers, [run] * len(pointers)

    return SimpleNamespace(
        layout="page_first", page_size=PAGE_TOKENS, size=PAGES * PAGE_TOKENS,
        page_num=PAGES, dtype=buffer.dtype, layer_num=layers, start_layer=0,
        end_layer=layers - 1, head_num=heads, head_dim=head_dim, v_head_dim=head_dim,
        kv_buffer=buffer, size_per_token=2 * run // PAGE_TOKENS,
        get_page_buffer_meta=page_buffer_meta,
        get_size_per_token=lambda: 2 * run // PAGE_TOKENS,
        get_ksize_per_token=lambda: run // PAGE_TOKENS,
    )  # fmt: skip


@unittest.skipUnless(importlib.util.find_spec("peercache"), "needs peercache-kv")
class TestHiCachePeerCacheStorage(CustomTestCase):
    def setUp(self):
        self.pool = host_pool()
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True,
            model_name="test/model",
            extra_config={"pool_size": "16MiB", "namespace": uuid.uuid4().hex},
        )  # fmt: skip
        self.store = StorageBackendFactory.create_backend(
            "peercache", config, self.pool
        )
        self.addCleanup(self.store.close)
        self.store.register_mem_pool_host(self.pool)

    def test_pages_come_back_with_their_bytes(self):
        keys = [uuid.uuid4().hex + uuid.uuid4().hex for _ in range(PAGES // 2)]
        slots = torch.arange(len(keys) * PAGE_TOKENS)
        self.pool.kv_buffer.normal_()
        stored = self.pool.kv_buffer[:, slots].clone()

        self.assertEqual(self.store.batch_exists(keys), 0)
        self.assertEqual(self.store.batch_set_v1(keys, slots), [True] * len(keys))
        self.assertEqual(self.store.batch_exists(keys), len(keys))

        elsewhere = slots + len(slots)
        self.assertEqual(self.store.batch_get_v1(keys, elsewhere), [True] * len(keys))
        self.assertTrue(torch.equal(self.pool.kv_buffer[:, elsewhere], stored))

    def test_a_page_that_was_never_stored_is_a_miss(self):
        keys = [uuid.uuid4().hex + uuid.uuid4().hex]

        self.assertEqual(self.store.batch_exists(keys), 0)
        self.assertEqual(
            self.store.batch_get_v1(keys, torch.arange(PAGE_TOKENS)), [False]
        )


if __name__ == "__main__":
    unittest.main()
