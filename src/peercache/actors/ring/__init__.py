"""Ring: which nodes own which records."""
