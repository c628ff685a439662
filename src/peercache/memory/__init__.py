"""Published memory: one shared file per node, its generation words, and copies of batches."""
