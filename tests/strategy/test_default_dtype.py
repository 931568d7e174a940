"""Programs that set `torch.set_default_dtype(torch.float64)` train and resume."""

import importlib
from pathlib import Path

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.strategy.test_signals import PACKAGE, fit
from tests.strategy.trainers import lightning_of


def resumed(kind: str, folder: str) -> tuple[torch.dtype, bool]:
    """Return the dtype of the weights, and whether a resumed run ends with the weights of the uninterrupted run."""
    torch.set_default_dtype(torch.float64)
    callbacks = importlib.import_module(f"{lightning_of(PACKAGE).__name__}.callbacks")
    saver = callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    _, _, expected = fit(kind, max_steps=9, callbacks=[saver], enable_checkpointing=True)
    _, _, found = fit(kind, f"{folder}/step=4.ckpt", max_steps=9)
    return found.dtype, torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["hier", "local", "fsdp"])
def test_run_with_double_precision_by_default_resumes_bit_identically(kind: str, tmp_path: Path) -> None:
    found = run_ranks(resumed, kind, str(tmp_path), nodes=2, devices=2, timeout=150, init=False)
    assert found == [(torch.float64, True)] * 4
