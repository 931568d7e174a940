"""Which backend makes batches: the faster one, the same on all ranks and after a restart."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparse.data import session
from lightning_sparse.data.pipeline.images import choose_backend
from tests.data.fits import data, fitted, module, saver, trainer
from tests.data.pictures import numbered_folder
from tests.helpers.distributed import run_ranks

FLAVOUR = "pytorch_lightning"


@pytest.mark.parametrize(
    ("wanted", "device", "has_dali", "kept", "chosen", "why"),
    [
        ("auto", "cpu", True, None, "torch", "on a CPU it is faster than DALI"),
        ("auto", "cpu", False, None, "torch", "on a CPU it is faster than DALI"),
        ("auto", "cuda:0", True, None, "dali", "it runs on the GPU"),
        ("auto", "cuda:0", False, None, "torch", "DALI, which runs on the GPU, is not installed"),
        ("auto", "cpu", True, "dali", "dali", "as in the run that this one continues"),
        ("auto", "cuda:0", True, "torch", "torch", "as in the run that this one continues"),
        ("auto", "cpu", False, "dali", "torch", "DALI, which this run began with"),
        ("dali", "cpu", True, "torch", "dali", "as requested"),
        ("torch", "cuda:0", True, "dali", "torch", "as requested"),
    ],
)
def test_the_backend_is_chosen_for_a_reason(
    wanted: Any, device: str, has_dali: bool, kept: str | None, chosen: str, why: str
) -> None:
    name, reason = choose_backend(wanted, torch.device(device), has_dali=has_dali, kept=kept)
    assert name == chosen
    assert why in reason


def test_dali_is_refused_if_it_is_not_installed() -> None:
    with pytest.raises(ValueError, match="pip install nvidia-dali"):
        choose_backend("dali", torch.device("cpu"), has_dali=False)


def chosen(folder: str, without: list[int]) -> list[Any]:
    """The backends of a run that continues one with DALI, and of a new one. `without`: ranks that lack DALI by then."""
    root, rank = Path(folder), int(os.environ["RANK"])
    callback = saver(FLAVOUR, root, "first", every_n_epochs=1)
    fitted(FLAVOUR, root, {"backend": "dali"}, max_epochs=1, callbacks=[callback], enable_checkpointing=True)
    session.has_dali = lambda: rank not in without  # type: ignore[assignment]
    used = []
    for path in (root / "first.ckpt", None):
        given = data(FLAVOUR, root)
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
    """A new run would use torch on a CPU."""
    numbered_folder(tmp_path / "source")
    assert run_ranks(chosen, str(tmp_path), without, nodes=1, devices=2, timeout=120, init=False) == [expected] * 2
