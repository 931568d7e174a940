"""GPUs of ranks, mostly with simulated GPUs: counting, planning, the ranks' variables, and Lightning's devices."""

import io
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse import cli
from lightning_sparse.lab import Cluster, LabConfig, cluster, gpus
from lightning_sparse.lab.gpus import GPUPlan, find_gpus
from lightning_sparse.lab.shared_gpus import VARIABLE, gpu_of

pytestmark = pytest.mark.timeout(180)
ROOT = Path(__file__).parents[2]
NAMES = ("CUDA_VISIBLE_DEVICES", VARIABLE, "NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
SHOW = f"import os; print('rank', os.environ['RANK'], *(os.environ.get(name) for name in {NAMES}))"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


# -- counting ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch_counts(monkeypatch, tmp_path):
    """Return a function that sets the number of GPUs that torch finds on a machine with GPUs."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpus, "DEV", tmp_path)
    return lambda count: monkeypatch.setattr(gpus, "COUNT", f"print('a line of a plugin'); print({count})")


@pytest.mark.parametrize(
    ("count", "listed", "found"),
    [
        (2, None, ["0", "1"]),
        (0, None, []),
        (2, "3, 1", ["3", "1"]),
        (1, "3,-1,1", ["3"]),
        (2, "GPU-8932f937,GPU-1f22a253", ["GPU-8932f937", "GPU-1f22a253"]),
        (1, "MIG-c6d4f1ef,MIG-cba663e8", ["MIG-c6d4f1ef"]),
    ],
)
def test_find_gpus_returns_entries_of_visible_devices(count, listed, found, torch_counts):
    torch_counts(count)
    environment = {**os.environ, **({} if listed is None else {"CUDA_VISIBLE_DEVICES": listed})}
    assert find_gpus(environment) == found


def test_find_gpus_without_gpus_does_not_start_torch(torch_counts, monkeypatch, tmp_path):
    torch_counts(2)
    monkeypatch.setattr(gpus.subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert find_gpus({**os.environ, "CUDA_VISIBLE_DEVICES": ""}) == []
    (tmp_path / "nvidia0").unlink()
    assert find_gpus(os.environ) == []


def test_find_gpus_with_broken_torch_raises_with_the_fix(torch_counts):
    torch_counts("1 / 0")
    with pytest.raises(RuntimeError, match=r"ended with code 1; .*--cpu"):
        find_gpus(os.environ)


def test_count_program_runs_with_this_torch():
    done = subprocess.run([sys.executable, "-c", gpus.COUNT], capture_output=True, text=True)
    assert done.stdout.strip().isdigit(), done.stderr


# -- planning ----------------------------------------------------------------------------------------------------------


def planned(plan: GPUPlan) -> list[list[str]]:
    """Return the GPU of each local rank, per node, from the variables that the ranks read."""
    nodes = []
    for node in range(plan.nodes):
        variables = plan.variables(node, "eth0")
        visible = variables["CUDA_VISIBLE_DEVICES"].split(",")
        indices = variables.get(VARIABLE, ",".join(map(str, range(plan.devices)))).split(",")
        nodes.append([visible[int(index)] for index in indices])
        assert [int(index) for index in indices] == [rank % len(visible) for rank in range(plan.devices)]
    return nodes


@given(nodes=st.integers(1, 5), devices=st.integers(1, 5), count=st.integers(1, 30))
def test_plan_gives_each_rank_a_gpu_and_balances_them(nodes, devices, count):
    plan = GPUPlan(nodes, devices, [f"GPU-{index}" for index in range(count)])
    of_nodes = planned(plan)
    assert [len(of_node) for of_node in of_nodes] == [devices] * nodes
    loads = Counter(gpu for of_node in of_nodes for gpu in of_node)
    assert plan.shared == (max(loads.values()) > 1) == (count < nodes * devices)
    assert len(loads) == min(count, nodes * devices)
    assert max(loads.values()) - min(loads.values()) <= 1
    assert all(len(set(of_node)) == min(count, devices) for of_node in of_nodes)


@pytest.mark.parametrize("plan", [GPUPlan(2, 2), GPUPlan(2, 2, ["0"], cpu=True)])
def test_plan_without_gpus_shares_none(plan):
    variables = plan.variables(0, "eth0")
    assert not plan.shared
    assert VARIABLE not in variables
    assert variables.get("CUDA_VISIBLE_DEVICES") == ("" if plan.cpu else None)
    assert plan.wrap_rank(["true"]) == ["true"]


def test_gpu_of_without_shared_gpus_returns_the_local_rank(monkeypatch):
    assert [gpu_of(rank) for rank in range(3)] == [0, 1, 2]
    monkeypatch.setenv(VARIABLE, "0,1,0")
    assert [gpu_of(rank) for rank in range(4)] == [0, 1, 0, 0]


# -- ranks of a lab ----------------------------------------------------------------------------------------------------


def seen_by_ranks(monkeypatch, found: list[str], *, nodes: int, devices: int) -> list[list[str]]:
    """Run a lab on a machine with these GPUs; return the values of `NAMES` for each rank."""
    monkeypatch.setattr(cluster, "find_gpus", lambda environment: found)
    output = io.StringIO()
    with Cluster(LabConfig(nodes=nodes, devices=devices, network=False)) as lab:
        result = lab.run([sys.executable, "-c", SHOW], output=output, timeout=100)
    assert result.exit_code == 0, output.getvalue()
    return [line.split()[1:] for line in sorted(re.findall(r"rank (\d .*)", output.getvalue()))]


def test_lab_with_one_gpu_makes_each_rank_a_host(monkeypatch, capfd):
    monkeypatch.setenv("NCCL_HOSTID", "this machine")  # would make all ranks one host
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ens3")  # does not exist in a node
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    seen = seen_by_ranks(monkeypatch, ["0"], nodes=2, devices=2)
    assert seen == [["0", "0,0", f"node{node}-{rank}", "lo", "1", "0"] for node in range(2) for rank in range(2)]
    assert capfd.readouterr().err.count("lab: 4 ranks share 1 GPU; NCCL uses sockets between them\n") == 1


@pytest.mark.slow
def test_lab_with_enough_gpus_gives_each_node_its_own(monkeypatch, capfd):
    seen = seen_by_ranks(monkeypatch, ["GPU-a", "GPU-b", "GPU-c"], nodes=2, devices=1)
    assert seen == [[gpu, "None", host, "lo", "None", "1"] for gpu, host in (("GPU-a", "node0"), ("GPU-b", "node1"))]
    assert "share" not in capfd.readouterr().err


def test_lab_with_cpu_hides_gpus_without_counting(monkeypatch, capfd):
    monkeypatch.setattr(cluster, "find_gpus", lambda environment: pytest.fail("counted"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    words = ["lab", "--cpu", "--no-net", "--nodes", "1", "--devices", "1"]
    script = "import os; print('sees', repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    assert cli.main([*words, "--", sys.executable, "-c", script]) == 0
    captured = capfd.readouterr()
    assert "sees ''" in captured.out
    assert "share" not in captured.err


# -- Lightning ---------------------------------------------------------------------------------------------------------

MAKE = """
import torch
torch.cuda.device_count = lambda: {count}
torch.cuda.is_available = lambda: True
import lightning_sparse
from {package} import {name}
for accelerator in ("gpu", "auto"):
    for devices in (2, "2", "auto", -1, [0, 1]):
        made = {name}(accelerator=accelerator, devices=devices, num_nodes=2)
        print("device", made.strategy.root_device, made.strategy.num_processes)
"""
PLACE = dict(RANK="3", LOCAL_RANK="1", GROUP_RANK="1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2", TORCHELASTIC_RUN_ID="lab")
PACKAGES = [
    ("pytorch_lightning", "Trainer"),
    ("lightning.fabric", "Fabric"),
    pytest.param("lightning.pytorch", "Trainer", marks=pytest.mark.slow),
    pytest.param("lightning_fabric", "Fabric", marks=pytest.mark.slow),
]


def devices_of_local_rank_1(package: str, name: str, count: int, **variables: str) -> set[str]:
    """Return the device and the number of devices of a Trainer or Fabric, for all spellings of its arguments."""
    environment = {**os.environ, **PLACE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MAKE.format(package=package, name=name, count=count)]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"device (.*)", done.stdout))


@pytest.mark.parametrize(("package", "name"), PACKAGES)
def test_lightning_in_lab_with_one_gpu_gives_it_to_each_rank(package, name):
    pytest.importorskip(package)
    assert devices_of_local_rank_1(package, name, 1, **{VARIABLE: "0,0"}) == {"cuda:0 2"}


@pytest.mark.slow
@pytest.mark.parametrize(("package", "name"), PACKAGES)
def test_lightning_without_shared_gpus_is_unchanged(package, name):
    pytest.importorskip(package)
    assert devices_of_local_rank_1(package, name, 2) == {"cuda:1 2"}


HIDDEN = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import lightning_sparse
import pytorch_lightning as pl
print("device", pl.Trainer(devices=2, num_nodes=2).strategy.root_device)
"""


@pytest.mark.slow
def test_lightning_in_script_that_hides_gpus_uses_the_cpu():
    pytest.importorskip("pytorch_lightning")
    environment = {**os.environ, **PLACE, VARIABLE: "0,0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", HIDDEN], env=environment, capture_output=True, text=True, timeout=150)
    assert "device cpu" in done.stdout, done.stderr


