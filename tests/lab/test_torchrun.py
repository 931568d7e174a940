"""The launchers of a run end without a word, however they interleave."""

import io
import sys
from pathlib import Path

import pytest

from lightning_sparse.lab import Cluster, LabConfig

# Node 1 reaches the last barrier and is then held up: the others see that all have arrived, and may leave.
HELD_UP = """
import os, sys

if os.environ.get("NODE_RANK") == "1" and "lightning_sparse.lab.torchrun" in sys.orig_argv:
    import time
    from torch.distributed.elastic.utils import store

    arrive = store._barrier_nonblocking

    def late(**options):
        key = arrive(**options)
        time.sleep(1.5)
        return key

    store._barrier_nonblocking = late
"""


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_launcher_that_is_late_still_finds_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(HELD_UP)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    output = io.StringIO()
    with Cluster(LabConfig(nodes=2, devices=1, network=False)) as cluster:
        result = cluster.run([sys.executable, "-S", "-c", "print('done')"], output=output, timeout=60)
    assert result.node_exit_codes == (0, 0)
    assert sorted(output.getvalue().splitlines()) == ["[node 0] done", "[node 1] done"]
