"""The `peercache` command and its subcommands."""
