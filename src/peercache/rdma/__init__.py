"""The rdma fabric: reads other nodes' published memory with one-sided READs, through pyverbs."""
