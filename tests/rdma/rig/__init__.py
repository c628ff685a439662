"""The rig: real verbs on a machine without a network adapter.

A User-Mode-Linux kernel, built once from the distribution's own source, runs as an ordinary
process and carries Soft-RoCE (`rdma_rxe`): libibverbs, queue pairs and one-sided READs are the
real ones, only the wire is a pair of virtual network interfaces. The guest sees the files of the
host, read-only below a scratch layer, so tests run there with the interpreter and the checkout
that are here.

    cache      where what was made once is kept, outside the checkout
    packages   the distribution's packages: unpacked for the guest, installed to build with
    kernel     the guest's kernel
    bindings   the two generations of pyverbs that the tests run with
    guest      one boot, one command
    links      inside the guest: cables that can be pulled
"""