# -- a GPU -------------------------------------------------------------------------------------------------------------

TRAIN = """
import sys
import torch
import torch.distributed as dist
import lightning_sparse
import pytorch_lightning as pl
from torch.utils.data import DataLoader, TensorDataset

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(31, 7)
    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

x = torch.randn(640, 31, generator=torch.Generator().manual_seed(1))
data = DataLoader(TensorDataset(x, x[:, :7].argmax(1)), batch_size=16)
trainer = pl.Trainer(devices=2, num_nodes=2, max_epochs=1, strategy=sys.argv[1], logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
model = Net()
trainer.fit(model, data)
weights = [None] * 4
dist.all_gather_object(weights, model.net.weight.tolist())
print("trained on", trainer.strategy.root_device.type, "with", dist.get_backend(), len(set(map(str, weights))))
"""


@pytest.mark.parametrize(
    ("strategy", "cpu", "place"),
    [
        pytest.param("ddp", False, "cuda with nccl 1", marks=pytest.mark.gpu),
        pytest.param("mstopk_hier", False, "cuda with nccl 1", marks=pytest.mark.gpu),
        pytest.param("mstopk_local", False, "cuda with nccl 1", marks=pytest.mark.gpu),
        pytest.param("mstopk_local", True, "cpu with gloo 1", marks=pytest.mark.slow),
    ],
)
def test_ranks_of_two_nodes_train_equal_weights(strategy, cpu, place, monkeypatch):
    pytest.importorskip("pytorch_lightning")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    output = io.StringIO()
    with Cluster(LabConfig(nodes=2, devices=2, network=False, cpu=cpu)) as lab:
        result = lab.run([sys.executable, "-c", TRAIN, strategy], output=output, timeout=150)
    assert result.exit_code == 0, output.getvalue()
    assert re.findall(r"trained on (.*)", output.getvalue()) == [place] * 4
