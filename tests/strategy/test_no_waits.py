"""In a settled round the host never waits for the GPU: it reads no tensor values and makes no blocking copy.

This needs no GPU: it uses torch's fake tensors of device "cuda", which have no values to read. Two functions wait by
design and are left out: `AsyncHostTensor.read` reads a copy made in the background during the last step, and
`UpdateCorrelation.measure` reads such a copy.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparse.exchange import HierCommunicator, engine
from lightning_sparse.exchange.lanes import AsyncHostTensor, Runner
from lightning_sparse.gradients.reduction import Reduction
from lightning_sparse.gradients.residual import ResidualStore
from lightning_sparse.strategy import HierConfig, HierState
from lightning_sparse.topology import Topology
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from lightning_sparse.updates import local as local_updates
from lightning_sparse.updates.agreement import UpdateCorrelation
from tests.strategy.test_threads import Bucket

NODES_OF_2 = Topology(((0, 1), (2, 3)), 0)
SETTLED = 4


class AtOnce(Runner):
    """Runs jobs immediately, without the futures, which need a device on "cuda"."""

    def _done(self, result: Tensor) -> Any:
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def finish(self, _: Any) -> None:
        """Do nothing, because the job is finished."""


class Event:
    """Stands in for a CUDA event that never waits."""

    def __init__(self, **_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return False

    def record_event(self) -> "Event":  # a method of streams
        return self


class NoWaits(TorchDispatchMode):
    """Refuses blocking copies between devices. Fake tensors refuse to be read by themselves."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            devices = {each.device.type for each in (*args[:2], made) if isinstance(each, Tensor)}
            blocks = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            assert len(devices) == 1 or not blocks, f"{func} between {devices} waits"
        return made


class Zeros:
    """The values that a fake tensor returns when it is read."""

    def __init__(self, numel: int) -> None:
        self._numel = numel

    def flatten(self) -> "Zeros":
        return self

    def tolist(self) -> list[float]:
        return [0.0] * self._numel


@pytest.fixture(autouse=True)
def _cuda_without_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine, "runner_of", lambda *_: AtOnce())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Event())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(AsyncHostTensor, "read", lambda self: Zeros(self._here.numel()))
    monkeypatch.setattr(UpdateCorrelation, "measure", lambda *_: 0.5)
    monkeypatch.setattr(local_updates, "same_options", lambda *_: None)
    monkeypatch.setattr(HierCommunicator, "broadcast_from_rank0", lambda *_: None)
    with FakeTensorMode():
        yield


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = torch.tensor

    def tensor(data: Any, **options: Any) -> Tensor:
        assert "cuda" not in str(options.get("device", "")), "torch.tensor on a GPU waits"
        return made(data, **options)

    with monkeypatch.context() as patched, NoWaits():
        patched.setattr(torch, "tensor", tensor)
        yield


def a_model() -> nn.Module:
    with torch.device("cuda"):
        return nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))


class Fused(torch.optim.Optimizer):
    """Reads the loss scaler's decision, as fused optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.found_inf = torch.zeros(1, device="cuda")

    def step(self, closure: Any = None) -> None:
        return None


def gradients_of(model: nn.Module) -> Tensor:
    """Set the gradients without a backward pass, because autograd's engine needs the device."""
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


CASES: dict[str, dict[str, Any]] = {
    **{path: {"exchange": path} for path in ("sparse", "regional", "dense", "dense16")},
    "auto": {"exchange": "auto", "inter_gbps": 1.0},
    "excluded": {"exclude": "vectors", "exchange": "sparse"},
    "momentum": {"momentum_correction": True, "exchange": "sparse"},
    "unused": {"exchange": "sparse"},
    "scaled": {"exchange": "sparse"},
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_round_never_waits_for_the_gpu(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu.cluster import Alone

    model = a_model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if case == "scaled":
        optimizer = Fused(model.parameters())
    state = HierState(model, HierConfig(**CASES[case]), NODES_OF_2, find_unused_parameters=case == "unused")
    state.exchange.communicator = Alone(NODES_OF_2)
    state.watch([optimizer])
    if case == "scaled":
        scale = torch.ones((), device="cuda")
        state.loss_scale = lambda: scale

    def step() -> None:
        optimizer.zero_grad()
        state.before_backward()
        if state.unused is not None:
            state.unused._used.add("0.weight")
        flat = gradients_of(model)
        received = state.on_bucket(Bucket(flat, list(model.parameters())))  # type: ignore[arg-type]
        state.exchange.runner.run(Reduction(state, received), received.flat_N)
        optimizer.step()

    _settle_then_watch(step, monkeypatch)
    assert state.layout.settled


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # once, where slices are divided
@pytest.mark.parametrize(
    ("path", "count"), [("sparse", 2), ("sparse", 3), ("regional", 2), ("dense", 2), ("dense16", 2)]
)
def test_updates_step_never_waits_for_the_gpu(path: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu.cluster import Alone

    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    nodes = Topology(tuple((rank,) for rank in range(count)), 0)
    updates = LocalUpdates(model, optimizer, UpdatesConfig(exchange=path), nodes)
    updates.exchange.communicator = Alone(nodes)

    def step() -> None:
        optimizer.zero_grad()
        gradients_of(model)
        optimizer.step()
        updates.step()
        if path == "sparse":  # a hook between batches sees the global weights
            updates.swap_in_global_weights(wait=False)
            updates.swap_in_local_weights()

    _settle_then_watch(step, monkeypatch)
    assert updates.step_ahead == (1 if count == 2 else 0.5), "measured on three nodes"


def _settle_then_watch(step: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as settling:
        settling.setattr(ResidualStore, "regroup", lambda *_: None)  # the devices would have to agree on a new layout
        for _ in range(SETTLED):
            step()
    with watched(monkeypatch):
        step()
        step()


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.cpu(),
        lambda x: torch.ones(3).to("cuda"),
        lambda x: torch.tensor(1.0, device="cuda"),
        lambda x: x.tolist(),
    ],
)
def test_operation_that_waits_for_the_gpu_is_found(
    waits: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.empty(3, device="cuda")
    with watched(monkeypatch), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        waits(x)
