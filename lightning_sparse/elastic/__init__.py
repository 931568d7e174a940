"""Updates between nodes that join and leave: lighthouse, rounds, snapshots, and the assignment of samples."""

from lightning_sparse.elastic.sampling import ElasticSampler
from lightning_sparse.elastic.updates import ElasticConfig, ElasticUpdates

__all__ = ["ElasticConfig", "ElasticSampler", "ElasticUpdates"]
