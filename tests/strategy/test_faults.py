"""What the others see when a rank stalls or a link goes down: a message that says where, within the groups' timeout.

(A rank that dies is in test_hook_faults.py.)
"""

import io
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_sparse.lab import Cluster, LabConfig
from lightning_sparse.strategy import CommunicationError, HierConfig
from lightning_sparse.topology import discover
from tests.helpers.distributed import run_ranks
from tests.strategy.models import loss_of, mlp, wrap

TIMEOUT_S = 3
BAD_STEP = 4


EXCHANGES = ("sparse", "regional", "dense", "dense16")
CASES = [(exchange, overlap) for overlap in (True, False) for exchange in EXCHANGES]


@pytest.mark.parametrize(
    ("exchange", "overlap"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_a_rank_that_stalls_is_not_waited_for_for_ever(exchange: str, overlap: bool) -> None:
    line, stalled = run_ranks(stall, exchange, overlap, nodes=2, devices=1, timeout=100)
    assert stalled == "stalled"
    steps = {"sparse": "all-gather", "regional": "all-to-all", "dense": "all-reduce", "dense16": "all-to-all"}
    assert f"rank 0: {steps[exchange]} between nodes (ranks 0, 1) failed in round {BAD_STEP}, bucket 0" in line
    assert "stalled past the process group's timeout" in line


def stall(exchange: str, overlap: bool) -> str:
    """What rank 0 was told; rank 1 stalls until then."""
    try:
        return train_until_it_stalls(exchange, overlap)
    finally:
        dist.barrier()


def train_until_it_stalls(exchange: str, overlap: bool) -> str:
    model = mlp()
    topology = discover(timeout=timedelta(seconds=TIMEOUT_S))
    config = HierConfig(density=0.05, exchange=exchange, warmup_epochs=0, overlap=overlap)  # type: ignore[arg-type]
    ddp, _ = wrap(model, config, topology, bucket_cap_mb=0.002)
    for step in range(BAD_STEP + 1):
        if step == BAD_STEP and dist.get_rank() == 1:
            return "stalled"
        try:
            loss_of(ddp, step, dist.get_rank()).backward()
        except CommunicationError as error:
            return str(error)
    return "nothing was raised"


SCRIPT = f"""
import time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from lightning_sparse.strategy import HierConfig
from lightning_sparse.topology import discover
from tests.strategy.models import loss_of, mlp, wrap

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
config = HierConfig(density=0.05, exchange="sparse", warmup_epochs=0)
ddp, _ = wrap(mlp(), config, discover(timeout=timedelta(seconds={TIMEOUT_S})), bucket_cap_mb=0.002)
plug = Path("PLUG")
for step in range({BAD_STEP} + 1):
    if step == {BAD_STEP}:
        dist.barrier()
        plug.with_name(f"ready{{dist.get_rank()}}").touch()
        while not plug.exists():
            time.sleep(0.02)
    loss_of(ddp, step, dist.get_rank()).backward()
"""


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(120)
def test_a_link_that_goes_down_is_told_on_both_sides(tmp_path: Path) -> None:
    script, plug, output = tmp_path / "train.py", tmp_path / "plug", io.StringIO()
    script.write_text(SCRIPT.replace("PLUG", str(plug)))
    with Cluster(LabConfig(nodes=2, devices=1)) as cluster:

        def pull() -> None:
            while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
                time.sleep(0.02)
            cluster.switch_link(1, on=False)
            plug.touch()

        thread = threading.Thread(target=pull, daemon=True)
        thread.start()
        root = str(Path(__file__).resolve().parents[2])
        env = {"PYTHONPATH": root, "PYTHONWARNINGS": "ignore"}
        result = cluster.run([sys.executable, str(script)], env=env, output=output, timeout=90)
        thread.join(timeout=10)
    assert result.exit_code != 0
    text = output.getvalue()
    for node in range(2):
        said = [line for line in text.splitlines() if line.startswith(f"[node {node}]")]
        assert any(f"(ranks 0, 1) failed in round {BAD_STEP}, bucket 0" in line for line in said), text[-4000:]
