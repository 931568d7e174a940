"""The density as a pure function of (round, epoch): every rank computes the same, and a resumed run replays it."""

import math

from lightning_sparse.strategy.config import HierConfig


def is_dense_round(config: HierConfig, round_index: int) -> bool:
    """True for the first ``config.dense_rounds`` rounds."""
    return round_index < config.dense_rounds


def density_at(config: HierConfig, epoch: int, density: float) -> float:
    """The density of an epoch (counted from 0) on the way to ``density``.

    The exponential warm-up of Deep Gradient Compression (Lin et al., ICLR 2018, section 3.3): with W warm-up epochs
    epoch e has ``density ** ((e + 1) / (W + 1))``, and from epoch W on ``density``.

    >>> config = HierConfig(warmup_epochs=2)
    >>> [round(density_at(config, epoch, 0.001), 6) for epoch in range(4)]
    [0.1, 0.01, 0.001, 0.001]
    """
    if epoch >= config.warmup_epochs:
        return density
    return float(density ** ((epoch + 1) / (config.warmup_epochs + 1)))


def num_selected(density: float, shard_numel: int) -> int:
    """K = ceil(density * S), at least 1 and at most S.

    >>> num_selected(0.01, 250), num_selected(0.01, 1), num_selected(1.0, 7)
    (3, 1, 7)
    """
    return min(shard_numel, max(1, math.ceil(density * shard_numel)))
