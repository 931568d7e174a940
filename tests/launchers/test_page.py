"""The commands of docs/launchers.md find two nodes on this machine, and examples/elastic.py runs.

The tests set the environment variables of the launchers.
"""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_sparse.lab.cluster import free_port

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "launchers.md").read_text(encoding="utf-8")
NODES, DEVICES = 2, 2
FOUND = "2 node(s) x 2 device(s)"
AFTER = """
from pytorch_lightning.demos.boring_classes import BoringModel
trainer.fit(BoringModel())
topology = trainer.strategy.engine.topology
print(f"rank {topology.rank} of {topology.shape}, nodes {topology.nodes}")
"""


def block(heading: str, language: str) -> str:
    """Return the first code block of a section."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found, f"{heading} has no block of {language}"
    return found[1]


def torchrun(node: int, port: int) -> tuple[str, dict[str, str]]:
    return block("torchrun", "sh"), {"HOST": "127.0.0.1"}


def kubeflow(node: int, port: int) -> tuple[str, dict[str, str]]:
    trainer: dict[str, Any] = yaml.safe_load(block("Kubeflow Trainer", "yaml"))["spec"]["trainer"]
    shape = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
    place = {"PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    return " ".join(trainer["command"]), {**shape, **place}


def run(command: str, environment: dict[str, str], port: int, folder: Path) -> str:
    """Return the output of a command. Fails with the output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PET_"))}
    trainer = {"MAX_STEPS": "4", "LOGGER": "False", "ENABLE_CHECKPOINTING": "False", "LIMIT_VAL_BATCHES": "0"}
    settings = {
        **kept,
        **{f"PL_TRAINER_{name}": value for name, value in trainer.items()},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    shell = ["bash", "-euc", command.replace("29500", str(port))]
    done = subprocess.run(
        shell, cwd=folder, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a folder with the page's train.py."""
    train = PAGE.split("```python\n")[1].split("```")[0]
    (tmp_path / "train.py").write_text("import lightning_sparse\n" + textwrap.dedent(train) + AFTER)
    return tmp_path


def run_all(commands: list[tuple[str, dict[str, str]]], port: int, folder: Path) -> str:
    with ThreadPoolExecutor(len(commands)) as pool:
        return "".join(pool.map(lambda each: run(*each, port, folder), commands))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [torchrun, kubeflow])
def test_command_of_the_page_finds_all_nodes(launcher: Any, folder: Path) -> None:
    port = free_port()
    output = run_all([launcher(node, port) for node in range(NODES)], port, folder)
    for rank in range(NODES * DEVICES):
        assert f"rank {rank} of {FOUND}, nodes ((0, 1), (2, 3))" in output


@pytest.mark.slow
def test_slurm_command_finds_all_nodes(folder: Path) -> None:
    port, tasks = free_port(), NODES * DEVICES
    command = 'srun() { "$@"; }\n' + block("SLURM", "sh")
    commands = [
        (
            command,
            {
                "SLURM_JOB_ID": str(port), "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "localhost",
                "SLURM_NTASKS": str(tasks), "SLURM_NTASKS_PER_NODE": str(DEVICES), "SLURM_NNODES": str(NODES),
                "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task % DEVICES), "SLURM_NODEID": str(task // DEVICES),
            },
        )
        for task in range(tasks)
    ]  # fmt: skip
    output = run_all(commands, port, folder)
    for rank in range(tasks):
        assert f"rank {rank} of {FOUND}, nodes ((0, 1), (2, 3))" in output


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="needs torchft")
def test_elastic_example_continues_after_a_node_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "elastic.py"), "--demo", "--rounds", "30"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, done.stderr[-6000:]
    before, _, after = done.stdout.partition("--- killing node c")
    line = r"round (\d+), (\d) nodes: loss ([\d.]+), hash of global weights ([0-9a-f]{8})"
    assert re.search(r"--- exit codes: .* were equal in (\d\d+) of \1 rounds", after)
    assert "[c] this node loaded weights and optimizer state" in after
    # the demo continues without node c, and with it after it has rejoined
    assert {count for _, count, _, _ in re.findall(line, after)} >= {"2", "3"}
    hashes: dict[str, set[str]] = {}
    for number, _, _, digest in re.findall(line, done.stdout):
        hashes.setdefault(number, set()).add(digest)
    assert {len(found) for found in hashes.values()} == {1}, "nodes have different weights in a round"
    told = Counter(number for number, _, _, _ in re.findall(line, done.stdout))
    assert sum(count > 1 for count in told.values()) > len(told) / 2, "most rounds were reported by several nodes"
    losses = [float(loss) for _, _, loss, _ in re.findall(line, done.stdout)]
    assert sum(losses[-5:]) < sum(losses[:5]) / 2
