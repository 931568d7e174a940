"""The pair of examples stays a pair, and what `make demo` runs comes to its table."""

import difflib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_sparse.lab import unavailable_reason

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.timeout(1000)


def changes(name: str, other: str) -> list[str]:
    one, two = ((EXAMPLES / each).read_text().splitlines()[1:] for each in (name, other))
    return [line for line in difflib.ndiff(one, two) if line[0] in "+-" and line[2:].strip()]


def test_the_strategy_is_the_only_difference():
    assert changes("digits_ddp.py", "digits_updates.py") == [
        '-         strategy="ddp",',
        '+         strategy="mstopk_local",',
    ]
    assert changes("digits_ddp.py", "digits_sparse.py") == [
        "+ from lightning_sparse import MSTopKHierStrategy",
        '-         strategy="ddp",',
        '+         strategy=MSTopKHierStrategy(density=0.01, exchange="sparse", warmup_epochs=1),',
    ]


def _demo(out: Path, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--out", str(out), "--epochs", "1", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_trainer_of_hugging_face(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    words = ["lab", "--no-net", "--nodes", "2", "--devices", "2", "--", str(EXAMPLES / "hf_trainer.py"), str(tmp_path)]
    command = [sys.executable, "-m", "lightning_sparse.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    weights = re.findall(r"rank \d: weights (\S+)", done.stdout)
    assert len(weights) == 4
    assert len(set(weights)) == 1, "all ranks end alike"
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", done.stdout)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
@pytest.mark.root
def test_the_demo_counts_fewer_bytes_when_sparse(tmp_path):
    printed = _demo(tmp_path / "demo", "--gbps", "1")
    assert "times fewer bytes a step" in printed
    sent = [
        sum(sum(json.loads(path.read_text())["bytes_sent"]) for path in (tmp_path / "demo" / run).glob("node*.json"))
        for run in ("run0", "run1", "run2", "run3")
    ]
    steps, parameters = 22, 1_225_610
    assert 0.9 < sent[0] / (steps * 3 * 4 * parameters) < 1.3, "a ring over 4 ranks passes 2 * 3/4 * 2 links"
    assert sent[1] < 0.6 * sent[0], "one epoch is all warm-up, and two rounds are dense"
    assert sent[2] < 0.05 * sent[0], "of updates 1 % are sent from the first step on"
    assert sent[3] < 1e-3 * sent[0], "a node alone talks to nobody"
    steps_of_each = [
        len(json.loads((tmp_path / "demo" / f"run{number}" / "node0.json").read_text())["seconds"])
        for number in range(7)
    ]
    assert steps_of_each[:4] == [steps] * 4
    assert len(set(steps_of_each[4:])) == 1
    *_, pictures, text, suggestion = printed.strip().split("\n\n")
    assert f"{pictures}\n\n{text}\n" == (tmp_path / "demo" / "table.md").read_text(), "the tables are the last but one"
    assert re.match(r"In short: sparse updates \(mstopk_local\) sent 1/\d+ of the bytes", suggestion)
    assert "\nNext: " in suggestion
    assert "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.skipif(unavailable_reason() is None, reason="the demo with a network covers it, at twice the time")
def test_the_demo_rehearses_without_a_network(tmp_path):
    printed = _demo(tmp_path / "demo", "--no-net")
    assert "A rehearsal on loopback" in printed
    assert "computed, not counted" in printed
    dense, sparse = (
        json.loads((tmp_path / "demo" / run / "node0.json").read_text())["bytes_computed"] for run in ("run0", "run2")
    )
    assert 50 < dense / sparse < 400, "1 % of the entries, of 4 bytes a pair, beside a ring over all ranks"
