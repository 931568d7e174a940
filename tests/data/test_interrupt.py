"""Ctrl-C, or the end of the program, while storage hangs: nobody waits for it.

Storage would answer after `STALL_S`, which is also its timeout; a program that does not wait for it takes seconds, most
of them for the end of the interpreter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.pictures import numbered_folder
from tests.data.test_datamodule import BACKENDS

STALL_S, LIMIT_S = 600, 120
OPENED = f"""
import contextlib, logging, os, signal, sys, time
from pathlib import Path
from tests.data.fits import *
kind, folder = sys.argv[1], Path(sys.argv[2])
logging.getLogger("lightning_sparse").addHandler(logging.NullHandler())
def hang():  # as a dead mount does: the process that reads storage
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (each / "cmdline").read_bytes().split(b"\\0")
            if command[1:2] and command[1].endswith(b"storage_reader.py") and os.fsencode(folder / "source") in command:
                os.kill(int(each.name), signal.SIGSTOP)
    print("hangs", flush=True)
options = {{"memory_gb": 0.05, "storage_timeout": {STALL_S}}}
given = data("pytorch_lightning", folder, backend=kind, threads=1, **options)
"""
TRAIN = """
model = module("pytorch_lightning")
step = type(model).training_step

def training_step(self, batch, batch_idx):
    if batch_idx == 1:
        hang()
    return step(self, batch, batch_idx)

type(model).training_step = training_step
trainer("pytorch_lightning", max_epochs=1).fit(model, given)
"""
LOOP = """
given.setup("fit")
for number, batch in enumerate(given.train_dataloader()):
    if number == 1:
        hang()
"""
BODY = LOOP + "        time.sleep(3600)\n"
END = """
given.setup("fit")
batches = iter(given.train_dataloader())
next(batches)
hang()
"""
WARM = f"""
import sys, threading, time
from pathlib import Path
from lightning_sparse.cli import main
from lightning_sparse.data.cache import storage_process
script, asked = Path(sys.argv[2]) / "hangs.py", Path(sys.argv[2]) / "asked"
script.write_text(f'''
import sys, time
sys.path.insert(0, {{str(Path(storage_process.__file__).parent)!r}})
import storage_reader
answer = storage_reader.answer
def hanging(source, kind, *args):
    if kind == ord("r"):
        open({{str(asked)!r}}, "w").close()
        time.sleep({STALL_S})
    return answer(source, kind, *args)
storage_reader.answer = hanging
storage_reader.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
''')
storage_process._READER = script
def say():
    while not asked.exists():
        time.sleep(0.02)
    print("hangs", flush=True)
threading.Thread(target=say, daemon=True).start()
main(["cache", "warm", sys.argv[2] + "/source", sys.argv[2] + "/cache", "--splits", "train"])
"""
TORCH, DALI = BACKENDS
SLOW_DALI = pytest.param("dali", marks=(*DALI.marks, pytest.mark.slow))


def run(code: str, kind: str, folder: Path, *, interrupt: bool) -> tuple[int, str]:
    """Run a program until it hangs, and press Ctrl-C or wait for its end. Returns its status and standard error."""
    numbered_folder(folder / "source")
    command = [sys.executable, "-W", "ignore", "-c", code, kind, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdout is not None
        assert "hangs\n" in iter(program.stdout.readline, "")
        if interrupt:
            time.sleep(1)  # by now it waits
            assert program.poll() is None
            program.send_signal(signal.SIGINT)
        begin = time.monotonic()
        try:
            _, errors = program.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            program.kill()
            raise
        finally:
            kill_reader(folder)
    print(f"ended after {time.monotonic() - begin:.1f} s")
    return program.returncode, errors


def kill_reader(folder: Path) -> None:
    """One that was stopped does not see that its program is gone."""
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (each / "cmdline").read_bytes()
            if b"storage_reader.py" in command and os.fsencode(folder / "source") in command:
                os.kill(int(each.name), signal.SIGKILL)


@pytest.mark.parametrize("kind", [TORCH, SLOW_DALI])
def test_ctrl_c_ends_a_fit_that_waits_for_storage(tmp_path: Path, kind: str) -> None:
    run(OPENED + TRAIN, kind, tmp_path, interrupt=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TORCH, DALI])
@pytest.mark.parametrize("code", [LOOP, BODY], ids=["waiting", "computing"])
def test_ctrl_c_ends_a_loop_of_ones_own(tmp_path: Path, kind: str, code: str) -> None:
    """Where nobody closes anything: the loop waits for a batch, or computes while threads wait for the next one."""
    _, errors = run(OPENED + code, kind, tmp_path, interrupt=True)
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_ends_a_fill_that_waits_for_storage(tmp_path: Path) -> None:
    run(WARM, "-", tmp_path, interrupt=True)


@pytest.mark.parametrize("kind", [TORCH, SLOW_DALI])
def test_a_program_may_end_while_storage_hangs(tmp_path: Path, kind: str) -> None:
    assert run(OPENED + END, kind, tmp_path, interrupt=False) == (0, "")
