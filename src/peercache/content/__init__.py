"""Content addresses: page keys made from token ids, for engines that have no page hashes."""
