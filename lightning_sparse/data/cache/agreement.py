"""What all ranks of a run agree on before they open a store: the samples, and the format of the memory tier."""

from __future__ import annotations

from lightning_sparse.data.cache.budget import format_for
from lightning_sparse.data.cache.folders import cache_folder
from lightning_sparse.data.cache.manifest import keep, kept_manifest, load_or_list
from lightning_sparse.data.cache.placement import Placement, owners_of
from lightning_sparse.data.cache.samples import Manifest
from lightning_sparse.data.config import CacheConfig
from lightning_sparse.data.peers.collectives import on_all_ranks, on_rank_zero
from lightning_sparse.data.sample import Format


def agreed_manifest(config: CacheConfig, split: str) -> Manifest:
    """Return the samples of a split, as rank 0 lists them. A collective.

    Each node keeps the list in its cache, where its ranks map it. It is sent only if it is missing on a node.

    Raises:
        ValueError, DataError: on all ranks, as `manifest.load_or_list` on rank 0.
    """
    own: list[Manifest] = []  # on rank 0

    def lead() -> str:
        own.append(load_or_list(config, split))
        return own[0].fingerprint

    fingerprint = on_rank_zero(lead)
    found = own[0] if own else kept_manifest(config, split)
    if found is not None and found.fingerprint != fingerprint:
        found = None
    if all(on_all_ranks(lambda: found is not None)):
        assert found is not None
        return found
    sent = on_rank_zero(lambda: own[0].to_bytes())
    return found or keep(config, split, sent)


def agreed_format(config: CacheConfig, manifest: Manifest, placement: Placement) -> Format:
    """Return the format of the memory tier: "decoded" if the samples of each node fit. A collective.

    Nodes with different formats could not read each other's samples.
    """

    def own() -> Format:
        if placement.device_index != 0:
            return "decoded"
        owned = owners_of(manifest, placement.num_nodes, config.seed) == placement.node_index
        return format_for(config, manifest, owned, cache_folder(config))

    if config.format != "auto":
        return config.format
    return "decoded" if all(each == "decoded" for each in on_all_ranks(own)) else "jpeg"
