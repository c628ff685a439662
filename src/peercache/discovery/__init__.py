"""Discovery: sources of node addresses, in addition to those in the settings."""
