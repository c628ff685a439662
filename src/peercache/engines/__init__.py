"""What adapters of several engines share: client, threads behind the engine, names of weights."""
