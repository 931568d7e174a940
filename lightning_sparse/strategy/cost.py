"""What the two paths cost on the slow link. Pure arithmetic: the same functions plan, decide and are held to account.

All are bytes *received per device* from other nodes in one round, with M nodes and shards of S elements:

=========  ==============================================  ====================================
path       how                                             bytes
=========  ==============================================  ====================================
dense      ring all-reduce of the shard over M nodes       2 (M-1)/M * S * itemsize
sparse     all-gather of one message of K pairs            (M-1) * message
flat       ring all-reduce over all P = M*L ranks          2 (P-1)/P * N * itemsize / L
=========  ==============================================  ====================================

(The ring of all ranks crosses into each node once, so its L devices share that traffic.) Sparse grows with M and dense
does not: with pairs of b bytes and 4-byte gradients sparse wins while density < 8 / (b M).
"""


def dense_bytes(num_nodes: int, shard_numel: int, itemsize: int) -> float:
    """Of the all-reduce of a shard between nodes."""
    return 2 * (num_nodes - 1) / num_nodes * shard_numel * itemsize


def sparse_bytes(num_nodes: int, message_nbytes: int) -> float:
    """Of the all-gather of one message a node."""
    return float((num_nodes - 1) * message_nbytes)


def flat_bytes(nodes: int, world_size: int, numel: int, itemsize: int) -> float:
    """Of an all-reduce over all ranks, averaged over devices."""
    if nodes == 1:
        return 0.0
    return 2 * (world_size - 1) / world_size * numel * itemsize * nodes / world_size


def sparse_is_cheaper(num_nodes: int, shard_numel: int, itemsize: int, message_nbytes: int) -> bool:
    """Whether one sparse exchange moves fewer bytes over the slow link than the dense one."""
    return sparse_bytes(num_nodes, message_nbytes) < dense_bytes(num_nodes, shard_numel, itemsize)
