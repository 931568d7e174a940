"""Momentum correction: equals SGD's momentum at density 1, is masked for sent entries, and is never lost.

The tests run in one process, on real ranks and in a Trainer.
"""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.gradients.groups import ParamGroup
from lightning_sparse.strategy import HierConfig, HierState
from lightning_sparse.topology import Topology
from tests.helpers.distributed import RunRanks, run_ranks
from tests.helpers.lines import raised
from tests.strategy.models import flat_parameters, go_on, loss_of, mlp, save, wrap
from tests.strategy.trainers import dense_one, ours, plain_module, sparse, trainer, weights

SHAPES = [(2, 2, 8), pytest.param((3, 1, 24), marks=pytest.mark.slow)]
EXACT: dict[str, Any] = {"warmup_epochs": 0, "value_dtype": "float32", "momentum_correction": True}
SGDS: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.9},
    "decay": {"momentum": 0.8, "weight_decay": 0.05},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    "maximize": {"momentum": 0.5, "maximize": True, "weight_decay": 0.05},
    "fused": {"momentum": 0.9, "weight_decay": 0.05, "fused": True},
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups: biases with their own momentum and no weight decay, one parameter without momentum."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return [
        {"params": weights[:-1]},
        {"params": biases, "weight_decay": 0.0, "momentum": 0.7},
        {"params": weights[-1:], "momentum": 0.0, "nesterov": False},
    ]


def train(config: HierConfig | None, options: dict[str, Any], steps: int, backwards: int = 1) -> Tensor:
    """Train with our hook or DDP, with scheduled momentum and a channels-last weight. Return the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, (1, 2)), nn.Flatten(), mlp_after(36))
    model[0].weight.data = model[0].weight.data.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(groups_of(model), lr=0.01, **options)
    if config is None:
        ddp, state = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002), None
    else:
        ddp, state = wrap(model, config, bucket_cap_mb=0.002)
        state.watch([optimizer])
    for step in range(steps):
        optimizer.param_groups[0]["momentum"] = options["momentum"] * (0.9 if step % 5 == 0 else 1.0)
        for part in range(backwards):
            if state is not None:
                state.before_backward()
            loss_of(Unflat(ddp), backwards * step + part, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.param_groups[1]["momentum"] == 0.7
    return flat_parameters(model)


def mlp_after(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 29), nn.Tanh(), nn.Linear(29, 5))


class Unflat:
    """Reshapes rows into the input of a convolution."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x[:, None, None].expand(-1, 2, 1, -1))
        return out


def everything(folder: str, steps: int) -> dict[str, Any]:
    os.chdir(folder)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, options in SGDS.items():
        ways = [None, HierConfig(density=1.0, exchange="sparse", **EXACT), HierConfig(exchange="dense", **EXACT)]
        if name == "plain":
            ways.append(HierConfig(density=1.0, exchange="regional", **EXACT))
        found[name] = [train(way, options, steps) for way in ways]
    with pytest.raises(ValueError, match=r"several backward passes per step .* Wrap all passes except the last"):
        train(HierConfig(**EXACT), SGDS["plain"], steps, backwards=2)
    sparse = HierConfig(density=0.05, exchange="sparse", warmup_epochs=0, momentum_correction=True)
    found["sparse"] = train(sparse, SGDS["nesterov"], steps)
    found["discarded"] = discarded()
    return found


