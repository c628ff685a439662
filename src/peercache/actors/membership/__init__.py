"""Membership: the nodes of the cluster, and their states."""
