"""Content addresses: page keys made from token ids, for engines that have no page hashes."""

from peercache.content.chain import (
    Chain,
    dtype_name,
    in_namespace,
    layer_keys_of,
    page_keys_of,
    token_ids,
)

__all__ = ["Chain", "dtype_name", "in_namespace", "layer_keys_of", "page_keys_of", "token_ids"]
