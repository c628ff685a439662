"""The published memory of a node: one shared file, its generation words, and copies of batches."""
