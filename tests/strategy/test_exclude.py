"""Excluded parameters are reduced densely in every round, without a residual."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.exchange import TensorSpec
from lightning_sparse.exchange.paths import Dense, Sparse, num_selected
from lightning_sparse.gradients import HierConfig, HierState
from lightning_sparse.gradients.groups import Layout, ParamGroup, excluded_names
from lightning_sparse.kernels import message_bytes
from lightning_sparse.topology import discover
from tests.helpers.distributed import RunRanks
from tests.strategy.models import (
    backward,
    go_on,
    loss_of,
    mlp,
    node_residual,
    save,
    sum_over_nodes,
    wrap,
)

SPARSE: dict[str, Any] = {"density": 0.03, "exchange": "sparse", "value_dtype": "float32", "warmup_epochs": 0}
BIASES = {"0.bias", "2.bias", "4.bias"}


# -- selection by name -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exclude", ["vector", "", (), ("",), ["*.bias"], (1,), None])
def test_exclude_with_invalid_value_is_refused(exclude: Any) -> None:
    with pytest.raises(ValueError, match=r"exclude=.* must be 'none', 'vectors'"):
        HierConfig(exclude=exclude)


def test_excluded_names_are_found_by_dimension_and_pattern() -> None:
    assert excluded_names(mlp(), "none") == frozenset()
    assert excluded_names(mlp(), "vectors") == BIASES
    assert excluded_names(mlp(), ("*.bias", "4.*")) == BIASES | {"4.weight"}
    norms = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))
    assert excluded_names(norms, "vectors") == {"1.weight", "1.bias"}


def test_exclude_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'bias' matches none of the module's 6 parameters.*'0.weight'"):
        excluded_names(mlp(), ("*.bias", "bias"))


def test_bucket_is_split_into_excluded_and_other_parameters() -> None:
    bucket = ParamGroup(("d", "c", "b", "a"), (1, 2, 3, 4))
    layout = Layout(excluded=frozenset({"d", "b"}))
    rest, excluded = ParamGroup(("c", "a"), (2, 4)), ParamGroup(("d", "b"), (1, 3))
    for _ in range(2):
        assert layout.groups_in(bucket) == (bucket,), "split before the layout is settled"
        layout.record(bucket)
        layout.end_round()
    assert layout.groups_in(bucket) == layout.settled == (rest, excluded)
    assert [layout.is_excluded(group) for group in (bucket, rest, excluded)] == [False, False, True]
    assert layout.split_excluded((rest, excluded)) == (rest, excluded)


# -- reduction ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "devices", "exchange"), [(2, 2, "sparse"), (3, 1, "regional"), (2, 2, "dense16")])
def test_excluded_gradients_equal_ddp(ranks: RunRanks, nodes: int, devices: int, exchange: str) -> None:
    for each in ranks(beside_ddp, exchange, nodes=nodes, devices=devices):
        for name, (ours, plain) in each["grads"].items():
            same = torch.allclose(ours, plain, rtol=1e-5, atol=1e-7)
            assert same == (name in BIASES), name
        assert each["with residual"] == {"0.weight", "2.weight", "4.weight"}


def beside_ddp(exchange: str) -> dict[str, Any]:
    ours, plain = mlp(), mlp()
    config = HierConfig(**{**SPARSE, "exchange": exchange}, exclude="vectors")
    ddp, state = wrap(ours, config, bucket_cap_mb=0.002)
    reference = DistributedDataParallel(plain)
    for step in range(6):
        for model, wrapped in ((ours, ddp), (plain, reference)):
            model.zero_grad()
            loss_of(wrapped, step, dist.get_rank()).backward()
    state.commit_round()
    grads = {n: (p.grad, q.grad) for (n, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True)}
    return {"grads": grads, "with residual": {name for group in state.store.committed for name in group.names}}


def test_bytes_of_excluded_parameters_are_counted(ranks: RunRanks) -> None:
    ranks(count_bytes, nodes=2, devices=2)


def count_bytes() -> None:
    model = mlp()
    ddp, state = wrap(model, HierConfig(**SPARSE, exclude="vectors"))
    backward(ddp, range(4))
    weights, biases = (13 * 37 + 37 * 29 + 29 * 5 + 1) // 2, (37 + 29 + 5 + 1) // 2  # shards
    k = num_selected(0.03, weights)
    sparse = Sparse(TensorSpec(2, 1, weights), k, torch.float32).bytes()
    assert sparse == message_bytes(weights, k, torch.float32)
    assert state.exchange.stats.round_bytes == sparse + Dense(TensorSpec(2, 1, biases)).bytes()
    assert state.exchange.stats.density == pytest.approx((k + biases) / (weights + biases))


def test_dense_buckets_are_not_split(ranks: RunRanks) -> None:
    assert ranks(groups_when_dense, nodes=2, devices=1) == [1, 1]


def groups_when_dense() -> int:
    ddp, state = wrap(mlp(), HierConfig(exchange="dense", exclude="vectors"))
    backward(ddp, range(3))
    return len(state.layout.settled)


@pytest.mark.parametrize("exchange", ["sparse", "dense16"])
def test_excluded_parameter_without_elements_sends_nothing(ranks: RunRanks, exchange: str) -> None:
    assert ranks(beside_nothing, exchange, nodes=2, devices=1) == [{"dense", exchange}] * 2


def beside_nothing(exchange: str) -> set[str]:
    model = mlp()
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    ddp, state = wrap(model, HierConfig(**{**SPARSE, "exchange": exchange}, exclude=("empty",)))
    for step in range(4):
        (loss_of(ddp, step, dist.get_rank()) + model.empty.sum()).backward()
    return set(state.exchange.stats.paths)


# -- resume ------------------------------------------------------------------------------------------------------------


def test_residual_of_a_parameter_excluded_on_resume_is_sent(ranks: RunRanks, tmp_path: Path) -> None:
    for before, after, waiting in ranks(exclude_on_resume, str(tmp_path / "run.ckpt"), nodes=2, devices=2):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-7)
        assert waiting == {"0.weight", "2.weight", "4.weight"}


def exclude_on_resume(path: str) -> tuple[Tensor, Tensor, set[str]]:
    """Gradients are zero after the resume, so all applied or pending values come from the saved residual."""
    model = mlp()
    ddp, state = wrap(model, HierConfig(**SPARSE))
    steps(model, ddp, range(6), lr=0.0)
    state.commit_round()
    save(state, path)
    before = sum_over_nodes(node_residual(model, state), state)
    again = mlp()
    fresh = HierState(again, HierConfig(**SPARSE, exclude="vectors"), discover())
    go_on(fresh, path)
    ddp, _ = wrap(again, fresh.config, state=fresh)
    (0.0 * loss_of(ddp, 0, dist.get_rank())).backward()
    applied = torch.cat([p.grad.flatten() for p in again.parameters() if p.grad is not None])
    fresh.commit_round()
    waiting = {name for group in fresh.store.committed for name in group.names}
    return before, applied + sum_over_nodes(node_residual(again, fresh), fresh), waiting


def steps(model: nn.Module, ddp: nn.Module, which: range, lr: float = 0.1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in which:
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        optimizer.step()
