"""The actors of a node, one folder each, and the loop that runs them."""
