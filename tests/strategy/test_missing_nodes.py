"""A rank that waits for missing nodes logs how many are missing and the address."""

import os
import subprocess
import sys

import pytest

from lightning_sparse.lab.cluster import free_port

PROGRAM = """
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
pl.Trainer(accelerator="cpu", devices=1, num_nodes={nodes}, strategy="{strategy}").fit(BoringModel())
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("strategy", "nodes", "missing"), [("mstopk_local", 2, "1 of 2"), ("mstopk_hier", 3, "up to 2 of 3")]
)
def test_missing_nodes_are_logged(strategy: str, nodes: int, missing: str) -> None:
    pytest.importorskip("pytorch_lightning")
    port = str(free_port())
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0", "LOCAL_RANK": "0"}
    command = [sys.executable, "-u", "-c", PROGRAM.format(strategy=strategy, nodes=nodes)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env={**os.environ, **place}, **pipes) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if "waiting for" in line)
        finally:
            process.kill()
    assert line == f"waiting for {missing} nodes at 127.0.0.1:{port}\n"
