"""Rounds over a communicator of threads: on the CPU, and on CUDA if available."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.topology import Topology
from tests.helpers.threads import Exchange, ThreadCommunicator, run_threads

NODES = [[0, 2], [1, 3]]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass
class Bucket:
    """A stand-in for DDP's GradBucket."""

    flat: Tensor
    params: list[Tensor]
    last: bool = True
    number: int = field(default=0)

    def buffer(self) -> Tensor:
        return self.flat

    def parameters(self) -> list[Tensor]:
        return self.params

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last


@dataclass
class Outcome:
    applied: list[Tensor]
    given: Tensor
    left: Tensor
    density: float


def rounds(device: str, dtype: torch.dtype, count: int = 6) -> list[Outcome]:
    def rank(topology: Topology, exchange: Exchange) -> Outcome:
        module = nn.Linear(251, 83).to(device, dtype)
        config = HierConfig(density=0.02, exchange="sparse", warmup_epochs=0)
        state = HierState(module, config, topology)
        state.exchange.communicator = ThreadCommunicator(topology, exchange)
        params: list[Tensor] = list(module.parameters())
        numel = sum(p.numel() for p in params)
        outcome = Outcome([], torch.zeros(numel, dtype=torch.float64), torch.zeros(()), 1.0)
        for step in range(count):
            generator = torch.Generator().manual_seed(100 * step + topology.rank)
            grad = torch.randn(numel, generator=generator).to(dtype)
            outcome.given += grad.double()
            future = hier_hook(state, Bucket(grad.to(device), params))  # type: ignore[arg-type]
            outcome.applied.append(future.value().cpu())
        state.commit_round()
        (shard,) = state.store.committed.values()
        outcome.left, outcome.density = (
            state.exchange.communicator.gather(shard).cpu()[:numel],
            state.exchange.stats.density,
        )
        return outcome

    return run_threads(rank, NODES)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounds_lose_no_gradient_and_keep_ranks_equal(device: str, dtype: torch.dtype) -> None:
    outcomes = rounds(device, dtype)
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0].applied, other.applied, strict=True))
    assert outcomes[0].density == pytest.approx(0.02, rel=0.05)
    given = torch.stack([each.given for each in outcomes]).mean(0)
    accounted = torch.stack(outcomes[0].applied).double().sum(0) + outcomes[0].left + outcomes[1].left
    # bf16: applied gradients are rounded again, to the gradient's dtype
    torch.testing.assert_close(given, accounted, rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 0.1)


def test_half_precision_gradients_whose_sum_overflows_stay_finite() -> None:
    """Each of two devices has 40,000. DDP divides first and stays finite, so the hook must do so, too."""

    def rank(topology: Topology, exchange: Exchange) -> Tensor:
        module = nn.Linear(50, 20, bias=False).half()
        state = HierState(module, HierConfig(density=1.0, exchange="sparse", warmup_epochs=0), topology)
        state.exchange.communicator = ThreadCommunicator(topology, exchange)
        for _ in range(3):
            bucket = Bucket(torch.full((1000,), 40_000.0, dtype=torch.float16), list(module.parameters()))
            reduced = hier_hook(state, bucket).value()  # type: ignore[arg-type]
        assert state.layout.settled
        return reduced

    for reduced in run_threads(rank, NODES):
        torch.testing.assert_close(reduced, torch.full_like(reduced, 40_000.0), rtol=0.01, atol=0.0)


@pytest.mark.gpu
def test_cuda_equals_cpu_bit_for_bit() -> None:
    for on_cpu, on_cuda in zip(rounds("cpu", torch.float32), rounds("cuda", torch.float32), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(on_cpu.applied, on_cuda.applied, strict=True))
        assert torch.equal(on_cpu.left, on_cuda.left)


@pytest.mark.gpu
def test_hook_works_with_synchronized_batch_norm() -> None:
    """One rank on NCCL: SyncBatchNorm runs on CUDA only, and the future must carry the stream."""
    import tempfile

    import torch.distributed as dist

    from lightning_sparse.topology import discover

    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("nccl", init_method=f"file://{file.name}", rank=0, world_size=1)
        try:
            model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(4)).cuda()
            model(torch.randn(2, 3, 8, 8, device="cuda"))
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
            ddp = nn.parallel.DistributedDataParallel(model, device_ids=[0])
            ddp.register_comm_hook(HierState(model, HierConfig(), discover()), hier_hook)
            for _ in range(4):
                ddp(torch.randn(2, 3, 8, 8, device="cuda")).square().mean().backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        finally:
            dist.destroy_process_group()
