"""Lanes as CUDA streams: which stages wait, and which tensors each stage hands over to the next.

Streams are stand-ins here, except in the test marked ``gpu``. Every operation of real ranks on the CPU is watched: a
stage must hand over each tensor that it creates and a later stage uses.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_sparse.exchange import Shard, Transfer
from lightning_sparse.exchange.lanes import Runner, StreamLanes
from lightning_sparse.strategy import HierConfig
from lightning_sparse.topology import discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from tests.helpers.distributed import RunRanks
from tests.strategy.models import PLAIN, loss_of, mlp, wrap
from tests.strategy.test_lanes import Job

Names = set[str]


class Stream:
    """A stand-in for a CUDA stream that records the names of earlier work."""

    def __init__(self, *_: Any, priority: int = 0) -> None:
        self.priority, self.before = priority, Names()

    def wait_stream(self, other: "Stream") -> None:
        self.before |= other.before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Names], Any, Any]:
    """Return the work before each piece of work, a function that works on the current stream, and a job factory."""
    current, seen = [Stream()], dict[str, Names]()

    @contextmanager
    def enter(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def do(name: str) -> tuple[()]:
        seen[name] = set(current[-1].before)
        current[-1].before.add(name)
        return ()

    def job(number: int) -> Job:
        return Job(iter(do(f"{stage} {number}") for stage in ("select", "exchange", "apply")))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    return seen, do, job


def test_streams_select_the_next_bucket_during_an_exchange(streams: Any) -> None:
    seen, do, job = streams
    lanes = StreamLanes(torch.device("cuda"))
    for number in range(2):
        do(f"backward {number}")
        lanes.run(job(number), torch.tensor(0.0))
    do("backward 2")
    lanes.discard_errors()
    do("step")
    assert seen["select 1"] == {"backward 0", "backward 1", "select 0"}, "selection waits for no exchange"
    assert seen["exchange 1"] == {*seen["select 1"], "select 1", "exchange 0"}, "an exchange waits for no apply"
    assert seen["apply 1"] == {*seen["exchange 1"], "exchange 1", "apply 0"}
    assert seen["backward 2"] == {"backward 0", "backward 1"}, "backward waits for no lane"
    assert seen["step"] == {*seen["apply 1"], "apply 1", "backward 2"}
    assert all(stream.priority == -1 for stream in lanes._streams)


def test_started_jobs_run_on_one_stream_parallel_to_the_caller(streams: Any) -> None:
    seen, do, job = streams
    lanes = StreamLanes(torch.device("cuda"))
    for number in range(2):
        started = job(number)
        lanes.submit_selected(started, torch.tensor(0.0), started.select())
        do(f"step {number}")
    lanes.synchronize()
    do("after")
    assert seen["apply 0"] == {"select 0", "exchange 0"}
    assert seen["step 1"] == {"select 0", "step 0", "select 1"}, "the caller waits for no started job"
    assert seen["exchange 1"] == {*seen["step 1"], "exchange 0", "apply 0"}
    assert seen["after"] == {*seen["exchange 1"], "exchange 1", "apply 1", "step 1"}


# -- tensors handed over -----------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Finds operations on memory that an earlier stage allocated and did not hand over to this one."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = 0
        self.faults: list[str] = []
        self._born: dict[int, int] = {}  # storage -> the stage that created it, or -1 for storages from before the job
        self._handed: set[int] = set()
        self._kept: list[Any] = []  # keeps storages alive, so that no address is reused

    def next_stage(self, handed: Sequence[Tensor]) -> None:
        self.stage += 1
        self._handed = {self._key(each) for each in handed}

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        return storage._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                key = self._key(tensor)
                if -1 < self._born.setdefault(key, -1) < self.stage and key not in self._handed:
                    self.faults.append(f"{func} in stage {self.stage}: {tuple(tensor.shape)} {tensor.dtype}")
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._born.setdefault(self._key(tensor), self.stage)
        return made


class Watching(Runner):
    """Runs each job at once, as if on streams."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.jobs = 0

    def run(self, job: Any, result: Tensor) -> torch.futures.Future[Tensor]:
        self.jobs += 1
        watch = Watch()
        for stage in (job.select, job.transfer, job.apply):
            with watch:
                handed = stage()
            watch.next_stage([result, *handed])
        self.faults += watch.faults
        return self._done(result)


