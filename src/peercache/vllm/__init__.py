"""A secondary tier of vLLM's offloading connector: PeerCache behind its CPU memory.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector",
      "kv_role": "kv_both", "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
      "cpu_bytes_to_use": 10737418240, "secondary_tiers": [{"type": "PeerCacheTier",
      "module_path": "peercache.vllm", "home": "ipc:///run/peercache/node.ipc"}]}}'

This package is the only place that imports vLLM.
"""

try:
    from peercache.vllm.tier import PeerCacheTier
except ImportError as error:
    if (error.name or "").partition(".")[0] not in {"vllm", "torch"}:
        raise
    raise ImportError(
        "peercache.vllm works inside a vLLM engine: install vllm 0.32.0 or later "
        f"in this Python, next to peercache ({error})",
        name=error.name,
    ) from error

__all__ = ["PeerCacheTier"]
