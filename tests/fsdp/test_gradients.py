"""Gradients of shards, averaged over nodes in FSDP2's hook: beside native HSDP and DDP, and nothing is lost."""

from pathlib import Path
from typing import Any

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
from tests.fsdp.test_trainer import fitted, fsdp, module
from tests.helpers.distributed import RunRanks, run_ranks
from tests.helpers.lines import Lines, raised
from tests.strategy.trainers import lightning_of, ours, plain_module
from tests.updates.runs import adamw, mean_over_nodes, sgd

FLAVOUR = "pytorch_lightning"


def three_ways(_: None) -> tuple[Tensor, Tensor, Tensor]:
    """The hook with everything sent, native HSDP, DDP: the same model and batches."""
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


def test_everything_sent_is_native_hsdp() -> None:
    for mine, native, ddp in run_ranks(three_ways, None, nodes=2, devices=2):
        assert torch.equal(mine, native)
        torch.testing.assert_close(mine, ddp, rtol=1e-5, atol=1e-6)


def gradients_of(model: Any) -> Tensor:
    return torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]).double()


def balances(net: type[nn.Module], steps: int) -> list[tuple[Tensor, float, float]]:
    ways: list[dict[str, Any]] = [{"exchange": "sparse", "density": 0.05}, {"exchange": "dense16"}]
    return [balance(options, net, steps) for options in ways]


def balance(options: dict[str, Any], net: type[nn.Module], steps: int) -> tuple[Tensor, float, float]:
    """Steps of two micro-batches: the weights, how far applied + residual is off the gradients, and residuals."""
    topology = discover()
    model = shard(net(topology.rank), mesh_of(topology))  # type: ignore[call-arg]
    gradients = ShardedGradients(model, ExchangeConfig(**options), topology)
    alone = shard(net(), mesh_of(topology))  # its gradients stay inside the node
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


@pytest.mark.parametrize(
    ("nodes", "devices", "net", "steps"),
    [
        (3, 1, Blocks, 8),
        (2, 2, Attention, 6),
        *(
            pytest.param(*case, 50, marks=pytest.mark.slow)
            for case in ((2, 2, Blocks), (3, 1, Blocks), (2, 2, Attention))
        ),
    ],
)
def test_nothing_is_lost(nodes: int, devices: int, net: type[nn.Module], steps: int) -> None:
    everyone = run_ranks(balances, net, steps, nodes=nodes, devices=devices)
    for results in zip(*everyone, strict=True):
        for weights, off, left in results:
            assert torch.equal(weights, results[0][0])
            assert off < 1e-4
            assert left > 0


def attention(seed: int = 0) -> Any:
    class Module(type(plain_module(FLAVOUR, Attention(seed), by_step=True))):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def state_of(trainer: Any) -> Tensor:
    """All weights and buffers."""
    buffers = [each.flatten().float() for each in trainer.lightning_module.buffers()]
    return torch.cat([whole(trainer.lightning_module), *buffers]).clone()


def saved_and_resumed(folder: str, options: dict[str, Any]) -> tuple[Tensor, Tensor, bool, dict[str, float]]:
    reports = ours(FLAVOUR).CommStatsCallback()
    saver = lightning_of(FLAVOUR).callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=6, save_top_k=-1)
    given = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    begin = fsdp(FLAVOUR, **options)
    t = fitted(FLAVOUR, begin, attention(), callbacks=[saver, reports], enable_checkpointing=True, **given)
    logged = {name: float(value) for name, value in t.callback_metrics.items() if name.startswith("comm/")}
    ends, left = state_of(t), [each.residual_S for each in begin.engine.managed]
    resumed = fitted(FLAVOUR, fsdp(FLAVOUR, **options), attention(5), f"{folder}/step=6.ckpt", **given)
    t.fit(t.lightning_module)  # of no step
    kept = all(one is each.residual_S for one, each in zip(left, begin.engine.managed, strict=True))
    return ends, state_of(resumed), kept, logged


def test_a_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    many: dict[str, Any] = {"nodes": 2, "devices": 2, "timeout": 120, "init": False}
    results = run_ranks(saved_and_resumed, str(tmp_path), {"send": "gradients", "exchange": "sparse"}, **many)
    for ends, resumed, kept, logged in results:
        assert torch.equal(ends[: -2 * 12 - 1], results[0][0][: -2 * 12 - 1]), "but for the statistics of each rank"
        assert torch.equal(ends, resumed)
        assert kept, "residuals of a second fit"
        assert 0 < logged["comm/density"] < 0.1
        assert logged["comm/bytes_between_nodes"] > 0
        assert logged["comm/residual_norm"] > 0


