"""Discovery: where addresses of nodes to try come from, beside those that the settings name."""
