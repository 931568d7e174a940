"""examples/elastic.py: a node is killed and comes back."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="needs torchft")
def test_a_node_leaves_and_comes_back(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "elastic.py"), "--demo", "--rounds", "50"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, done.stderr[-6000:]
    before, _, after = done.stdout.partition("node c is killed")
    said = r"round \d+ of (\d) nodes: loss ([\d.]+), weights [0-9a-f]{8}"
    assert {count for count, _ in re.findall(said, after)} >= {"2", "3"}  # without it, and with it again
    losses = [float(loss) for _, loss in re.findall(said, done.stdout)]
    assert sum(losses[-5:]) < sum(losses[:5]) / 2
