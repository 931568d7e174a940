"""A program that ends in the middle of an epoch and closes nothing: in its threads, torch and DALI are at work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.pictures import numbered_folder
from tests.data.test_datamodule import BACKENDS

QUIET = """
import logging
logging.getLogger("lightning_sparse").addHandler(logging.NullHandler())
"""
IMAGES = """
import sys
from pathlib import Path
from tests.data.fits import data
given = data("pytorch_lightning", Path(sys.argv[2]), backend=sys.argv[1], image_size=900, batch_size=12, threads=2)
"""
ANY = """
import sys
import torch
from lightning_sparse.flavours.pytorch_lightning import CachedDataModule

def decode(data: bytes) -> torch.Tensor:
    return torch.ones(2_000_000).sqrt().cumsum(0)[:3]

given = CachedDataModule(sys.argv[2] + "/source", sys.argv[2] + "/cache0", decode, 12, memory_gb=0.05, workers=WORKERS)
"""
TOKENS = """
import sys
from pathlib import Path
from lightning_sparse.data.tokens import prepare
from lightning_sparse.flavours.pytorch_lightning import TokenDataModule
tokens, text = Path(sys.argv[2]) / "train.bin", Path(sys.argv[2]) / "text.txt"
if not tokens.exists():
    text.write_text("In the beginning was the word. " * 200_000)
    prepare([text], str(tokens))
given = TokenDataModule(str(tokens), context=4096, batch_size=256)
"""
ENDS = """
given.setup("fit")
batches = iter(given.train_dataloader())
next(batches)
print("ends", flush=True)
"""
PROGRAMS = {
    "images": IMAGES,
    "any": ANY.replace("WORKERS", "0"),
    "workers": ANY.replace("WORKERS", "1"),
    "tokens": TOKENS,
}


TORCH, DALI = BACKENDS
SLOW_DALI = pytest.param("images", "dali", 3, marks=(*DALI.marks, pytest.mark.slow))


@pytest.mark.parametrize(
    ("program", "backend", "times"),
    [
        ("images", TORCH, 1),
        SLOW_DALI,
        *(pytest.param(each, "-", 3, marks=pytest.mark.slow) for each in ("any", "workers", "tokens")),
    ],
)
def test_a_program_may_end_in_the_middle_of_an_epoch(tmp_path: Path, program: str, backend: str, times: int) -> None:
    """Python would unwind its threads on their way back from native code, and C++ abort: exit status 134."""
    numbered_folder(tmp_path / "source")
    command = [sys.executable, "-W", "ignore", "-c", QUIET + PROGRAMS[program] + ENDS, backend, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    for _ in range(times):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
        assert (done.returncode, done.stdout.splitlines()[-1:], done.stderr) == (0, ["ends"], "")
