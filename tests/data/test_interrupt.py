"""Ctrl-C, or the end of the program, in the middle of an epoch, mostly while storage hangs: nobody waits for it.

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

from tests.data.mounts import sshfs_mount
from tests.data.pictures import numbered_folder
from tests.data.test_datamodule import BACKENDS

STALL_S, LIMIT_S = 600, 120
OPENED = f"""
import contextlib, logging, os, signal, sys, time
from pathlib import Path
from tests.data.fits import *
kind, folder = sys.argv[1], Path(sys.argv[2])
logging.getLogger("lightning_sparse").addHandler(logging.NullHandler())
def hang():
    if "SERVER" in os.environ:  # of a mount
        os.kill(int(os.environ["SERVER"]), signal.SIGSTOP)
        return print("hangs", flush=True)
    for each in Path("/proc").glob("[0-9]*"):  # else what a dead mount stops: the process that reads storage
        with contextlib.suppress(OSError):
            command = (each / "cmdline").read_bytes().split(b"\\0")
            if command[1:2] and command[1].endswith(b"storage_reader.py") and os.fsencode(folder / "source") in command:
                os.kill(int(each.name), signal.SIGSTOP)
    print("hangs", flush=True)
options = {{"memory_gb": 0.05, "storage_timeout": {STALL_S}}}
"""
IMAGES = """
given = data("pytorch_lightning", folder, backend=kind, threads=1, **options)
"""
WORKERS = """
def picture(data: bytes):
    return torch.from_numpy(decode(data).copy()).permute(2, 0, 1).float()
from lightning_sparse.data.decode import decode
cache = str(folder / "cache0")
given = ours("pytorch_lightning").CachedDataModule(str(folder / "source"), cache, picture, BATCH, workers=2, **options)
"""
TOKENS = """
from lightning_sparse.data.tokens import prepare
text, tokens = folder / "text.txt", folder / "train.bin"
text.write_text("In the beginning was the word. " * 200_000)
prepare([text], str(tokens))
given = ours("pytorch_lightning").TokenDataModule(str(tokens), context=4096, batch_size=256)
"""
BUSY = IMAGES.replace("threads=1", "threads=2, image_size=900, batch_size=12")
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
from lightning_sparse.data.sources import storage
script, asked = Path(sys.argv[2]) / "hangs.py", Path(sys.argv[2]) / "asked"
script.write_text(f'''
import sys, time
sys.path.insert(0, {{str(Path(storage.__file__).parent)!r}})
import storage_reader
answer = storage_reader.answer
def hanging(source, kind, *args):
    if kind == "read":
        open({{str(asked)!r}}, "w").close()
        time.sleep({STALL_S})
    return answer(source, kind, *args)
storage_reader.answer = hanging
storage_reader.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
''')
storage._READER = script
def say():
    while not asked.exists():
        time.sleep(0.02)
    print("hangs", flush=True)
threading.Thread(target=say, daemon=True).start()
main(["cache", "warm", sys.argv[2] + "/source", sys.argv[2] + "/cache", "--splits", "train"])
"""
TORCH, DALI = BACKENDS
SLOW_DALI = pytest.param("dali", marks=(*DALI.marks, pytest.mark.slow))


def run(code: str, kind: str, folder: Path, *, send: int | None = None, **environment: str) -> tuple[int, str]:
    """Run a program until it hangs, and send a signal or wait for its end. Returns its status and standard error."""
    if not (folder / "source").exists():
        numbered_folder(folder / "source")
    command = [sys.executable, "-W", "ignore", "-c", code, kind, str(folder)]
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as program:
        assert program.stdout is not None
        assert "hangs\n" in iter(program.stdout.readline, "")
        if send is not None:
            time.sleep(1)  # by now it waits
            assert program.poll() is None
            program.send_signal(send)
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


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (IMAGES, TORCH),
        pytest.param(IMAGES, "dali", marks=SLOW_DALI.marks),
        pytest.param(WORKERS, "-", marks=pytest.mark.slow),
    ],
    ids=["torch", "dali", "workers"],
)
def test_ctrl_c_ends_a_fit_that_waits_for_storage(tmp_path: Path, program: str, kind: str) -> None:
    run(OPENED + program + TRAIN, kind, tmp_path, send=signal.SIGINT)


@pytest.mark.sshfs
@pytest.mark.parametrize(
    ("program", "code"),
    [
        pytest.param(IMAGES, BODY, marks=pytest.mark.slow, id="images"),
        pytest.param(WORKERS, LOOP, marks=pytest.mark.slow, id="workers, waiting"),
        pytest.param(WORKERS, BODY, marks=pytest.mark.slow, id="workers, computing"),
    ],
)
def test_ctrl_c_ends_a_loop_on_a_mount_that_hangs(tmp_path: Path, program: str, code: str) -> None:
    """The process that reads it hangs in the kernel, where nothing ends it."""
    numbered_folder(tmp_path / "real")
    with sshfs_mount(tmp_path / "real", tmp_path / "source") as server:
        _, errors = run(OPENED + program + code, "torch", tmp_path, send=signal.SIGINT, SERVER=str(server))
    assert errors.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.slow
def test_workers_end_with_a_program_that_is_killed(tmp_path: Path) -> None:
    run(OPENED + WORKERS + LOOP, "-", tmp_path, send=signal.SIGKILL)


@pytest.mark.slow
def test_ctrl_c_ends_a_fill_that_waits_for_storage(tmp_path: Path) -> None:
    run(WARM, "-", tmp_path, send=signal.SIGINT)


@pytest.mark.parametrize("kind", [TORCH, SLOW_DALI])
@pytest.mark.slow
def test_a_program_may_end_while_storage_hangs(tmp_path: Path, kind: str) -> None:
    assert run(OPENED + IMAGES + END, kind, tmp_path) == (0, "")


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        (BUSY, TORCH),
        pytest.param(BUSY, "dali", marks=SLOW_DALI.marks),
        *(pytest.param(each, "-", marks=pytest.mark.slow) for each in (WORKERS, TOKENS)),
    ],
    ids=["torch", "dali", "workers", "tokens"],
)
def test_a_program_may_end_in_the_middle_of_an_epoch(tmp_path: Path, program: str, kind: str) -> None:
    """Python would unwind its threads on their way back from native code, and C++ abort: exit status 134."""
    assert run(OPENED + program + END.replace("hang()", "print('hangs', flush=True)"), kind, tmp_path) == (0, "")
