"""The settings: one table, read from defaults, a file, the environment and flags."""
