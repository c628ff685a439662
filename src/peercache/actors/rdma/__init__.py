"""rdma: the queue pairs that clients have to this node."""
