"""Examples for docs/extending.md: another selector, and another tier of the data cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparse.kernels import accumulate, wire

# -- a selector --------------------------------------------------------------------------------------------------------


def compress_random(
    grad_S: Tensor,
    residual_S: Tensor | None,
    next_residual_S: Tensor | None,
    k: int,
    value_dtype: torch.dtype,
    scale: Tensor | None = None,
) -> Tensor:
    """Select entries at random. Has the signature of `lightning_sparse.kernels.compress`.

    To use it, replace ``compress`` in ``Sparse.select`` (lightning_sparse/exchange/paths.py). A selector sends exactly
    ``k`` pairs with ascending indices, writes the unsent part to ``next_residual_S``, and counts non-finite elements. A
    residual must not contain non-finite elements: ``compress`` writes zeros there, which this example leaves out.

    A real selector needs its own generator, saved in checkpoints. Here, torch's global generator draws the entries.
    """
    acc_S = grad_S.float() if scale is None else grad_S.float() * scale
    acc_S = acc_S if residual_S is None else acc_S + residual_S
    indices_K = torch.randperm(acc_S.numel())[:k].sort().values
    nonfinite = (~acc_S.isfinite()).sum()
    message_B = wire.encode(acc_S[indices_K], indices_K, acc_S.numel(), value_dtype, nonfinite)
    if next_residual_S is not None:
        sent_K, _, _ = wire.decode(message_B, acc_S.numel(), k, value_dtype)  # rounded, as receivers decode it
        next_residual_S.copy_(acc_S)
        next_residual_S[indices_K] -= sent_K
    return message_B


def test_selector_random_entries_sent_and_residual_add_up() -> None:
    torch.manual_seed(0)
    grad_S, next_S, sent_S = torch.randn(1000), torch.empty(1000), torch.empty(1000)
    message_B = compress_random(grad_S, None, next_S, 10, torch.bfloat16)
    accumulate(message_B[None], sent_S, 10, torch.bfloat16)
    assert int(sent_S.count_nonzero()) == 10
    torch.testing.assert_close(sent_S + next_S, grad_S)


# -- a cache tier ------------------------------------------------------------------------------------------------------


def test_cache_tier_rack_reads_image_that_left_storage(tmp_path: Path) -> None:
    """`SampleStore.get` reads from memory, the memory of other nodes, local disk and storage, in this order. A tier
    below memory overrides one method. The session creates its stores in `Session._open_store`
    (lightning_sparse/data/session.py); create yours there.
    """
    image = pytest.importorskip("PIL.Image", reason="the tier decodes images")
    pytest.importorskip("lmdb", reason="the disk cache")
    pytest.importorskip("torchvision", reason="decodes images")
    from lightning_sparse.data.cache.disk import CachedFile
    from lightning_sparse.data.cache.store import SampleStore
    from lightning_sparse.data.config import CacheConfig
    from lightning_sparse.data.sources.listing import load_or_list

    class WithRack(SampleStore):
        """Reads from ``rack``, a mapping from FileKey to CachedFile, before local disk."""

        rack: dict[Any, CachedFile] = {}

        def _from_files(self, tiers: Any, indices: Iterable[int]) -> Iterator[Any]:
            rest = []
            for index in indices:
                file = self.rack.get(self.manifest.key(index))
                found = None if file is None else self._from_disk(tiers, index, file)  # decodes it
                if found is None:
                    rest.append(index)
                else:
                    yield index, found
            yield from super()._from_files(tiers, rest)

    source = tmp_path / "images"
    for number in range(4):
        place = source / "train" / "cats" / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (40, 30), (60 * number, 0, 0)).save(place)
    config = CacheConfig(source=str(source), cache_dir=str(tmp_path / "cache"), short_side=30)
    store = WithRack(config, load_or_list(config, "train"))
    try:
        lost = source / "train" / "cats" / "2.png"
        store.rack[store.manifest.key(2)] = CachedFile(lost.read_bytes(), 30, 40, store._tiers().decoder)
        lost.unlink()
        assert [int(sample.data[0, 0, 0]) for sample in store.get([0, 1, 2, 3])] == [0, 60, 120, 180]
    finally:
        store.close()
