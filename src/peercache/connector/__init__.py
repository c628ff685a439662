"""The remote KV connector: KV pages of any engine, by token ids, in PeerCache or in a folder."""

from peercache.connector.connector import RemoteKVConnector
from peercache.connector.folder import folder_store
from peercache.connector.metadata import ConnectorMetadata, cluster_store
from peercache.connector.queues import AsyncKVPrefetchQueue, AsyncKVStoreQueue

__all__ = [
    "AsyncKVPrefetchQueue",
    "AsyncKVStoreQueue",
    "ConnectorMetadata",
    "RemoteKVConnector",
    "cluster_store",
    "folder_store",
]
