"""A mixture of tokens whose process is killed, again and again: it goes on with the next batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse.data.tokens import prepare
from tests.data.test_urls import KEY, Server

# Forks a process that trains, kills it after a while, and so on; the last one goes on to the end.
KILLED = """
import json, os, random, signal, sys, time
from lightning_sparse.flavours.pytorch_lightning import TokenDataModule

out, options, kills = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])

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
                time.sleep(0.01)
    data.teardown("fit")

random.seed(7)
for left in range(kills, -1, -1):
    process = os.fork()
    if process == 0:
        train()
        os._exit(0)
    if left:
        time.sleep(random.uniform(0.05, 2.5))
        os.kill(process, signal.SIGKILL)
    status = os.waitpid(process, 0)[1]
assert status == 0, status
"""


def batches(folder: Path, name: str, options: dict[str, Any], kills: int) -> list[Any]:
    """What the processes saw, in order."""
    command = [sys.executable, "-c", KILLED, str(folder / name), json.dumps(options), str(kills)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(command, env=environment, timeout=500, check=True)
    return [json.loads(line)["batch"] for line in (folder / name).read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_mixture_that_is_killed_at_twenty_places_sees_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    """While it tokenises, between two batches, at the end of an epoch."""
    pytest.importorskip("aiohttp", reason="fsspec opens http with it")
    (tmp_path / "source").mkdir()
    for number in range(8):
        lines = (json.dumps({"text": f"{number} {line} " * (1 + line % 7)}) for line in range(100))
        (tmp_path / "source" / f"{number}.jsonl").write_text("\n".join(lines))
    (tmp_path / "own.txt").write_text("some more text " * 3000)
    own = prepare([tmp_path / "own.txt"], tmp_path / "own", end=0)
    server = Server(tmp_path / "source")
    options = {"train": {server.url: 3, str(own): 1}, "storage_options": KEY}
    try:
        whole = batches(tmp_path, "whole", {**options, "cache_dir": str(tmp_path / "cache")}, 0)
        before = Counter(server.requests)
        killed = batches(tmp_path, "killed", {**options, "cache_dir": str(tmp_path / "other")}, 20)
    finally:
        server.close()
    assert len(whole) > 300
    assert killed == whole
    again = server.requests["GET", ".jsonl"] - before["GET", ".jsonl"]
    assert before["GET", ".jsonl"] == 8, "each file once"
    assert again <= 8 + 20 * 2, "and again at most what two processes were reading when they were killed"
    assert not list((tmp_path / "other").rglob("*.tmp"))
