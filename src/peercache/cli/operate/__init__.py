"""Commands of an operator, from any host: the state of a cluster, its pages, and changes to it."""
