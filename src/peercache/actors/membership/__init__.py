"""Membership: who is in the cluster."""
