"""The actors of a node: one state machine a file, none of which awaits."""
