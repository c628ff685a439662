"""Names beside ours: settings that are gone, and the keys of SGLang's own in its extra config."""

from __future__ import annotations

REMOVED = {
    "credentials": "is gone: a secret that all share tells no process apart. Use certificates "
    "(`peercache certs` makes them; tls_ca, tls_cert, tls_key), or, for a trial, insecure = NAME",
}
"""Settings of earlier builds, and what to use instead: one that is left over protects nothing."""

SGLANG_KEYS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "allocator",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    }
)
"""Keys of SGLang's extra-config JSON that are SGLang's own."""
