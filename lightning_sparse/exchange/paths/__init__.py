"""The paths between nodes, one file each. A new one is a new file, and a line in each of the two tables below.

With P = M * L ranks, w = bytes of an element, K pairs of p bytes in a message (received per device, between nodes):

=========  ============================================  ==========================  ===================================
path       between nodes                                 bytes                       kernels, besides
=========  ============================================  ==========================  ===================================
flat       all-reduce over all P ranks                   2 (P-1)/P * N * w / L       add N
dense      all-reduce of the shard over M nodes          2 (M-1)/M * S * w           add S; twice N inside the node
dense16    all-to-all, then all-gather, of 16 bits       2 (M-1)/M * S * 2           cast S; twice N inside the node
sparse     all-gather of one message per node            (M-1) * K * p               select S, scatter M K, fill S;
                                                                                     twice N inside the node
regional   all-to-all, then all-gather of K / M pairs    2 (M-1)/M * K * p           select S + S/M, scatter 2 K,
                                                                                     fill S + S/M; twice N inside
=========  ============================================  ==========================  ===================================

(The ring of all ranks enters each node once, so its L devices share that traffic.) Sparse grows with M and dense does
not: with pairs of p bytes and 4-byte gradients, sparse receives less while density < 8 / (p M). Paths apply different
shares of a gradient, so time alone does not compare them.
"""

from typing import Literal

from lightning_sparse.exchange.paths.dense import Dense
from lightning_sparse.exchange.paths.dense16 import Dense16
from lightning_sparse.exchange.paths.flat import Flat
from lightning_sparse.exchange.paths.path import Path, Shard, Stretches, Work
from lightning_sparse.exchange.paths.regional import Regional
from lightning_sparse.exchange.paths.sparse import Sparse

Exchange = Literal["auto", "sparse", "regional", "dense", "dense16"]
"""What a user may ask for."""
PATHS: tuple[type[Path], ...] = (Dense, Flat, Dense16, Sparse, Regional)
"""What leaves less comes first."""

__all__ = ["PATHS", "Dense", "Exchange", "Flat", "Path", "Shard", "Sparse", "Stretches", "Work"]
