"""What cannot work is refused before it goes wrong, and what works slower is told; without ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from lightning_sparse.exchange import engine
from lightning_sparse.kernels import KernelReport
from lightning_sparse.strategy import HierConfig, HierState
from lightning_sparse.topology import Topology
from lightning_sparse.updates import LocalUpdates

TWO_NODES = Topology(((0,), (1,)), 0)


def a_state() -> HierState:
    return HierState(nn.Linear(2, 2), HierConfig(), TWO_NODES)


def test_the_python_reducer_is_refused() -> None:
    with (
        torch._dynamo.config.patch(optimize_ddp="python_reducer"),
        pytest.raises(ValueError, match="python_reducer.*set it to True or False"),
    ):
        a_state()


def updates_step(state: HierState) -> None:
    updates = LocalUpdates.__new__(LocalUpdates)  # one with groups needs ranks
    updates.active, updates.exchange = True, state.exchange
    updates.step()


BEGINNINGS: dict[str, Callable[[Any], object]] = {
    "step": HierState.before_backward,
    "hook": lambda state: state.receive(None),
    "updates": updates_step,
}


@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=BEGINNINGS)
def test_the_capture_of_a_round_is_refused(monkeypatch: pytest.MonkeyPatch, begin: Callable[[Any], object]) -> None:
    state = a_state()
    monkeypatch.setattr(state.exchange, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="cannot be captured in a CUDA graph"):
        begin(state)


@pytest.mark.gpu
def test_a_real_capture_is_refused() -> None:
    state = HierState(nn.Linear(2, 2, device="cuda"), HierConfig(), TWO_NODES)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(ValueError, match="cannot be captured"):
        state.before_backward()


def test_a_device_without_compiled_kernels_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    report = KernelReport(cpu="plain torch", cuda="plain torch", library=None, reasons=("nothing was built",))
    monkeypatch.setattr(engine, "kernel_report", lambda: report)
    with caplog.at_level("INFO", "lightning_sparse"):
        a_state()
    assert [line for line in caplog.messages if "no compiled kernels for cpu" in line and "nothing was built" in line]
