"""The Hugging Face example trains, and the demo gives the results in the docs."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_sparse.lab import unavailable_reason

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.timeout(1000)


def run_demo(out: Path, *arguments: str) -> str:
    # The tests expect the bytes of Gloo's ring all-reduce; NCCL may choose a tree.
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--out", str(out), "--cpu", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_hugging_face_example_trains_equally_on_all_ranks(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    words = ["lab", "--no-net", "--nodes", "2", "--devices", "2", "--", str(EXAMPLES / "hf_trainer.py"), str(tmp_path)]
    command = [sys.executable, "-m", "lightning_sparse.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    weights = re.findall(r"rank \d: weights (\S+)", done.stdout)
    assert len(weights) == 4
    assert len(set(weights)) == 1, "ranks end with different weights"
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", done.stdout)]
    assert losses[-1] < 0.7 * losses[0]


@dataclass(frozen=True)
class Row:
    """A row of the demo's table."""

    loss: float
    closed: float
    received: float


def read_table(printed: str) -> dict[tuple[str, str], Row]:
    """Return the rows of the table by task and method."""
    rows = {}
    for line in re.findall(r"^\| ((?:images|text).*) \|$", printed, re.MULTILINE):
        task, method, loss, closed, _, received = line.split(" | ")
        rows[task.partition(",")[0], method] = Row(
            *(float(re.split("[ %]", each)[0]) for each in (loss, closed, received))
        )
    return rows


@pytest.mark.slow
@pytest.mark.root
def test_demo_closes_the_gap_with_fewer_bytes(tmp_path):
    printed = run_demo(tmp_path / "demo", "--gbps", "2")  # a fast link takes less time; the results stay the same
    rows = read_table(printed)
    parameters = {"images": 1_225_610, "text": 437_888}
    for task, of_task in parameters.items():
        dense, baseline = rows[task, "ddp"], rows[task, "single-node baseline"]
        expected = 2 * 3 / 4 * 4 * of_task / 1e6  # a ring over 4 ranks, with one link into the node
        assert 0.95 * expected < dense.received < 1.2 * expected
        assert baseline.received == 0
        assert dense.loss < baseline.loss
    for key in (("images", "mstopk_hier"), ("images", "mstopk_local"), ("text", "mstopk_local")):
        assert rows[key].closed >= 60, printed
    assert rows["images", "mstopk_hier"].received < rows["images", "ddp"].received / 8
    assert rows["images", "mstopk_local"].received < rows["images", "ddp"].received / 20
    assert rows["text", "mstopk_local"].received < rows["text", "ddp"].received / 50
    steps = {len(json.loads(path.read_text())["seconds"]) for path in (tmp_path / "demo").glob("run*/node0.json")}
    assert steps == {64, 208}
    assert (tmp_path / "demo" / "table.md").read_text() in printed
    assert "2 nodes x 2 ranks on the CPU of this machine" in printed
    assert (tmp_path / "demo" / "loss.png").stat().st_size > 10_000
    assert "Traceback" not in printed
    assert "WARNING" not in printed


@pytest.mark.slow
@pytest.mark.skipif(unavailable_reason() is None, reason="the demo with a network covers it")
def test_demo_without_root_computes_bytes(tmp_path):
    printed = run_demo(tmp_path / "demo", "--no-net")
    rows = read_table(printed)
    assert "loopback" in printed
    assert rows["images", "mstopk_local"].closed >= 60
    assert rows["images", "mstopk_local"].received < rows["images", "ddp"].received / 20
