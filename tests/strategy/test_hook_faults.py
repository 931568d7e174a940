"""Faults in a backward pass: exceptions, non-finite gradients, dead or stalled ranks, link failures.

On the other ranks the error names the round and the bucket, within the timeout of the process groups. Every test runs
the function below it on P ranks and checks the results.
"""

import gc
import io
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.lab import Cluster, LabConfig
from lightning_sparse.strategy import CommunicationError, HierConfig
from lightning_sparse.topology import discover
from tests.helpers.distributed import RanksFailed, RunRanks, run_ranks
from tests.helpers.lines import raised
from tests.strategy.kills import die
from tests.strategy.models import PLAIN, backward, flat_grads, loss_of, mlp, node_residual, train, wrap


def test_exchange_error_after_a_failed_backward_is_shown() -> None:
    assert run_ranks(raise_half_way, nodes=2, devices=1) == ["exchange failed"] * 2


def raise_half_way() -> str:
    model = mlp()
    ddp, state = wrap(model, HierConfig(density=0.05, exchange="sparse", warmup_epochs=0), **PLAIN)
    train(model, ddp, 4)
    hook = model[0].weight.register_hook(_raise("the user's own mistake"))  # by then the other buckets are queued
    with pytest.raises(RuntimeError, match="the user's own mistake"):
        train(model, ddp, 1)
    hook.remove()
    ddp, _ = wrap(model, state.config, state=state, **PLAIN)
    train(model, ddp, 1)
    state.exchange.communicator.exchange = _raise("exchange failed")  # type: ignore[method-assign]
    return raised(train, model, ddp, 1)


def _raise(text: str) -> Callable[[Tensor], Tensor]:
    def fail(_: Tensor) -> Tensor:
        raise RuntimeError(text)

    return fail


def test_deleted_models_leave_no_states_and_threads() -> None:
    assert run_ranks(forget_models, nodes=2, devices=1) == [(0, 0), (0, 0)]


def forget_models() -> tuple[int, int]:
    """Return the numbers of states and threads left of three deleted models."""
    states = []
    for _ in range(3):
        model = mlp()
        ddp, state = wrap(model, HierConfig(), **PLAIN)
        train(model, ddp, 3)
        states.append(weakref.ref(state))
        del model, ddp, state
    gc.collect()
    deadline = time.monotonic() + 5
    while (threads := _our_threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return sum(state() is not None for state in states), threads


def _our_threads() -> int:
    return sum(thread.name == "lightning_sparse" for thread in threading.enumerate())


# -- non-finite gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "density"), [(float("nan"), 0.02), (float("inf"), 1.0), (-float("inf"), 0.02)])
def test_non_finite_gradient_is_seen_by_all_and_changes_no_residual(
    ranks: RunRanks, bad: float, density: float
) -> None:
    for seen, before, after, later in ranks(non_finite, bad, density, nodes=2, devices=2):
        assert seen, "this rank did not see the non-finite gradient in its round"
        assert torch.equal(before, after), "a discarded round changed the residual"
        assert later.isfinite().all()


def non_finite(bad: float, density: float) -> tuple[bool, Tensor, Tensor, Tensor]:
    model = mlp()
    config = HierConfig(density=density, exchange="sparse", warmup_epochs=0)
    ddp, state = wrap(model, config, **PLAIN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state.watch([optimizer])
    for step in range(8):
        optimizer.zero_grad()
        state.before_backward()
        if step == 6:
            before = node_residual(model, state)
        loss = loss_of(ddp, step, dist.get_rank())
        if step == 6 and dist.get_rank() == 1:
            loss = loss + bad * model[0].weight.flatten()[7]  # the bucket that is reduced last
        loss.backward()
        if step == 6:
            seen = not flat_grads(model).isfinite().all()
            optimizer.zero_grad()  # no step, as with a loss scaler
            state.before_backward()
            after = node_residual(model, state)
        else:
            optimizer.step()
    return seen, before, after, flat_grads(model)


# -- an interrupted backward pass --------------------------------------------------------------------------------------


def test_backward_that_raises_leaves_residuals_unchanged() -> None:
    for before, after, history in run_ranks(cut_short, nodes=2, devices=2):
        assert torch.equal(before, after)
        assert history.isfinite().all()


def cut_short() -> tuple[Tensor, Tensor, Tensor]:
    """Raise an exception after some buckets are reduced, as running out of memory does. Then wrap the model again."""
    model = mlp()
    ddp, state = wrap(model, HierConfig(density=0.05, exchange="sparse", warmup_epochs=0), **PLAIN)
    train(model, ddp, 6)
    state.commit_round()
    before = node_residual(model, state)
    handle = model[0].weight.register_hook(_out_of_memory)
    with pytest.raises(MemoryError):
        loss_of(ddp, 6, dist.get_rank()).backward()
    handle.remove()
    model.zero_grad()
    state.before_backward()
    after = node_residual(model, state)
    ddp, state = wrap(model, state.config, state=state, **PLAIN)
    train(model, ddp, 3)
    return before, after, flat_grads(model)


def _out_of_memory(_: Tensor) -> None:
    raise MemoryError


# -- a dead rank -------------------------------------------------------------------------------------------------------


def test_dead_rank_fails_the_others_with_the_round() -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(one_dies, nodes=2, devices=2, timeout=40, grace_s=30)
    assert set(failure.value.killed) == {3}
    assert set(failure.value.raised) == {0, 1, 2}
    for text in failure.value.raised.values():
        assert CommunicationError.__name__ in text
        assert "in round 4, bucket" in text


def one_dies() -> None:
    model = mlp()
    ddp, _ = wrap(model, HierConfig(density=0.05, exchange="sparse"), **PLAIN)
    for step in range(6):
        if step == 4 and dist.get_rank() == 3:
            die()
        loss_of(ddp, step, dist.get_rank()).backward()


# -- a stalled rank, a link failure ------------------------------------------------------------------------------------

TIMEOUT_S = 3
BAD_STEP = 4


CASES = [("sparse", True), ("regional", True), ("dense", False), ("dense16", False)]


@pytest.mark.parametrize(
    ("exchange", "overlap"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])]
)
def test_stalled_rank_fails_the_others_after_the_timeout(exchange: str, overlap: bool) -> None:
    line, stalled = run_ranks(stall, exchange, overlap, nodes=2, devices=1, timeout=100)
    assert stalled == "stalled"
    steps = {"sparse": "all-gather", "regional": "all-to-all", "dense": "all-reduce", "dense16": "all-to-all"}
    assert f"rank 0: {steps[exchange]} between nodes (ranks 0, 1) failed in round {BAD_STEP}, bucket 0" in line
    assert "stalled past the process group's timeout" in line


def stall(exchange: str, overlap: bool) -> str:
    """Return the error of rank 0. Rank 1 stalls until then."""
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
        if said := raised(backward, ddp, [step]):
            return said
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
def test_link_that_goes_down_fails_both_sides(tmp_path: Path) -> None:
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
