"""Features that users combine with a sharded model under `MSTopKFSDPStrategy`, and modules that it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_sparse.fsdp import blocks, mesh_of, shard
from lightning_sparse.topology import discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from tests.fsdp.runs import Blocks, loss_of, whole
from tests.fsdp.test_trainer import fitted, fsdp, module
from tests.helpers.lines import raised
from tests.helpers.scenarios import Scenarios
from tests.helpers.training import results_in_one_start
from tests.strategy.trainers import lightning_of, ours, plain_module
from tests.updates.runs import adamw

PACKAGE = "pytorch_lightning"


SCENARIOS = Scenarios()
results = results_in_one_start(SCENARIOS, devices=2, timeout=200)
Results = list[dict[str, Any]]


class Checkpointed(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.last(x)
        return out


def by_hand(configure: Callable[[Any], None]) -> Any:
    """Return a module with this ``configure_model``."""

    class ByHand(type(module(PACKAGE))):  # type: ignore[misc]
        def configure_model(self) -> None:
            configure(self)

    return ByHand()


def on_meta(trained: Any) -> None:
    if not hasattr(trained, "sharded"):
        with torch.device("meta"):
            trained.net = Blocks()
        trained.sharded = shard(trained.net, trained.device_mesh["shard"])


def offloaded(trained: Any) -> None:
    options = {"mesh": trained.device_mesh["shard"], "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for block in trained.net.blocks:
        fully_shard(block, **options)
    fully_shard(trained.net, **options)


def compiled(trained: Any) -> None:
    for block in trained.net.blocks:
        block.compile(backend="aot_eager")
    shard(trained.net, trained.device_mesh)


def frozen(trained: Any) -> None:
    trained.net.first.requires_grad_(False)
    shard(trained.net, trained.device_mesh)


def with_activation_checkpoints(trained: Any) -> None:
    trained.net = shard(Checkpointed(), trained.device_mesh)


def two_optimizers() -> Any:
    class Two(type(plain_module(PACKAGE, Blocks()))):  # type: ignore[misc]
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            halves = list(self.net.first.parameters()), [*self.net.blocks.parameters(), *self.net.last.parameters()]
            return torch.optim.AdamW(halves[0], lr=0.01), torch.optim.SGD(halves[1], lr=0.01, momentum=0.9)

        def training_step(self, batch: Tensor, _: int) -> None:
            optimizers = self.optimizers()
            for each in optimizers:
                each.zero_grad()
            self.manual_backward(loss_of(self.net, self.trainer.global_step, self.global_rank))
            for each in optimizers:
                each.step()

    return Two()


CONFIGURED = {
    "meta": on_meta, "offload": offloaded, "compile": compiled, "frozen": frozen,
    "activation checkpoints": with_activation_checkpoints,
}  # fmt: skip


@SCENARIOS.slow
def everything(_: str) -> dict[str, list[Tensor]]:
    """Return the weights before and after fits in which each rank starts with different weights."""
    found = {}
    for name in (*CONFIGURED, "two optimizers"):
        torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
        trained = two_optimizers() if name == "two optimizers" else by_hand(CONFIGURED[name])
        began: list[Tensor] = []

        class Begin(lightning_of(PACKAGE).Callback):  # type: ignore[misc]
            def on_train_start(self, trainer: Any, trained: Any) -> None:
                began.append(whole(trained).clone())  # noqa: B023

        fitted(PACKAGE, fsdp(PACKAGE), trained, callbacks=[Begin()], max_steps=8)
        found[name] = [began[0], whole(trained).clone()]
    return found


@pytest.mark.slow
def test_fsdp_with_features_of_users_keeps_ranks_equal(results: Results) -> None:
    everyone = [each["everything"] for each in results]
    for name, (began, ended) in everyone[0].items():
        assert not torch.equal(began, ended), name
        for other in everyone:
            assert torch.equal(other[name][0], began), name
            assert torch.equal(other[name][1], ended), name
    began, ended = everyone[0]["frozen"]
    assert torch.equal(began[: 13 * 11], ended[: 13 * 11])


@SCENARIOS.add
def with_a_teacher(folder: str) -> dict[str, list[Tensor]]:
    """Train with a sharded teacher that follows each node's own model, and resume halfway."""
    found: dict[str, list[Tensor]] = {"validated": [], "ended": []}

    class Taught(type(module(PACKAGE))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.teacher = Blocks(7).requires_grad_(False)

        @torch.no_grad()
        def on_after_backward(self) -> None:
            for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mine.lerp_(other, 0.1)

        def on_validation_end(self) -> None:
            found["validated"].append(whole(self.teacher).clone())

    saver = lightning_of(PACKAGE).callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    options: dict[str, Any] = {"max_steps": 8, "callbacks": [saver], "enable_checkpointing": True}
    options |= {"limit_val_batches": 1, "val_check_interval": 4, "check_val_every_n_epoch": None}
    for path in (None, f"{folder}/step=4.ckpt"):
        trained = Taught()
        fitted(PACKAGE, fsdp(PACKAGE), trained, path, **options)
        found["ended"].append(whole(trained).clone())
    return found


def test_fsdp_teacher_that_no_optimizer_steps_is_averaged_and_resumed(results: Results) -> None:
    first = results[0]["with_a_teacher"]
    for found in (each["with_a_teacher"] for each in results):
        assert torch.equal(found["ended"][0], found["ended"][1]), "resumed"
        assert torch.equal(found["ended"][0], first["ended"][0])
        assert all(map(torch.equal, found["validated"], first["validated"]))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(13, 13), nn.Linear(13, 13)
        self.last.weight = self.first.weight


@SCENARIOS.add
def refusals(_: str) -> dict[str, str]:
    found = {}

    class Own(type(module(PACKAGE))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    class Sharing(type(module(PACKAGE))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            both = Tied()
            self.first, self.last = both.first, both.last

    for name, trained in (("own", Own()), ("tied", Sharing())):
        found[name] = raised(fitted, PACKAGE, fsdp(PACKAGE), trained)
        assert "configure_model" in found[name]
    topology = discover()
    mesh = mesh_of(topology)
    over_the_world = Blocks()
    fully_shard(over_the_world, mesh=mesh)
    columns = nn.Linear(12, 12, bias=False)
    fully_shard(columns, mesh=mesh["shard"], shard_placement_fn=lambda _: torch.distributed.tensor.Shard(1))
    partly = Blocks()
    fully_shard(partly.blocks[0], mesh=mesh["shard"])
    for name, model in (("world", over_the_world), ("columns", columns), ("partly", partly)):
        found[name] = raised(LocalUpdates, model, adamw(model), UpdatesConfig(), topology)
        assert "shards along dim 0" in found[name]
    return found


def test_fsdp_modules_that_cannot_be_sharded_are_refused(results: Results) -> None:
    for found in (each["refusals"] for each in results):
        assert "has parameters of its own" in found["own"]
        assert "has children that share parameters" in found["tied"]
        assert "over a mesh of 2 axes" in found["world"]
        assert "is placed as" in found["columns"]
        assert "is not sharded, and others are" in found["partly"]


def test_fsdp_options_that_the_strategy_sets_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size=2 cannot be combined.*Omit it\. To define nodes, use node_name\.$"
    ):
        fsdp(PACKAGE, tensor_parallel_size=2)
    for kind in (ours(PACKAGE).MSTopKFSDPStrategy, ours(PACKAGE).MSTopKElasticFSDPStrategy):
        with pytest.raises(ValueError, match="has no option.*find_unused_parameters.*its base class in Lightning"):
            kind(find_unused_parameters=True)


def test_blocks_are_the_repeated_modules() -> None:
    model = nn.ModuleDict({"body": Blocks(), "one": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU())})
    assert list(blocks(model)) == list(model["body"].blocks)
