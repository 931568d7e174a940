"""examples/torchft_local.py: a node is killed and comes back, and all that train have the same shared weights."""

import importlib.util
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 400


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="needs torchft: pip install torchft")
def test_nodes_leave_and_join(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "torchft_local.py"), "--steps", str(STEPS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, done.stderr[-6000:]
    said = re.findall(r"node (\w) step (\d+) of (\d) nodes: loss ([\d.]+), shared weights ([0-9a-f]{8})", done.stdout)
    weights: dict[int, set[str]] = defaultdict(set)
    sizes: dict[int, set[int]] = defaultdict(set)
    for _, step, size, _, digest in said:
        weights[int(step)].add(digest)
        sizes[int(step)].add(int(size))
    assert set(weights) == set(range(1, STEPS + 1))
    assert all(len(digests) == 1 for digests in weights.values())

    killed = max(
        int(step) for _, step, *_ in re.findall(r"node (c) step (\d+)", done.stdout.split("node c is killed")[0])
    )
    assert {2, 3} <= set().union(
        *(sizes[step] for step in range(killed + 1, STEPS + 1))
    )  # without it, and with it again
    assert sizes[STEPS] == {3}
    losses = [float(loss) for _, _, _, loss, _ in said]
    assert sum(losses[-30:]) < sum(losses[:30]) / 4
