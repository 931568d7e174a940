"""Ctrl-C while storage hangs: it ends a run at once, wherever the run waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.pictures import numbered_folder
from tests.data.test_datamodule import BACKENDS

TRAIN = """
import os, signal, sys
from pathlib import Path
from tests.data.fits import *
backend, folder = sys.argv[1], Path(sys.argv[2])
given, model = data("pytorch_lightning", folder, backend=backend, threads=1), module("pytorch_lightning")
step = type(model).training_step

def training_step(self, batch, batch_idx):
    if batch_idx == 1:  # as a dead mount stops it
        os.kill(given._session._stores[0]._tiers().storage._reader._process.pid, signal.SIGSTOP)
        print("hangs", flush=True)
    return step(self, batch, batch_idx)

type(model).training_step = training_step
trainer("pytorch_lightning", max_epochs=1).fit(model, given)
"""
WARM = """
import sys, threading, time
from pathlib import Path
from lightning_sparse.cli import main
from lightning_sparse.data.cache import storage_process
script, asked = Path(sys.argv[2]) / "hangs.py", Path(sys.argv[2]) / "asked"
script.write_text(Path(storage_process.__file__).with_name("storage_reader.py").read_text().replace(
    'if kind == ord("r"):',
    f'if kind == ord("r"): open({str(asked)!r}, "w").close(); time.sleep(600)\\n        if kind == ord("r"):', 1))
storage_process._READER = script
def say():
    while not asked.exists():
        time.sleep(0.02)
    print("hangs", flush=True)
threading.Thread(target=say, daemon=True).start()
main(["cache", "warm", sys.argv[2] + "/source", sys.argv[2] + "/cache", "--splits", "train"])
"""


def interrupt(code: str, *arguments: str) -> None:
    """Press Ctrl-C once the program says that it hangs, and wait for its end."""
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line == "hangs\n":
                break
        time.sleep(1)  # by now it waits
        assert run.poll() is None
        run.send_signal(signal.SIGINT)
        try:
            run.wait(timeout=60)  # of 300; most of it is the end of the interpreter on a busy machine
        except subprocess.TimeoutExpired:
            run.kill()
            raise


TORCH, DALI = BACKENDS


@pytest.mark.parametrize("backend", [TORCH, pytest.param("dali", marks=(*DALI.marks, pytest.mark.slow))])
def test_ctrl_c_ends_a_run_that_waits_for_storage(tmp_path: Path, backend: str) -> None:
    numbered_folder(tmp_path / "source")
    interrupt(TRAIN, backend, str(tmp_path))


def test_ctrl_c_ends_a_fill_that_waits_for_storage(tmp_path: Path) -> None:
    numbered_folder(tmp_path / "source")
    interrupt(WARM, "-", str(tmp_path))