def discarded() -> dict[str, bool]:
    """Check that a discarded gradient of all parameters or of one parameter leaves its velocity unchanged."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ddp, state = wrap(model, HierConfig(density=0.1, exchange="sparse", **EXACT), bucket_cap_mb=0.002)
    state.watch([optimizer])
    assert state.momentum is not None

    def step(index: int, *, drop: tuple[nn.Parameter, ...] = (), skip: bool = False) -> None:
        state.before_backward()
        loss_of(ddp, index, dist.get_rank()).backward()
        for parameter in drop:
            parameter.grad = None
        if not skip:
            optimizer.step()
        optimizer.zero_grad()
        state.commit_round()

    def velocity() -> dict[str, Tensor]:
        assert state.momentum is not None
        store, out = state.momentum.store, {}
        for group, shard in store.committed.items():
            for name, here, _ in group.shard_slices(group.names, store.device_index, store.num_devices):
                out[name] = shard[here].clone()
        return out

    def same(a: dict[str, Tensor], b: dict[str, Tensor], but: str = "") -> bool:
        return all(torch.equal(a[name], b[name]) == (name != but) for name in a)

    for index in range(6):
        step(index)
    before = velocity()
    step(6, skip=True)
    after_skip = velocity()
    step(7, drop=tuple(p for name, p in model.named_parameters() if name != "2.weight"))
    return {"skipped": same(before, after_skip), "one": same(before, velocity(), but="2.weight")}


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    nodes, devices, steps = request.param
    folder = str(tmp_path_factory.mktemp("momentum"))
    return run_ranks(everything, folder, steps, nodes=nodes, devices=devices, timeout=120)


@pytest.mark.parametrize("name", SGDS)
def test_momentum_at_density_one_equals_sgd(results: list[dict[str, Any]], name: str) -> None:
    for each in results:
        sgd, *ours = each[name]
        for parameters in ours:
            torch.testing.assert_close(parameters, sgd, rtol=1e-5, atol=1e-6)


def test_momentum_keeps_ranks_equal(results: list[dict[str, Any]]) -> None:
    assert all(torch.equal(each["sparse"], results[0]["sparse"]) for each in results)


def test_discarded_gradient_leaves_velocity_unchanged(results: list[dict[str, Any]]) -> None:
    for each in results:
        assert each["discarded"] == {"skipped": True, "one": True}


def test_velocity_and_residual_sum_to_the_momentum_buffers(ranks: RunRanks, tmp_path: Path) -> None:
    """With constant gradients g, applied and pending values sum to SGD's momentum buffers if nothing is masked.

    With masking, the sum is smaller.
    """
    for given, got, masked in ranks(balance, nodes=2, devices=2):
        torch.testing.assert_close(given, got, rtol=1e-4, atol=1e-5)
        assert masked < float(given.abs().sum())


def balance() -> tuple[Tensor, Tensor, float]:
    results = []
    for masking in (False, True):
        model = nn.Linear(64, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        config = HierConfig(density=0.1, exchange="sparse", **EXACT)
        ddp, state = wrap(model, config)
        state.watch([optimizer])
        assert state.momentum is not None
        if not masking:
            state.momentum.stop = lambda *_: None  # type: ignore[method-assign]
        x = torch.randn(1, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
        mean = x.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        applied, buffer, given = (torch.zeros(64) for _ in range(3))
        for _ in range(10):
            state.before_backward()
            ddp(x).sum().backward()
            assert model.weight.grad is not None
            applied += model.weight.grad.flatten()
            buffer = 0.9 * buffer + mean.flatten()
            given += buffer
            optimizer.step()
            optimizer.zero_grad()
        state.commit_round()
        (group,) = state.store.committed
        waiting = state.exchange.communicator.gather(state.store.committed[group]).clone()
        dist.all_reduce(waiting)
        results.append((given, applied + waiting / 2))
    return (*results[0], float(results[1][1].abs().sum()))


# -- resume without momentum correction --------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"momentum_correction": True}])
def test_residual_resumed_without_correction_moves_parameters_equally_far(
    ranks: RunRanks, tmp_path: Path, nesterov: bool, options: dict[str, Any]
) -> None:
    """If a run resumes without correction or on one node, SGD's own momentum multiplies the residual."""
    path = str(tmp_path / "run.ckpt")
    due = ranks(wait_for, path, nesterov, nodes=2, devices=2)[0]
    for moved in ranks(go_on_without, path, nesterov, options, nodes=1 if options else 2, devices=2):
        torch.testing.assert_close(moved, due, rtol=1e-3, atol=1e-3)
        assert due.norm() > 1.0


def one_row(nesterov: bool) -> tuple[nn.Linear, torch.optim.SGD]:
    model = nn.Linear(64, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, nesterov=nesterov)