def residuals(folder: str, begin: int | None, end: int) -> dict[str, Tensor]:
    """The mean over nodes of all residuals, as resumed and at the end."""
    found = {}

    class Look(lightning_of(FLAVOUR).Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, trained: Any, *_: Any) -> None:
            if trainer.global_step not in (begin, end):
                return
            total = torch.zeros(2, dtype=torch.float64)
            for managed in trainer.strategy.engine.managed:
                if managed.residual_S is not None:
                    total += torch.stack([managed.residual_S.double().sum(), (managed.residual_S.double() * 3).sum()])
            dist.all_reduce(total)
            found[str(trainer.global_step)] = total / trainer.strategy.engine.topology.num_nodes
            if trainer.global_step == end:
                trainer.save_checkpoint(f"{folder}/{end}.ckpt")

    path = None if begin is None else f"{folder}/{begin}.ckpt"
    options = {"callbacks": [Look()], "max_steps": end + 1}
    fitted(FLAVOUR, fsdp(FLAVOUR, send="gradients"), module(FLAVOUR, 3), path, **options)
    return found


@pytest.mark.slow
def test_on_another_cluster_the_mean_of_residuals_stays(tmp_path: Path) -> None:
    many: dict[str, Any] = {"timeout": 120, "init": False}
    before = run_ranks(residuals, str(tmp_path), None, 4, nodes=2, devices=2, **many)[0]
    assert before["4"].abs().max() > 0
    for (nodes, devices), begin in (((4, 1), 4), ((2, 1), 7)):
        after = run_ranks(residuals, str(tmp_path), begin, begin + 3, nodes=nodes, devices=devices, **many)
        torch.testing.assert_close(after[0][str(begin)], before[str(begin)], rtol=1e-5, atol=1e-9)
        before = after[0]


def swapped(_: None) -> str:
    """Parameters are frozen and unfrozen within the fit, as many as were."""
    topology = discover()
    model = shard(Blocks(), mesh_of(topology))
    model.blocks[0][0].requires_grad_(False)
    ShardedGradients(model, ExchangeConfig(exchange="dense"), topology)
    model.blocks[0][0].requires_grad_(True)
    model.blocks[0][2].requires_grad_(False)
    return raised(loss_of(model, 0, topology.rank).backward)


def test_freezing_within_a_fit_is_refused() -> None:
    for said in run_ranks(swapped, None, nodes=2, devices=1):
        assert "was frozen or unfrozen during the fit" in said
        assert "send='updates'" in said


def test_an_exchange_that_measures_is_refused() -> None:
    with pytest.raises(ValueError, match="needs DDP's buckets"):
        ShardedGradients(Blocks(), ExchangeConfig(), Topology(((0,), (1,)), 0))


def kept_memory() -> tuple[int, int]:
    """How many gradients were dropped in the hook, and of how many the allocator was told before."""
    model, topology = Blocks(), discover()
    model = shard(model, mesh_of(topology))
    gradients = ShardedGradients(model, ExchangeConfig(exchange="dense"), topology)
    told: set[int] = set()
    fsdp_module.record_stream_use = lambda tensor: told.add(tensor.data_ptr())  # type: ignore[assignment]
    with gradients.accumulating():
        loss_of(model, 0, dist.get_rank()).backward()
    dropped = {
        local_of(p.grad).data_ptr() for p in model.parameters() if p.grad is not None and local_of(p.grad).numel()
    }
    loss_of(model, 1, dist.get_rank()).backward()
    return len(dropped), len(dropped & told)


def test_the_allocator_is_told_of_gradients_that_the_hook_drops(ranks: RunRanks) -> None:
    """On CUDA their memory belongs to another stream, whose next reduce-scatter could take it too early."""
    for dropped, told in ranks(kept_memory, nodes=2, devices=2):
        assert dropped > 0
        assert told == dropped


def defaults_in_a_trainer() -> tuple[list[str], list[float], str]:
    """Lines of a run with AdamW at the defaults, and the density of each step."""
    densities, pl, lines = list[float](), lightning_of(FLAVOUR), Lines()

    class Note(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            densities.append(trainer.strategy.engine.exchange.stats.density)

    strategy = ours(FLAVOUR).MSTopKFSDPStrategy(send="gradients", density=0.05)
    fitted(FLAVOUR, strategy, max_steps=80, callbacks=[Note()])
    return lines.lines, densities, strategy.config.value_dtype


def test_fsdp_gradients_by_default_warm_up_in_bfloat16_and_warn_of_adamw() -> None:
    said, densities, dtype = run_ranks(defaults_in_a_trainer, nodes=2, devices=1, timeout=120, init=False)[0]
    assert dtype == "bfloat16"
    assert any("AdamW divides by the size of recent gradients" in line for line in said)
    assert any(line.startswith("density warm-up ends at round 4 or epoch 4") for line in said)
    assert densities[0] > densities[1] > densities[2] > densities[3] > densities[4] == densities[-1]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({}, "2bit"), ({"send": "gradients"}, "bfloat16"), ({"send": "gradients", "value_dtype": "2bit"}, "2bit")],
)
def test_fsdp_value_dtype_default_depends_on_send(options: dict[str, Any], dtype: str) -> None:
    assert fsdp(FLAVOUR, **options).config.value_dtype == dtype


def test_fsdp_warmup_of_updates_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup_steps=3 applies to gradients, but send='updates'"):
        fsdp(FLAVOUR, warmup_steps=3)
