"""Programs that are interrupted, or end, during an epoch do not wait for storage that hangs.

Storage would answer after `STALL_S`, which is also its timeout.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.programs import Ended, program
from tests.data.test_pipelines import needs_dali
from tests.helpers.data import numbered_folder, sshfs_mount

STALL_S = 600
OPENED = f"""
import contextlib, logging, os, signal, sys, time
from pathlib import Path
from lightning_sparse.data.decode import decode
from tests.data.fits import *
kind, folder = sys.argv[1], Path(sys.argv[2])
logging.getLogger("lightning_sparse").addHandler(logging.NullHandler())

def hang():
    "Stop what reads storage, as a dead mount does."
    if "SERVER" in os.environ:
        os.kill(int(os.environ["SERVER"]), signal.SIGSTOP)
    else:
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (each / "cmdline").read_bytes().split(b"\\0")
                name = command[1:2] and command[1]
                if name and name.endswith(b"storage_reader.py") and os.fsencode(folder / "source") in command:
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
FIT = """
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
COMPUTES = LOOP + "        time.sleep(3600)\n"
END = """
given.setup("fit")
batches = iter(given.train_dataloader())
next(batches)
hang()
"""
ENDS = END.replace("hang()", "print('hangs', flush=True)")
FILL = f"""
import threading
from lightning_sparse.cli import main
from lightning_sparse.data.sources import storage
script, asked = folder / "hangs.py", folder / "asked"
script.write_text(f'''
import sys, time
sys.path.insert(0, {{str(Path(storage.__file__).parents[3])!r}})
from lightning_sparse.data.sources import storage_reader
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
sys.exit(main(["cache", "warm", str(folder / "source"), str(folder / "cache"), "--splits", "train"]))
"""
slow = pytest.mark.slow


def ended(code: str, kind: str, folder: Path, send: int | None = None, **environment: str) -> Ended:
    """Run a program until it hangs. Then send a signal or wait for its end."""
    if not (folder / "source").exists():
        numbered_folder(folder / "source")
    with program(OPENED + code, kind, folder, whole=True, **environment) as running, killed_readers(folder):
        running.wait_for("hangs")
        if send is not None:
            running.wait_until_idle()
            running.send(send)
        return running.wait()


@contextlib.contextmanager
def killed_readers(folder: Path) -> Iterator[None]:
    """Kill storage readers at the end. A stopped reader does not notice that its program has ended."""
    try:
        yield
    finally:
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (each / "cmdline").read_bytes()
                if b"storage_reader.py" in command and os.fsencode(folder / "source") in command:
                    os.kill(int(each.name), signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        pytest.param(IMAGES + FIT, "torch", id="images"),
        pytest.param(IMAGES + FIT, "dali", marks=[needs_dali, slow], id="dali"),
        pytest.param(WORKERS + FIT, "-", marks=slow, id="workers"),
        pytest.param(FILL, "-", marks=slow, id="fill"),
    ],
)
def test_program_interrupted_while_storage_hangs_ends(tmp_path: Path, code: str, kind: str) -> None:
    assert ended(code, kind, tmp_path, signal.SIGINT).status != 0


@pytest.mark.sshfs
@pytest.mark.slow
@pytest.mark.parametrize(
    "code", [IMAGES + COMPUTES, WORKERS + LOOP, WORKERS + COMPUTES], ids=["images", "workers wait", "workers"]
)
def test_loop_interrupted_while_a_mount_hangs_ends(tmp_path: Path, code: str) -> None:
    """The process that reads the mount hangs in the kernel and cannot be killed."""
    numbered_folder(tmp_path / "real")
    with sshfs_mount(tmp_path / "real", tmp_path / "source") as server:
        found = ended(code, "torch", tmp_path, signal.SIGINT, SERVER=str(server))
    assert found.stderr.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.slow
def test_workers_of_a_killed_program_end(tmp_path: Path) -> None:
    numbered_folder(tmp_path / "source")
    with program(OPENED + WORKERS + LOOP, "-", tmp_path) as running, killed_readers(tmp_path):
        running.wait_for("hangs")
        assert len(running.left()) > 2
        running.send(signal.SIGKILL)
        running.wait()
        running.wait_until_alone()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        pytest.param(BUSY + ENDS, "torch", id="busy"),
        pytest.param(BUSY + ENDS, "dali", marks=[needs_dali, slow], id="busy dali"),
        pytest.param(WORKERS + ENDS, "-", marks=slow, id="workers"),
        pytest.param(TOKENS + ENDS, "-", marks=slow, id="tokens"),
        pytest.param(IMAGES + END, "torch", marks=slow, id="storage hangs"),
        pytest.param(IMAGES + END, "dali", marks=[needs_dali, slow], id="storage hangs dali"),
    ],
)
def test_program_that_ends_in_an_epoch_has_status_0(tmp_path: Path, code: str, kind: str) -> None:
    """Python would unwind its threads when they return from native code, and C++ would abort: exit status 134."""
    found = ended(code, kind, tmp_path)
    assert (found.status, found.stderr) == (0, "")
