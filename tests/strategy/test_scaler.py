"""16-bit mixed precision with a loss scaler, on real ranks: an inf on one rank must leave no trace."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.strategy import HierConfig
from tests.helpers.distributed import RunRanks, run_ranks
from tests.strategy.models import flat_grads, flat_parameters, loss_of, mlp, node_residual, sum_over_nodes, wrap
from tests.strategy.trainers import plain_module, sparse, trainer, weights

BAD_STEPS = (5, 6, 9)


@pytest.mark.parametrize(("exchange", "fused"), [("sparse", False), ("sparse", True), ("dense16", False)])
@pytest.mark.parametrize(("nodes", "devices"), [(2, 2), (3, 1)])
def test_a_skipped_step_leaves_everything_as_it_was(
    ranks: RunRanks, nodes: int, devices: int, exchange: str, fused: bool
) -> None:
    everyone = ranks(skip_steps, exchange, fused, nodes=nodes, devices=devices)
    for each in everyone:
        assert each["skipped"] == list(BAD_STEPS)
        assert each["unchanged"] == [True] * len(BAD_STEPS), "parameters, optimizer state or residual changed"
        assert each["scale"] == everyone[0]["scale"]
        assert torch.equal(each["weights"], everyone[0]["weights"])
        torch.testing.assert_close(each["given"], each["accounted"], rtol=1e-4, atol=2e-5)


def skip_steps(exchange: Any, fused: bool) -> dict[str, Any]:
    """fp32 model with a scaler; the inf comes on one rank, in the parameter whose bucket is reduced last."""
    model = mlp()
    config = HierConfig(density=0.05, exchange=exchange, warmup_epochs=0, value_dtype="float32")
    ddp, state = wrap(model, config, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    state.loss_scale = scaler._get_scale_async
    state.watch([optimizer])
    skipped, unchanged = [], []
    given = torch.zeros_like(flat_parameters(model)).double()
    applied = given.clone()
    for step in range(12):
        bad = step in BAD_STEPS
        mean = mean_gradient(model, step)
        optimizer.zero_grad()
        state.before_backward()
        before, scale = snapshot(model, optimizer, state), scaler.get_scale()
        loss = loss_of(ddp, step, dist.get_rank())
        if bad and dist.get_rank() == 1:
            loss = loss + float("inf") * model[0].weight.flatten()[7]
        scaler.scale(loss).backward()
        grads = flat_grads(model).double() / scale
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped.append(step)
        if bad:
            optimizer.zero_grad()
            state.before_backward()
            unchanged.append(
                all(torch.equal(a, b) for a, b in zip(before, snapshot(model, optimizer, state), strict=True))
            )
        else:
            given += mean
            applied += grads
    state.settle()
    accounted = applied + sum_over_nodes(node_residual(model, state), state)
    return {
        "skipped": skipped, "unchanged": unchanged, "scale": scaler.get_scale(), "weights": flat_parameters(model),
        "given": given, "accounted": accounted,
    }  # fmt: skip


def snapshot(model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: Any) -> list[Tensor]:
    momenta = [each["momentum_buffer"].clone() for each in optimizer.state.values() if "momentum_buffer" in each]
    return [flat_parameters(model), node_residual(model, state), *momenta]


def mean_gradient(model: torch.nn.Module, step: int) -> Tensor:
    copy = mlp()
    copy.load_state_dict(model.state_dict())
    loss_of(copy, step, dist.get_rank()).backward()
    local = flat_grads(copy).double()
    dist.all_reduce(local)
    return local / dist.get_world_size()


@pytest.mark.slow
def test_16_mixed_in_a_trainer() -> None:
    everyone = run_ranks(mixed_fit, nodes=2, devices=2, timeout=120, init=False)
    for each in everyone:
        assert torch.equal(each["weights"], everyone[0]["weights"])
        assert each["weights"].isfinite().all()
        assert each["scale"] == everyone[0]["scale"] < 2.0**16
        assert 0 < each["norm"] < 10, "a residual in scaled units would be thousands of times larger"


def mixed_fit() -> dict[str, Any]:
    from pytorch_lightning.plugins.precision import MixedPrecision

    module, strategy = plain_module("pytorch_lightning", by_step=True), sparse("pytorch_lightning")

    def overflow(_: Any, __: Any, out: Tensor) -> Tensor:
        return out * float("inf") if module.trainer.global_step == 5 and module.global_rank == 3 else out

    module.net.register_forward_hook(overflow)
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    trainer("pytorch_lightning", strategy, plugins=[precision]).fit(module)
    norm = float(strategy.hier_state.residual_norm())
    return {"weights": weights(module), "scale": precision.scaler.get_scale(), "norm": norm}