def still(ddp: nn.Module, state: HierState, optimizer: torch.optim.Optimizer, model: nn.Linear) -> Tensor:
    """Return how far the parameters move without gradients."""
    before = flat_parameters(model).clone()
    for _ in range(100):  # until momentum of 0.9 has decayed
        state.before_backward()
        (0.0 * ddp(torch.ones(1, 64)).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat_parameters(model) - before


def without_before_backward() -> str:
    model, optimizer = one_row(nesterov=False)
    ddp, state = wrap(model, HierConfig(density=0.1, exchange="sparse", **EXACT))
    state.watch([optimizer])
    return raised(lambda: ddp(torch.ones(1, 64)).sum().backward())


def test_backward_pass_that_is_not_announced_is_refused(ranks: RunRanks) -> None:
    for message in ranks(without_before_backward, nodes=2, devices=1):
        assert "before_backward() was not called before this backward pass" in message


def wait_for(path: str, nesterov: bool) -> Tensor:
    model, optimizer = one_row(nesterov)
    ddp, state = wrap(model, HierConfig(density=0.1, exchange="sparse", **EXACT))
    state.watch([optimizer])
    for step in range(10):
        state.before_backward()
        ddp(torch.randn(1, 64, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    save(state, path)
    assert state.momentum is not None
    state.momentum.stop = lambda *_: None  # type: ignore[method-assign]
    return still(ddp, state, optimizer, model)


def go_on_without(path: str, nesterov: bool, options: dict[str, Any]) -> Tensor:
    model, optimizer = one_row(nesterov)
    config = HierConfig(
        **{"density": 1.0, "exchange": "sparse", "warmup_epochs": 0, "value_dtype": "float32"} | options
    )
    ddp, state = wrap(model, config)
    go_on(state, path)
    state.watch([optimizer])
    assert state.momentum is None
    return still(ddp, state, optimizer, model)


# -- in one process: refused uses, and the optimizer's view of its momentum --------------------------------------------


def hierarchical_state(model: nn.Module) -> HierState:
    return HierState(model, HierConfig(momentum_correction=True, overlap=False), Topology(((0,), (1,)), 0))


def test_new_optimizer_starts_without_velocity() -> None:
    model = mlp()
    state = hierarchical_state(model)
    assert state.momentum is not None
    group = ParamGroup(("0.weight",), (13 * 37,))
    for kept in (True, False):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state.watch([optimizer])
        state.momentum.store.propose(group, torch.ones(13 * 37))
        state.momentum.store.commit(frozenset())
        state.release_optimizers()
        state.watch([optimizer] if kept else [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)])
        assert (group in state.momentum.store.committed) == kept


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        (lambda p: [torch.optim.AdamW(p)], "with AdamW: the correction applies to torch.optim.SGD"),
        (lambda p: [torch.optim.SGD(p, lr=0.1)], r"SGD\(momentum=0\), which must be more than 0"),
        (lambda p: [torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1)], "dampening"),
        (lambda p: [torch.optim.SGD(p, lr=0.1, momentum=0.9)] * 2, "with 2 optimizers; it needs one"),
    ],
)
def test_momentum_correction_of_unsupported_optimizers_is_refused(optimizers: Any, message: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=message):
        hierarchical_state(model).watch(optimizers(list(model.parameters())))


def test_momentum_correction_of_float64_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"64-bit or complex parameters \(weight, bias\)"):
        hierarchical_state(nn.Linear(2, 2).double())


def test_momentum_correction_without_a_watched_optimizer_is_refused() -> None:
    state = hierarchical_state(mlp())
    assert state.momentum is not None
    with pytest.raises(ValueError, match=r"Call state.watch\(\[optimizer\]\)"):
        state.before_backward()


def test_optimizer_momentum_is_off_only_during_the_step() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)
    state = hierarchical_state(model)
    state.watch([optimizer])
    seen: list[Any] = []

    def closure() -> Tensor:
        seen.append((optimizer.param_groups[0]["momentum"], optimizer.state_dict()["param_groups"][0]["momentum"]))
        if len(seen) == 2:
            raise RuntimeError("closure")
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        return torch.zeros(())

    given = {name: optimizer.param_groups[0][name] for name in ("momentum", "weight_decay", "nesterov")}
    before = flat_parameters(model)
    optimizer.step(closure)
    torch.testing.assert_close(flat_parameters(model), before - 0.1)
    assert not any(
        "momentum_buffer" in each and each["momentum_buffer"] is not None for each in optimizer.state.values()
    )
    assert {name: optimizer.param_groups[0][name] for name in given} == given
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(closure)
    assert seen == [(0.0, 0.9)] * 2
    assert optimizer.state_dict()["param_groups"][0]["momentum"] == 0.9
    state.release_optimizers()
    assert {name: optimizer.param_groups[0][name] for name in given} == given


