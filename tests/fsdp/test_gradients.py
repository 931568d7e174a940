"""Gradients of shards, averaged over nodes in FSDP2's hook, compared with native HSDP and DDP."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import fsdp as fsdp_module
from lightning_sparse.exchange import ExchangeConfig
from lightning_sparse.fsdp import ShardedGradients, blocks, mesh_of, shard
from lightning_sparse.sharding import local_of, part_of
from lightning_sparse.topology import Topology, discover
from tests.fsdp.runs import Attention, Blocks, loss_of, steps, whole
from tests.fsdp.test_trainer import fitted, fsdp
from tests.helpers.distributed import run_ranks
from tests.helpers.lines import Lines, raised
from tests.helpers.scenarios import Scenarios
from tests.helpers.training import results_in_one_start
from tests.strategy.trainers import lightning_of, ours, plain_module
from tests.updates.runs import adamw, mean_over_nodes, sgd

PACKAGE = "pytorch_lightning"
SLOW = pytest.mark.slow


SCENARIOS, OF_TWO_RANKS = Scenarios(), Scenarios()
results = results_in_one_start(SCENARIOS, devices=2)
of_two_ranks = results_in_one_start(OF_TWO_RANKS)
Results = list[dict[str, Any]]


@SCENARIOS.add
def three_ways(_: str) -> tuple[Tensor, Tensor, Tensor]:
    """Train a model on equal batches with the hook that sends everything, native HSDP, and DDP."""
    topology = discover()
    mesh = mesh_of(topology)
    mine = shard(Blocks(), mesh)
    ShardedGradients(mine, ExchangeConfig(exchange="dense"), topology)
    native = Blocks()
    for block in blocks(native):
        fully_shard(block, mesh=mesh)
    fully_shard(native, mesh=mesh)
    plain = Blocks()
    ddp = DistributedDataParallel(plain)
    for model in (mine, native, ddp):
        steps(model, adamw(model), None, 0, 10)
    return whole(mine).clone(), whole(native).clone(), whole(plain).clone()


def test_fsdp_gradients_with_everything_sent_equal_native_hsdp(results: Results) -> None:
    for mine, native, ddp in (each["three_ways"] for each in results):
        assert torch.equal(mine, native)
        torch.testing.assert_close(mine, ddp, rtol=1e-5, atol=1e-6)


def gradients_of(model: Any) -> Tensor:
    return torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]).double()


def balances(net: type[nn.Module], steps: int) -> list[tuple[Tensor, float, float]]:
    ways: list[dict[str, Any]] = [{"exchange": "sparse", "density": 0.05}, {"exchange": "dense16"}]
    return [balance(options, net, steps) for options in ways]


def balance(options: dict[str, Any], net: type[nn.Module], steps: int) -> tuple[Tensor, float, float]:
    """Train with two micro-batches per step. Return the weights, the error of applied + residual, and the residuals."""
    topology = discover()
    model = shard(net(topology.rank), mesh_of(topology))  # type: ignore[call-arg]
    gradients = ShardedGradients(model, ExchangeConfig(**options), topology)
    alone = shard(net(), mesh_of(topology))  # averages its gradients only inside the node
    optimizer = sgd(model)
    told = applied = torch.zeros(())
    for step in range(steps):
        alone.load_state_dict(model.state_dict())
        alone.zero_grad()
        optimizer.zero_grad()
        with gradients.accumulating():
            loss_of(model, step, topology.rank).backward()
        loss_of(model, step + 1000, topology.rank).backward()
        for at in (step, step + 1000):
            loss_of(alone, at, topology.rank).backward()
        told = told + mean_over_nodes(gradients_of(alone))
        applied = applied + gradients_of(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        gradients.step()
    left = torch.zeros_like(applied)
    names = [name for name, _ in model.named_parameters()]
    ends = torch.tensor([0] + [p.numel() for p in model.parameters()]).cumsum(0).tolist()
    begins = dict(zip(names, ends, strict=False))
    for managed in gradients.managed:
        if managed.residual_S is None:
            continue
        for name, parameter, view in managed.views(managed.residual_S):
            part = part_of(parameter)
            left[begins[name] + part.begin : begins[name] + part.end] = view
    dist.all_reduce(left)
    left /= topology.num_nodes
    return whole(model).clone(), float((told - applied - left).abs().max()), float(left.abs().max())


@SCENARIOS.add
def attention_on_two_devices(_: str) -> list[tuple[Tensor, float, float]]:
    return balances(Attention, 6)


@SCENARIOS.slow
def blocks_on_two_devices(_: str) -> list[tuple[Tensor, float, float]]:
    return balances(Blocks, 20)


def check_balances(everyone: list[list[tuple[Tensor, float, float]]]) -> None:
    for results in zip(*everyone, strict=True):
        for weights, off, left in results:
            assert torch.equal(weights, results[0][0])
            assert off < 1e-4
            assert left > 0


@pytest.mark.parametrize("name", ["attention_on_two_devices", pytest.param("blocks_on_two_devices", marks=SLOW)])
def test_fsdp_gradients_lose_nothing(results: Results, name: str) -> None:
    check_balances([each[name] for each in results])


def test_fsdp_gradients_on_one_device_per_node_lose_nothing() -> None:
    check_balances(run_ranks(balances, Blocks, 8, nodes=3, devices=1))


def attention(seed: int = 0) -> Any:
    class Module(type(plain_module(PACKAGE, Attention(seed), by_step=True))):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def state_of(trainer: Any) -> Tensor:
    """Return all weights and buffers."""
    buffers = [each.flatten().float() for each in trainer.lightning_module.buffers()]
    return torch.cat([whole(trainer.lightning_module), *buffers]).clone()


@SCENARIOS.add
def in_a_trainer(_: str) -> tuple[Tensor, bool, dict[str, float]]:
    """Return the end of a fit, whether a second fit keeps the residuals, and the statistics."""
    reports = ours(PACKAGE).CommStatsCallback()
    begin = fsdp(PACKAGE, send="gradients", exchange="sparse")
    t = fitted(
        PACKAGE, begin, attention(), callbacks=[reports], accumulate_grad_batches=2, gradient_clip_val=0.5, max_steps=7
    )
    logged = {name: float(value) for name, value in t.callback_metrics.items() if name.startswith("comm/")}
    ends, left = state_of(t), [each.residual_S for each in begin.engine.managed]
    t.fit(t.lightning_module)  # a fit without steps
    kept = all(one is each.residual_S for one, each in zip(left, begin.engine.managed, strict=True))
    return ends, kept, logged


def test_fsdp_gradients_in_a_trainer_keep_ranks_equal_and_residuals_of_a_fit(results: Results) -> None:
    first = results[0]["in_a_trainer"][0]
    for ends, kept, logged in (each["in_a_trainer"] for each in results):
        assert torch.equal(ends[: -2 * 12 - 1], first[: -2 * 12 - 1]), "weights; the batch statistics differ by rank"
        assert kept, "a second fit keeps the residuals"
        assert 0 < logged["comm/density"] < 0.1
        assert logged["comm/bytes_between_nodes"] > 0
        assert logged["comm/residual_norm"] > 0


@OF_TWO_RANKS.add
def swapped(_: str) -> str:
    """Freeze and unfreeze equal numbers of parameters during the fit."""
    topology = discover()
    model = shard(Blocks(), mesh_of(topology))
    model.blocks[0][0].requires_grad_(False)
    ShardedGradients(model, ExchangeConfig(exchange="dense"), topology)
    model.blocks[0][0].requires_grad_(True)
    model.blocks[0][2].requires_grad_(False)
    return raised(loss_of(model, 0, topology.rank).backward)


def test_fsdp_freezing_within_a_fit_is_refused(of_two_ranks: Results) -> None:
    for said in (each["swapped"] for each in of_two_ranks):
        assert "was frozen or unfrozen during the fit" in said
        assert "send='updates'" in said


def test_fsdp_auto_exchange_is_refused() -> None:
    with pytest.raises(ValueError, match="needs DDP's buckets"):
        ShardedGradients(Blocks(), ExchangeConfig(), Topology(((0,), (1,)), 0))


@SCENARIOS.add
def kept_memory(_: str) -> tuple[int, int]:
    """Return the number of gradients dropped in the hook, and how many of them were recorded for the allocator."""
    model, topology = Blocks(), discover()
    model = shard(model, mesh_of(topology))
    gradients = ShardedGradients(model, ExchangeConfig(exchange="dense"), topology)
    told: set[int] = set()
    record = patch.object(fsdp_module, "record_stream_use", lambda tensor: told.add(tensor.data_ptr()))
    with record, gradients.accumulating():
        loss_of(model, 0, dist.get_rank()).backward()
    dropped = {
        local_of(p.grad).data_ptr() for p in model.parameters() if p.grad is not None and local_of(p.grad).numel()
    }
    with record:
        loss_of(model, 1, dist.get_rank()).backward()
    return len(dropped), len(dropped & told)


def test_fsdp_gradients_dropped_in_the_hook_are_recorded_for_the_allocator(results: Results) -> None:
    """On CUDA their memory belongs to another stream, whose next reduce-scatter could reuse it too early."""
    for dropped, told in (each["kept_memory"] for each in results):
        assert dropped > 0
        assert told == dropped


@OF_TWO_RANKS.add
def defaults_in_a_trainer(_: str) -> tuple[list[str], list[float], str]:
    """Return the log lines of a run with AdamW and default options, and the density of each step."""
    densities, pl, lines = list[float](), lightning_of(PACKAGE), Lines()

    class Note(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            densities.append(trainer.strategy.engine.exchange.stats.density)

    strategy = ours(PACKAGE).MSTopKFSDPStrategy(send="gradients", density=0.05)
    fitted(PACKAGE, strategy, max_steps=80, callbacks=[Note()])
    return list(lines.lines), densities, strategy.config.value_dtype


def test_fsdp_gradients_by_default_warm_up_in_bfloat16_and_warn_of_adamw(of_two_ranks: Results) -> None:
    said, densities, dtype = of_two_ranks[0]["defaults_in_a_trainer"]
    assert dtype == "bfloat16"
    assert any("AdamW divides by the size of recent gradients" in line for line in said)
    assert any(line.startswith("density warm-up ends at round 4 or epoch 4") for line in said)
    assert densities[0] > densities[1] > densities[2] > densities[3] > densities[4] == densities[-1]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({}, "2bit"), ({"send": "gradients"}, "bfloat16"), ({"send": "gradients", "value_dtype": "2bit"}, "2bit")],
)
def test_fsdp_value_dtype_default_depends_on_send(options: dict[str, Any], dtype: str) -> None:
    assert fsdp(PACKAGE, **options).config.value_dtype == dtype


def test_fsdp_warmup_of_updates_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup_steps=3 applies to gradients, but send='updates'"):
        fsdp(PACKAGE, warmup_steps=3)
