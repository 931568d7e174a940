"""The pipeline lanes: the order of jobs, waiting, and errors. No ranks, no collectives."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparse.exchange.lanes import LANES, FifoLanes, Runner

PATIENCE_S = 20.0


class Job:
    """A job written as a generator: each of its three stages runs to the next yield."""

    def __init__(self, stretches: Iterator[Any]) -> None:
        self._stretches = stretches

    def select(self) -> Sequence[Tensor]:
        return next(self._stretches, ())

    transfer = apply = select


class _During(torch.autograd.Function):
    """Calls a function inside a backward pass, as DDP calls a hook."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def backward_with(jobs: list[Iterator[None]], runner: Runner) -> list[torch.futures.Future[Tensor]]:
    futures: list[torch.futures.Future[Tensor]] = []
    call = lambda: futures.extend(runner.run(Job(job), torch.tensor(float(i))) for i, job in enumerate(jobs))  # noqa: E731
    _During.apply(torch.ones((), requires_grad=True), call).backward()
    return futures


def test_lanes_exchange_a_bucket_while_the_next_is_selected() -> None:
    """Bucket 0 is exchanged until bucket 1 is selected. It is applied only once bucket 1 is being exchanged."""
    selected, exchanging = threading.Event(), threading.Event()

    def first() -> Iterator[None]:
        yield
        assert selected.wait(PATIENCE_S)
        yield
        assert exchanging.wait(PATIENCE_S)

    def second() -> Iterator[None]:
        selected.set()
        yield
        exchanging.set()
        yield

    futures = backward_with([first(), second()], FifoLanes())
    assert [future.value().item() for future in futures] == [0.0, 1.0]


@pytest.mark.parametrize("runner", [FifoLanes, Runner])
def test_lanes_run_jobs_in_order(runner: Callable[[], Runner]) -> None:
    seen: list[tuple[int, int, bool]] = []

    def job(number: int) -> Iterator[None]:
        for stretch in range(3):
            seen.append((stretch, number, torch.is_grad_enabled()))
            if stretch < 2:
                yield

    backward_with([job(number) for number in range(20)], runner())
    for stretch in range(3):
        assert [number for s, number, _ in seen if s == stretch] == list(range(20))
    assert not any(grad for _, _, grad in seen)


def test_lanes_after_an_error_fail_backward_and_run_no_later_job() -> None:
    ran: list[str] = []

    def fails() -> Iterator[None]:
        yield
        raise ValueError("the first")

    def job(number: int) -> Iterator[None]:
        yield
        ran.append(f"exchange {number}")
        yield
        ran.append(f"apply {number}")

    lanes = FifoLanes()
    with pytest.raises(ValueError, match="the first"):
        backward_with([job(0), fails(), job(2)], lanes)
    assert "exchange 2" not in ran
    assert "exchange 0" in ran
    ran.clear()
    backward_with([job(3)], lanes)
    assert ran == ["exchange 3", "apply 3"], "the error must not affect the next backward pass"


def test_ended_lanes_leave_no_thread_and_restart_with_the_next_job() -> None:
    ran: list[int] = []

    def job(number: int) -> Iterator[None]:
        yield
        ran.append(number)
        yield

    before = set(threading.enumerate())
    lanes = FifoLanes()
    lanes.shutdown()  # no job has started
    for number in range(2):
        backward_with([job(number)], lanes)
        assert len(set(threading.enumerate()) - before) == LANES
        lanes.shutdown()
        assert not set(threading.enumerate()) - before
    assert ran == [0, 1]


def test_lanes_end_does_not_wait_for_a_job_that_hangs() -> None:
    """After an exception during backward a collective may hang; the teardown must not hang with it."""
    begun, released = threading.Event(), threading.Event()

    def hangs() -> Iterator[None]:
        begun.set()
        assert released.wait(PATIENCE_S)
        yield
        yield

    lanes = FifoLanes()

    def leave() -> None:
        lanes.run(Job(hangs()), torch.tensor(0.0))
        assert begun.wait(PATIENCE_S)
        lanes.shutdown()
        released.set()

    _During.apply(torch.ones((), requires_grad=True), leave).backward()
    lanes.discard_errors()


def test_job_after_a_failed_backward_waits_for_queued_jobs() -> None:
    """New threads would run collectives before the queued jobs, in another order than other ranks."""
    released, seen = threading.Event(), []

    def slow() -> Iterator[None]:
        yield
        assert released.wait(PATIENCE_S)
        seen.append("slow")
        yield

    def following() -> Iterator[None]:
        yield
        seen.append("following")
        yield

    before, lanes = set(threading.enumerate()), FifoLanes()

    def leave() -> None:
        lanes.run(Job(slow()), torch.tensor(0.0))
        raise KeyError("in backward")

    with pytest.raises(KeyError):
        _During.apply(torch.ones((), requires_grad=True), leave).backward()
    lanes.shutdown()
    threading.Timer(0.3, released.set).start()
    backward_with([following()], lanes)
    assert seen == ["slow", "following"]
    lanes.shutdown()
    assert not {each for each in threading.enumerate() if each.name == "lightning_sparse"} - before


_LEAVES = """
import torch
from lightning_sparse.exchange.lanes import FifoLanes

class Job:
    def transfer(self):
        ones = torch.ones(100_000)
        for _ in range(3000):
            ones.add_(1)
        return ()

    def apply(self):
        print("applied\\n", end="", flush=True)
        return ()

FifoLanes().submit_selected(Job(), torch.zeros(1))
lanes = FifoLanes()
lanes.submit_selected(Job(), torch.zeros(1))
"""


def test_program_may_end_while_a_job_runs() -> None:
    """Python would unwind the thread inside torch, and C++ would abort: exit status 134 after a whole training."""
    done = subprocess.run([sys.executable, "-c", _LEAVES], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "applied\napplied\n", "")
