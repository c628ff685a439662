"""Directory shard: which nodes hold which pages."""
