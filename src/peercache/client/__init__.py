"""The blocking client: what lives in the engine's process."""
