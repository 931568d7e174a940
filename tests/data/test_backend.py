"""The choice of the backend that makes batches: the faster backend, equal on all ranks and after a restart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparse.data import session
from lightning_sparse.data.pipeline.images import choose_backend
from tests.data.fits import data, fitted, module, saver, trainer
from tests.data.test_pipelines import needs_dali
from tests.helpers.data import numbered_folder
from tests.helpers.distributed import run_ranks

PACKAGE = "pytorch_lightning"


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
def test_backend_is_chosen_for_a_reason(
    wanted: Any, device: str, has_dali: bool, kept: str | None, chosen: str, why: str
) -> None:
    name, reason = choose_backend(wanted, torch.device(device), has_dali=has_dali, kept=kept)
    assert name == chosen
    assert why in reason


def test_dali_is_refused_if_it_is_not_installed() -> None:
    with pytest.raises(ValueError, match="pip install nvidia-dali"):
        choose_backend("dali", torch.device("cpu"), has_dali=False)


def chosen(folder: str) -> list[list[Any]]:
    """Return the backends of a run that resumes a DALI run, and of a new run; then with rank 1 lacking DALI."""
    root, rank = Path(folder), int(os.environ["RANK"])
    callback = saver(PACKAGE, root, "first", every_n_epochs=1)
    fitted(PACKAGE, root, {"backend": "dali"}, max_epochs=1, callbacks=[callback], enable_checkpointing=True)
    found = []
    for without in ([], [1]):
        session.has_dali = lambda without=without: rank not in without  # type: ignore[misc]
        used: list[Any] = []
        for path in (root / "first.ckpt", None):
            given = data(PACKAGE, root)
            begin = given.train_dataloader

            def train_dataloader(given: Any = given, begin: Any = begin, used: list[Any] = used) -> Any:
                used.append(given._session.backend)
                return begin()

            given.train_dataloader = train_dataloader
            trainer(PACKAGE, max_epochs=2).fit(module(PACKAGE), given, ckpt_path=path)
        found.append(used)
    return found


@needs_dali
def test_ranks_choose_one_backend_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    """A new run on a CPU would use torch."""
    numbered_folder(tmp_path / "source")
    expected = [["dali", "torch"], ["torch", "torch"]]
    assert run_ranks(chosen, str(tmp_path), nodes=1, devices=2, timeout=120, init=False) == [expected] * 2
