"""Placement of samples on nodes: each sample has an owner, which keeps it in memory and serves it to other nodes."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_sparse.data.cache.samples import Manifest
from lightning_sparse.data.rng import bits


@dataclass(frozen=True)
class Placement:
    """Position of this process among the ranks."""

    node_index: int = 0
    num_nodes: int = 1
    device_index: int = 0


def owners(labels: npt.NDArray[np.int64], num_nodes: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the node that owns each sample. A pure function.

    Each class is shuffled and dealt out to the nodes in turn; the next class continues where the last one ended. So the
    samples of each class, and all samples, are spread evenly: nodes differ by at most one sample.

    Args:
        labels: class of each sample.

    Raises:
        ValueError: if num_nodes is less than 1.

    >>> owners(np.array([0, 0, 0, 1, 1, 1]), num_nodes=2, seed=1).tolist()
    [1, 0, 0, 0, 1, 1]
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes={num_nodes} must be at least 1.")
    dealt = np.lexsort((bits(seed, np.arange(len(labels))), labels))  # sorted by class, shuffled within each
    result = np.empty(len(labels), np.int64)
    result[dealt] = np.arange(len(labels)) % num_nodes
    return result


def owners_of(manifest: Manifest, num_nodes: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the node that owns each sample of a manifest. A pure function.

    All samples of a row group have one owner, so that only one node reads it; unless there are fewer groups than nodes.
    """
    if manifest.has_row_groups and len(manifest.shards) >= num_nodes:
        return owners(np.zeros(len(manifest.shards), np.int64), num_nodes, seed)[manifest.shard_of]
    return owners(manifest.strata, num_nodes, seed)
