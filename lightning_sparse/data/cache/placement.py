"""Which node owns which sample: the part of the data set that the node keeps in memory and serves to others. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Placement:
    """Where this process runs: its node and its device there; `lightning_sparse.topology.Topology` knows them."""

    node_index: int = 0
    num_nodes: int = 1
    device_index: int = 0
    num_devices: int = 1


def owners(labels: npt.NDArray[np.int64], num_nodes: int, seed: int) -> npt.NDArray[np.int64]:
    """The node of every sample: each class is shuffled and dealt out like cards, the next class goes on where it ended.

    So the samples of one class, and all samples, are spread over nodes as evenly as whole samples can be: two nodes
    differ by at most one. A contiguous cut of a list that is sorted by class would give each node classes of its own.

    Args:
        labels: class of each sample.

    Raises:
        ValueError: when there is no node.

    >>> owners(np.array([0, 0, 0, 1, 1, 1]), num_nodes=2, seed=1).tolist()
    [1, 0, 0, 0, 1, 1]
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes={num_nodes}: samples are owned by at least one node.")
    # raw output of a counter-based generator: the same on every machine and for every version of numpy
    shuffled = np.random.Philox(key=seed & 0xFFFFFFFFFFFFFFFF).random_raw(len(labels))
    dealt = np.lexsort((shuffled, labels))  # by class, shuffled within
    result = np.empty(len(labels), np.int64)
    result[dealt] = np.arange(len(labels)) % num_nodes
    return result
