"""The fabric over RDMA verbs: one-sided READs, and the node's ends of queue pairs."""