def test_momentum_on_one_node_is_left_to_the_optimizer() -> None:
    state = HierState(mlp(), HierConfig(momentum_correction=True, overlap=False), Topology(((0, 1),), 0))
    assert state.momentum is None


def test_momentum_of_a_run_without_correction_is_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    empty = optimizer.state_dict()
    optimizer.step()
    saved, resumed = optimizer.state_dict(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hierarchical_state(model).watch([resumed])
    resumed.load_state_dict(empty)
    assert "has momentum of a run without the correction" not in caplog.text
    resumed.load_state_dict(saved)
    assert "has momentum of a run without the correction" in caplog.text


# -- in a Trainer: equals DDP if all is sent ---------------------------------------------------------------------------

PACKAGE = "pytorch_lightning"
STEPS = 24


@pytest.mark.slow
def test_momentum_correction_in_a_trainer_equals_ddp(tmp_path: Path) -> None:
    for each in run_ranks(trained, str(tmp_path), nodes=2, devices=2, timeout=120, init=False):
        for name, (ddp, corrected) in each["runs"].items():
            torch.testing.assert_close(corrected, ddp, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text)
        assert each["saved"] == {"momentum": each["saved"]["momentum"], "weight_decay": 0.01, "nesterov": True}
        assert each["saved"]["momentum"] > 0.5
        assert each["masked and shared"]


def trained(folder: str) -> dict[str, Any]:
    os.chdir(folder)
    warnings.simplefilter("ignore")

    def optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01, nesterov=True)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS)  # momentum cycles, too
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    def run(strategy: Any, **options: Any) -> tuple[Any, Tensor]:
        module = plain_module(PACKAGE, by_step=True)
        type(module).configure_optimizers = optimizers
        t = trainer(PACKAGE, strategy, max_steps=STEPS, max_epochs=-1, **options)
        t.fit(module)
        return t, weights(module)

    def twice(strategy: Any) -> Tensor:
        """Fit twice; the second fit has a new optimizer."""
        module = plain_module(PACKAGE)
        t = trainer(PACKAGE, strategy, max_epochs=1, max_steps=-1)
        t.fit(module)
        t.fit_loop.max_epochs = 2
        t.fit(module)
        return weights(module)

    exact = {"momentum_correction": True, "warmup_epochs": 0}
    runs = {"second fit": [twice("ddp"), twice(dense_one(PACKAGE, **exact))]}
    for name, make in {
        "plain": dict,
        "accumulated": lambda: {"accumulate_grad_batches": 2},
        "shared step": lambda: {"callbacks": [ours(PACKAGE).PTOCallback("node")]},
    }.items():
        runs[name] = [run("ddp", **make())[1], run(dense_one(PACKAGE, **exact), **make())[1]]
    t, _ = run(sparse(PACKAGE, **exact))
    t.save_checkpoint("corrected.ckpt")
    group = torch.load("corrected.ckpt", weights_only=True)["optimizer_states"][0]["param_groups"][0]
    shared = run(sparse(PACKAGE, **exact), callbacks=[ours(PACKAGE).PTOCallback("node")])[1]
    alone = run(sparse(PACKAGE, **exact))[1]
    return {
        "runs": runs,
        "saved": {name: group[name] for name in ("momentum", "weight_decay", "nesterov")},
        "masked and shared": torch.equal(shared, alone),
    }


def late_group(corrected: bool) -> Tensor:
    """Train parameters that join the optimizer late; their earlier gradients are discarded."""
    model = mlp()
    early, late = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizer = torch.optim.SGD(early, lr=0.05, momentum=0.9)
    ddp: Any = DistributedDataParallel(model, bucket_cap_mb=0.002)
    state = None
    if corrected:
        ddp, state = wrap(model, HierConfig(exchange="dense", **EXACT), bucket_cap_mb=0.002)
        state.watch([optimizer])
    for step in range(9):
        if step == 4:
            model.zero_grad()
            optimizer.add_param_group({"params": late})
        if state is not None:
            state.before_backward()
        loss_of(ddp, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat_parameters(model)


def late_groups() -> tuple[Tensor, Tensor]:
    return late_group(True), late_group(False)


def test_parameters_that_join_the_optimizer_late_start_without_velocity(ranks: RunRanks) -> None:
    for corrected, plain in ranks(late_groups, nodes=2, devices=2):
        torch.testing.assert_close(corrected, plain, rtol=1e-5, atol=1e-6)
