"""Block events with token ids for the pages that a connector stores, for routers that read vLLM's
format.

    publisher = BlockPublisher("tcp://0.0.0.0:5557", readers=["10.0.0.0/16"])
    metadata = ConnectorMetadata(…, on_stored=lambda new: publisher.publish([block_stored(new)]))

`followed_blocks` does this, and also withdraws pages that no node holds any more. Needs the extra
`events`.
"""

from __future__ import annotations

from peercache.connector.metadata import StoredPages
from peercache.events.blocks import BlockStored

MEDIUM = "CPU"
"""Pages in PeerCache are in memory of hosts; a router treats other words as a disk."""


def block_stored(pages: StoredPages, medium: str = MEDIUM) -> BlockStored:
    """Return the event for pages that were stored.

    A block's hash is the first 8 bytes of its digest, as a number: with a hash in bytes, readers
    drop the whole batch. The salt `lora` is the adapter, others are reported with each block.
    """
    salts = [f"{name}={text}" for name, text in sorted(pages.salts.items()) if name != "lora"]
    return BlockStored(
        hashes=tuple(_number(digest.tobytes()) for digest in pages.digests),
        parent=None if pages.parent is None else _number(pages.parent),
        tokens=tuple(pages.tokens.tolist()),
        block_tokens=pages.page_tokens,
        medium=medium,
        lora=pages.salts.get("lora", ""),
        extra=(",".join(salts),) * len(pages.digests) if salts else (),
    )


def _number(digest: bytes) -> int:
    # 63 bits: a reader's integers may have a sign.
    return int.from_bytes(digest[:8], "little") >> 1
