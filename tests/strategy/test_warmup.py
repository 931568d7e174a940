"""The length of the warm-up in a Trainer, and changes between fits, on real ranks."""

import gc
import weakref
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.gradients.config import Warmup
from tests.helpers.distributed import run_ranks
from tests.helpers.lines import Lines
from tests.helpers.scenarios import Scenarios
from tests.helpers.training import results_in_one_start
from tests.strategy.models import mlp
from tests.strategy.test_fabric import fabric_with, prepared, train
from tests.strategy.test_fabric import ours as fabric_strategy
from tests.strategy.trainers import data, lightning_of, ours, plain_module, ranks, trainer


class Ordered:
    """Records the order in which data hooks are called, and the state that a loader restores."""

    def __init__(self) -> None:
        self.calls: list[str] = []


def module_with_late_data(seen: Ordered) -> Any:
    pl = lightning_of("pytorch_lightning")
    plain = plain_module("pytorch_lightning")

    class Loader(torch.utils.data.DataLoader[Tensor]):
        def state_dict(self) -> dict[str, int]:
            return {"position": 7}

        def load_state_dict(self, state: dict[str, int]) -> None:
            seen.calls.append(f"position {state['position']}")

    class Late(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = plain.net

        def on_fit_start(self) -> None:
            self.count = 96
            seen.calls.append("on_fit_start")

        def train_dataloader(self) -> Any:
            seen.calls.append("train_dataloader")
            return Loader(data(self.count).dataset, batch_size=4)  # type: ignore[arg-type]

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Late()


SCENARIOS = Scenarios()
results = results_in_one_start(SCENARIOS)
Results = list[dict[str, Any]]


@SCENARIOS.add
def fit_twice(folder: str) -> tuple[list[str], list[str], Warmup, list[str]]:
    lines, first, second = Lines().lines, Ordered(), Ordered()
    strategy = ours("pytorch_lightning").MSTopKHierStrategy(exchange="sparse")
    t = trainer("pytorch_lightning", strategy, max_steps=-1, max_epochs=2, **ranks())
    t.fit(module_with_late_data(first))
    plain = trainer("pytorch_lightning", "ddp", max_steps=6, max_epochs=-1, **ranks())
    plain.fit(module_with_late_data(Ordered()))
    plain.save_checkpoint(f"{folder}/plain.ckpt")
    again = ours("pytorch_lightning").MSTopKHierStrategy(exchange="sparse")
    resumed = trainer("pytorch_lightning", again, max_steps=8, max_epochs=3, **ranks())
    resumed.fit(module_with_late_data(second), ckpt_path=f"{folder}/plain.ckpt")
    return first.calls, second.calls, strategy.engine.warmup, [line for line in lines if "warm-up ends" in line]


def test_warmup_length_is_set_once_the_data_is_loaded(results: Results) -> None:
    """The warm-up takes 5% of the 24 steps of each rank."""
    for rank, found in enumerate(each["fit_twice"] for each in results):
        first, second, warmup, lines = found
        assert first[:2] == ["on_fit_start", "train_dataloader"], "the order of plain DDP"
        assert "position 7" in second, "a checkpoint of plain DDP contains the loader's position"
        assert warmup == Warmup(4, 2)
        assert len(lines) == (2 if rank == 0 else 0)


@SCENARIOS.add
def fit_and_forget(_: str) -> tuple[int, int]:
    strategy = ours("pytorch_lightning").MSTopKHierStrategy(exchange="sparse", warmup_epochs=0)
    t = trainer("pytorch_lightning", strategy, max_steps=0, **ranks())
    modules, states = [], []
    for _ in range(3):
        t.fit_loop.epoch_loop.max_steps += 4
        modules.append(plain_module("pytorch_lightning", mlp()))
        t.fit(modules[-1])
        states.append(weakref.ref(strategy.engine))
    modules.clear()
    gc.collect()
    return len(strategy._gradients.optimizers_by_state), sum(state() is not None for state in states)


def test_strategy_keeps_only_the_state_of_its_last_module(results: Results) -> None:
    assert [each["fit_and_forget"] for each in results] == [(1, 1)] * 2


def swap() -> tuple[bool, list[str]]:
    fabric = fabric_with("lightning_fabric", fabric_strategy("lightning_fabric", exchange="auto", inter_gbps=1e-3))
    model, _ = prepared(fabric)
    (state,) = fabric.strategy.engines
    kept = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.01))
    before = state.exchange.choice.forbid_sparse
    sgd = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.01))
    if fabric.global_rank:
        del kept
        gc.collect()
    train(fabric, model, sgd, 0, 5)
    assert before
    return state.exchange.choice.forbid_sparse, [state.path(group).name for group in state.layout.settled]


def test_replaced_optimizer_does_not_decide_the_path() -> None:
    """The path must not depend on which optimizers are still alive, because that may differ by rank."""
    assert run_ranks(swap, nodes=2, devices=2, timeout=120, init=False) == [(False, ["sparse"])] * 4
