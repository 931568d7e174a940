"""Which backend makes batches: the faster one, the same on all ranks and after a restart."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sparse.data import session
from lightning_sparse.data.pipeline.backend import Known, choose_backend
from lightning_sparse.data.pipeline.sizes import ImageSizes
from tests.data.fake_store import FolderStore
from tests.data.fits import data, fitted, module, saver, trainer
from tests.data.pictures import numbered_folder
from tests.helpers.distributed import run_ranks

FLAVOUR = "pytorch_lightning"
SMALL, PHOTOGRAPHS = Known("decoded", 32), Known("decoded", 224)
FILES, LARGE_FILES = Known("jpeg", 224), Known("jpeg", 224, scaled=True)


@pytest.mark.parametrize(
    ("wanted", "device", "known", "has_dali", "kept", "chosen", "why"),
    [
        ("auto", "cpu", PHOTOGRAPHS, True, None, "torch", "it resizes faster than DALI"),
        ("auto", "cpu", SMALL, True, None, "dali", "faster than torch for small images"),
        ("auto", "cpu", FILES, True, None, "dali", "only the part in the crop"),
        ("auto", "cpu", LARGE_FILES, True, None, "torch", "at half their size or less"),
        ("auto", "cuda:0", PHOTOGRAPHS, True, None, "dali", "it runs on the GPU"),
        ("auto", "cuda:0", PHOTOGRAPHS, False, None, "torch", "DALI, which would be faster, is not installed"),
        ("auto", "cpu", PHOTOGRAPHS, False, None, "torch", "it resizes faster than DALI"),
        ("torch", "cuda:0", PHOTOGRAPHS, True, "dali", "torch", "as requested"),
        ("auto", "cpu", PHOTOGRAPHS, True, "dali", "dali", "as in the run that this one continues"),
        ("auto", "cpu", PHOTOGRAPHS, False, "dali", "torch", "DALI, which this run began with"),
        ("dali", "cpu", PHOTOGRAPHS, True, "torch", "dali", "as requested"),
    ],
)
def test_the_backend_is_chosen_for_a_reason(
    wanted: Any, device: str, known: Known, has_dali: bool, kept: str | None, chosen: str, why: str
) -> None:
    name, reason = choose_backend(wanted, torch.device(device), known, has_dali=has_dali, kept=kept)
    assert name == chosen
    assert why in reason


def test_what_is_known_of_files_says_whether_libjpeg_scales_them(tmp_path: Path) -> None:
    store, probed = FolderStore(tmp_path, "jpeg", 64), np.array([[1, 255, 900], [1, 256, 300], [1, 900, 256]])
    assert Known.of(store, ImageSizes({0: 32, 2: 56}), probed) == Known("jpeg", 56, True)
    assert Known.of(store, ImageSizes(56), probed[:1]) == Known("jpeg", 56, False)
    assert Known.of(store, ImageSizes(56), probed[:0]) == Known("jpeg", 56, False)


def test_dali_is_refused_if_it_is_not_installed() -> None:
    with pytest.raises(ValueError, match="pip install nvidia-dali"):
        choose_backend("dali", torch.device("cpu"), PHOTOGRAPHS, has_dali=False)


def chosen(folder: str, without: list[int]) -> list[Any]:
    """The backends of a run and of one that goes on. `without`: ranks that have no DALI."""
    root, rank = Path(folder), int(os.environ["RANK"])
    session.has_dali = lambda: rank not in without  # type: ignore[assignment]
    callback = saver(FLAVOUR, root, "first", every_n_epochs=1)
    _, t = fitted(FLAVOUR, root, max_epochs=1, callbacks=[callback], enable_checkpointing=True)
    used = []
    for path in (root / "first.ckpt", None):
        given = data(FLAVOUR, root, image_size={0: 16, 5: 224})
        begin = given.train_dataloader
        given.train_dataloader = lambda given=given, begin=begin: used.append(given._session.backend) or begin()
        trainer(FLAVOUR, max_epochs=2).fit(module(FLAVOUR), given, ckpt_path=path)
    return used


@pytest.mark.skipif(importlib.util.find_spec("nvidia") is None, reason="DALI is not installed")
@pytest.mark.parametrize(
    ("without", "expected"),
    [([], ["dali", "torch"]), ([1], ["torch", "torch"])],
    ids=["both", "one rank lacks"],
)
def test_all_ranks_choose_alike_and_a_resumed_run_keeps_the_choice(
    tmp_path: Path, without: list[int], expected: list[str]
) -> None:
    """Of images of 16 pixels, DALI; of those of 224, torch."""
    numbered_folder(tmp_path / "source")
    assert run_ranks(chosen, str(tmp_path), without, nodes=1, devices=2, timeout=120, init=False) == [expected] * 2
