"""What a connector stores, as block events with token ids, for routers that read vLLM's format.

    publisher = BlockPublisher("tcp://0.0.0.0:5557", readers=["10.0.0.0/16"])
    metadata = ConnectorMetadata(…, on_stored=lambda told: publisher.publish([block_stored(told)]))

`followed_blocks` does this, and withdraws what no node holds any more.
Needs the extra `events`.
"""

from __future__ import annotations

from peercache.connector.metadata import StoredPages
from peercache.events.blocks import BlockStored

MEDIUM = "CPU"
"""Pages in PeerCache are in memory of hosts; a router takes other words for a disk."""


def block_stored(told: StoredPages, medium: str = MEDIUM) -> BlockStored:
    """Return the event of pages that were stored.

    A block's hash is the first 8 bytes of its digest as a number: readers lose a whole batch over
    one that is bytes. The salt `lora` is the adapter, others are reported with each block.
    """
    salts = [f"{name}={text}" for name, text in sorted(told.salts.items()) if name != "lora"]
    return BlockStored(
        hashes=tuple(_number(digest.tobytes()) for digest in told.digests),
        parent=None if told.parent is None else _number(told.parent),
        tokens=tuple(told.tokens.tolist()),
        block_tokens=told.page_tokens,
        medium=medium,
        lora=told.salts.get("lora", ""),
        extra=(",".join(salts),) * len(told.digests) if salts else (),
    )


def _number(digest: bytes) -> int:
    # 63 bits: a reader's integers may have a sign.
    return int.from_bytes(digest[:8], "little") >> 1
