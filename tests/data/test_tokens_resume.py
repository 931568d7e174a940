"""A training on a mixture of tokens that is killed repeatedly continues with the next batch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse.data.tokens import prepare
from tests.data.programs import run
from tests.helpers.data import KEY, Server, write

# Forks a process that trains, kills it after some files or batches, and repeats. The last process runs to the end.
KILLED = """
import json, os, random, signal, sys, time
from pathlib import Path
from lightning_sparse.flavours.pytorch_lightning import TokenDataModule

out, options, kills = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
cache = Path(options["cache_dir"])

def train():
    data = TokenDataModule(context=8, batch_size=4, seed=3, documents="separate", **options)
    data.setup("fit")
    loader, first = data.train_dataloader(), 0
    with open(out, "a+") as file:
        file.seek(0)
        lines = file.read().splitlines(keepends=True)
        whole = [each for each in lines if each.endswith("\\n")]
        file.truncate(sum(map(len, whole)))
        if whole:
            state = json.loads(whole[-1])["state"]
            loader.load_state_dict(state)
            first = state["epoch"]
        for epoch in range(first, 3):
            loader.set_epoch(epoch)
            for batch in loader:
                said = {"batch": [each.tolist() for each in batch], "state": loader.state_dict()}
                file.write(json.dumps(said) + "\\n")
                file.flush()
    data.teardown("fit")

def progress():
    "The number of batches, and of files in the cache, whole or begun."
    batches = out.read_bytes().count(b"\\n") if out.exists() else 0
    return batches + sum(len(names) for _, _, names in os.walk(cache))

random.seed(7)
for number in range(kills + 1):
    goal = progress() + (random.randrange(4) if number < kills // 2 else random.randrange(90))
    process = os.fork()
    if process == 0:
        train()
        os._exit(0)
    ended = 0, 0
    if number < kills:
        while progress() < goal and not ended[0]:
            time.sleep(0.001)
            ended = os.waitpid(process, os.WNOHANG)
        if not ended[0]:
            os.kill(process, signal.SIGKILL)
    _, status = ended if ended[0] else os.waitpid(process, 0)
assert status == 0, status
"""


def batches(folder: Path, name: str, options: dict[str, Any], kills: int) -> list[Any]:
    """Return the batches of all processes, in order."""
    ended = run(KILLED, folder / name, json.dumps({**options, "cache_dir": str(folder / f"cache {name}")}), kills)
    assert ended.status == 0, ended.stderr
    return [json.loads(line)["batch"] for line in (folder / name).read_text().splitlines()]


@pytest.mark.slow
def test_mixture_killed_twenty_times_gives_uninterrupted_batches(tmp_path: Path) -> None:
    """The process is killed while it tokenizes, between two batches, or at the end of an epoch."""
    for number in range(8):
        lines = (json.dumps({"text": f"{number} {line} " * (1 + line % 7)}) for line in range(30))
        write(tmp_path / "source" / f"{number}.jsonl", "\n".join(lines))
    own = prepare([write(tmp_path / "own.txt", "some more text " * 900)], tmp_path / "own", end=0)
    with Server(tmp_path / "source") as server:
        options = {"train": {server.url: 3, str(own): 1}, "storage_options": KEY}
        whole = batches(tmp_path, "whole", options, 0)
        before = Counter(server.requests)
        killed = batches(tmp_path, "killed", options, 20)
    assert len(whole) > 300
    assert killed == whole
    again = server.requests["GET", ".jsonl"] - before["GET", ".jsonl"]
    assert before["GET", ".jsonl"] == 8, "each file once"
    assert again <= 8 + 20 * 2, "at most the files that two processes were reading when they were killed"
    assert not list((tmp_path / "cache killed").rglob("*.tmp"))