PATHS = ["sparse", "regional", "dense", "dense16"]
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({"exchange": path}, {}) for path in PATHS),
    ({"exchange": "sparse", "momentum_correction": True, "exclude": "vectors"}, {}),
    ({"exchange": "dense16"}, {"find_unused_parameters": True}),
]


@pytest.mark.parametrize(("config", "options"), CASES, ids=str)
def test_gradient_jobs_hand_over_their_tensors(
    ranks: RunRanks, config: dict[str, Any], options: dict[str, Any]
) -> None:
    for faults, jobs in ranks(watched_gradients, config, options, nodes=2, devices=2):
        assert faults == []
        assert jobs > 8


def watched_gradients(config: dict[str, Any], options: dict[str, Any]) -> tuple[list[str], int]:
    model = mlp()
    ddp, state = wrap(model, HierConfig(density=0.05, **config), **{**PLAIN, **options})
    state.exchange.runner = watching = Watching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state.watch([optimizer])
    for step in range(7):
        if step == 6:
            ddp, _ = wrap(model, state.config, state=state, **{**PLAIN, **options})  # one bucket of all groups
        state.before_backward()
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        optimizer.step()
    return watching.faults, watching.jobs


@pytest.mark.parametrize("path", PATHS)
def test_update_jobs_hand_over_their_tensors(ranks: RunRanks, path: str) -> None:
    for faults, jobs in ranks(watched_updates, path, nodes=2, devices=2):
        assert faults == []
        assert jobs == 3


def watched_updates(path: Any) -> tuple[list[str], int]:
    """Count the selection as part of the job's first stage."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = UpdatesConfig(density=0.05, exchange=path)
    updates = LocalUpdates(model, optimizer, config, discover())
    watching = Watching()
    for _ in range(3):
        (state,) = (node.state for node in updates.optimizers)
        watching.run(SelectedLate(updates, state), state.global_S)
    return watching.faults, watching.jobs


class SelectedLate:
    """The job of an update, with the selection in its first stage."""

    def __init__(self, updates: LocalUpdates, state: Any) -> None:
        self._updates, self._state = updates, state

    def select(self) -> Sequence[Tensor]:
        state, exchange = self._state, self._updates.exchange
        shard = Shard(torch.randn_like(state.global_S), next_S=torch.empty_like(state.global_S))
        self._transfer = exchange.begin(state._path, shard)
        self._transfer.add_to(state.global_S, -0.5)
        return self._transfer.select()

    def transfer(self) -> Sequence[Tensor]:
        return self._transfer.transfer()

    def apply(self) -> Sequence[Tensor]:
        return self._transfer.apply()


def test_missing_handover_of_tensors_is_found(ranks: RunRanks) -> None:
    for faults, _ in ranks(watched_carelessly, nodes=2, devices=2):
        assert any("stage 1" in fault and "uint8" in fault for fault in faults), "the message"
        assert any("stage 2" in fault and "uint8" in fault for fault in faults), "the messages"


def watched_carelessly() -> tuple[list[str], int]:
    with patch.object(Transfer, "tensors", ()):
        return watched_gradients({"exchange": "sparse"}, {})


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_streams_overlap_and_results_are_complete() -> None:
    """During the first exchange the next buckets are selected. Their tensors are freed on the host immediately."""
    device = torch.device("cuda", torch.cuda.current_device())
    lanes, numel, marks = StreamLanes(device), 1 << 20, {}

    def job(number: int, result: Tensor) -> Iterator[tuple[Tensor, ...]]:
        made = torch.full((numel,), float(number), device=device)
        marks[f"selected {number}"] = torch.cuda.current_stream().record_event()
        yield (made,)
        torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s
        sent = made * 2
        del made
        marks[f"exchanged {number}"] = torch.cuda.current_stream().record_event()
        yield (sent,)
        result.copy_(sent)

    results = [torch.zeros(numel, device=device) for _ in range(8)]
    futures = [lanes.run(Job(job(number, result)), result) for number, result in enumerate(results)]
    marks["selected 7"].synchronize()
    assert not marks["exchanged 1"].query(), "the selection or the host waited for the exchange"
    for number, future in enumerate(futures):
        assert torch.equal(future.wait(), torch.full((numel,), 2.0 * number, device=device))
