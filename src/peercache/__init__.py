"""PeerCache: peer-to-peer L3 storage for SGLang's HiCache."""
