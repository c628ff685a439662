"""The common parts of the engine adapters: client, background threads, names of weights."""
