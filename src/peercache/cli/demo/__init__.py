"""The demo: a cluster of three nodes on this machine, a killed node, and every byte checked."""
