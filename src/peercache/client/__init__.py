"""The blocking client of an engine: the client, its bridge, and its tie to the home node."""
