"""Handover: pages on their way from a node that is drained to the nodes that stay."""
