"""Commands of an operator: how a cluster is, its pages, and what changes it, from any host."""
