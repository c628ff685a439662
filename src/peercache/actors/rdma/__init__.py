"""rdma: which queue pairs clients have to this node."""
