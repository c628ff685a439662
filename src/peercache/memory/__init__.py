"""Published memory: one shared file a node, its generation words, and copies of batches."""
