"""The sharded step joined with the reduction: the run without it, on 2 nodes x 2 devices in a real Trainer."""

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sparse.exchange.communicator import HierCommunicator
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.helpers.lines import Lines
from tests.helpers.scenarios import Scenarios, returned
from tests.pto.steps import same
from tests.strategy.trainers import lightning_of, ours, plain_module, sparse, trainer, weights

STEPS = 12
FLAVOUR = "pytorch_lightning"


def module_with(make: Any, **overrides: Any) -> Any:
    """Trains by the global step, so that runs see the same batches; a parameter in float64 is among the others."""
    base = type(plain_module(FLAVOUR, by_step=True))

    class Module(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return super().training_step(batch, index) + (self.extra * 1e-3).sum().float()

        def configure_optimizers(self) -> Any:
            return make(self.parameters())

    return type("Variant", (Module,), overrides)()


def fit(make: Any, pto: bool, resume: str | None = None, steps: int = STEPS, **options: Any) -> Any:
    callback = ours(FLAVOUR).PTOCallback("node")
    strategy = options.pop("strategy", None) or sparse(FLAVOUR)
    overrides = options.pop("overrides", {})
    was = WasJoined()
    callbacks = [*options.pop("callbacks", []), was, *([callback] if pto else [])]
    t = trainer(FLAVOUR, strategy, max_steps=steps, max_epochs=-1, callbacks=callbacks, **options)
    module = module_with(make, **overrides)
    t.fit(module, ckpt_path=resume)
    optimizer = t.optimizers[0]
    if pto and callback.steps[0].sharing:
        optimizer.consolidate_state_dict()
    state = optimizer.state_dict() if dist.get_rank() == 0 or not pto else {}
    leave_groups(t)
    return {
        "weights": weights(module),
        "state": state,
        "residual": residual_of(t),
        "pto": callback,
        "trainer": t,
        "joined": was.steps,
    }


def leave_groups(t: Any) -> None:
    """torch keeps groups and their threads until it is told; so many fits in one process would get slower each."""
    state = getattr(t.strategy, "hier_state", None)
    dist.barrier()
    for name in ("world", "intra", "inter", "outward") if state else ():
        dist.destroy_process_group(getattr(state.topology, name))


class WasJoined:
    """Counts the steps that a device took on the shards it holds."""

    def __new__(cls) -> Any:
        def on_train_batch_end(self: Any, t: Any, *_: Any) -> None:
            state = getattr(t.strategy, "hier_state", None)
            self.steps += bool(state and state.kept_sharded)

        members = {"on_train_batch_end": on_train_batch_end, "steps": 0}
        return type("WasJoined", (lightning_of(FLAVOUR).Callback,), members)()


def residual_of(t: Any) -> dict[Any, Tensor]:
    state = getattr(t.strategy, "hier_state", None)
    if state is None:
        return {}
    state.settle()
    return {group.names: shard for group, shard in state.store.current.items()}


def difference(make: Any, **options: Any) -> str:
    made = {name: value if callable(value) else (lambda value=value: value) for name, value in options.items()}
    plain, joined = (fit(make, pto, **{name: value() for name, value in made.items()}) for pto in (False, True))
    wrong = [] if joined["joined"] > STEPS // 2 and not plain["joined"] else [f"joined in {joined['joined']} steps"]
    worst = float((plain["weights"] - joined["weights"]).abs().max())
    wrong += [f"weights by {worst:.1e}"] if worst else []
    wrong += [] if dist.get_rank() or same(plain["state"], joined["state"]) else ["state"]
    wrong += [] if same(plain["residual"], joined["residual"]) else ["residual"]
    return ", ".join(wrong)


def momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01, foreach=True)


ELEMENTWISE = {
    "Nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "decoupled_weight_decay": True}),
}


def scheduled(parameters: Any) -> Any:
    """Two groups of parameters, and rates and momentum that change by step."""
    params = list(parameters)
    optimizer = torch.optim.AdamW([{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:]}], lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.01], total_steps=STEPS)
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fused(parameters: Any) -> Any:
    return torch.optim.SGD([p for p in parameters if p.dtype == torch.float32], lr=0.1, momentum=0.9, fused=True)


SCENARIOS = Scenarios()
scenario = SCENARIOS.add


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    folder, wanted = tmp_path_factory.mktemp("joined"), SCENARIOS.wanted(request)
    return run_ranks(run_scenarios, wanted, str(folder), nodes=2, devices=2, timeout=250, init=False)


def run_scenarios(scenarios: dict[str, Any], folder: str) -> dict[str, Any]:
    os.chdir(folder)
    warnings.simplefilter("ignore")
    return returned(scenarios)


@scenario
def same_bits() -> dict[str, str]:
    return {
        "SGD": difference(momentum),
        "AdamW": difference(adamw),
        "some of a bucket": difference(all_but_one, strategy=lambda: sparse(FLAVOUR, density=0.02)),
    }


@SCENARIOS.slow
def more_same_bits() -> dict[str, str]:
    averaging = lightning_of(FLAVOUR).callbacks.EMAWeightAveraging
    known = {name: difference(lambda p, c=cls, g=given: c(p, **g)) for name, (cls, given) in ELEMENTWISE.items()}
    return {
        **known,
        "excluded parameters": difference(momentum, strategy=lambda: sparse(FLAVOUR, exclude="vectors")),
        "one by one": difference(lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False)),
        "groups and scheduler": difference(scheduled),
        "average of weights": difference(momentum, callbacks=lambda: [averaging(decay=0.9)]),
        "accumulation": difference(momentum, accumulate_grad_batches=2),
        "bf16-mixed": difference(adamw, precision="bf16-mixed"),
        "clipping by value": difference(momentum, gradient_clip_val=0.01, gradient_clip_algorithm="value"),
        "several buckets, auto": difference(
            momentum, strategy=lambda: sparse(FLAVOUR, exchange="auto", inter_gbps=100.0)
        ),
        "dense": difference(adamw, strategy=lambda: sparse(FLAVOUR, exchange="dense")),
        "dense16": difference(adamw, strategy=lambda: sparse(FLAVOUR, exchange="dense16")),
        "some": difference(some, strategy=lambda: sparse(FLAVOUR, density=0.02)),
        "more and more": difference(some, callbacks=lambda: [Unfreeze()]),
        "unused": difference(momentum, strategy=lambda: sparse(FLAVOUR, find_unused_parameters=True)),
    }


def some(parameters: Any) -> Any:
    """The others require gradients, and nobody steps them."""
    return torch.optim.SGD(list(parameters)[3:], lr=0.1, momentum=0.9)


def all_but_one(parameters: Any) -> Any:
    """The other's bucket is gathered, those of the rest are not."""
    return torch.optim.SGD(list(parameters)[:-1], lr=0.1, momentum=0.9)


class Unfreeze:
    """Gives the optimizer the rest in the middle of the run."""

    def __new__(cls) -> Any:
        def on_train_batch_start(self: Any, t: Any, module: Any, *_: Any) -> None:
            if t.global_step == 6:
                t.optimizers[0].add_param_group({"params": list(module.parameters())[:3]})

        return type("Unfreeze", (lightning_of(FLAVOUR).Callback,), {"on_train_batch_start": on_train_batch_start})()


@pytest.mark.parametrize("name", ["same_bits", pytest.param("more_same_bits", marks=pytest.mark.slow)])
def test_the_run_is_the_run_without_it(results: list[dict[str, Any]], name: str) -> None:
    for each in results:
        assert set(each[name].values()) == {""}, each[name]


@SCENARIOS.slow
def close() -> float:
    """A fused kernel meets other boundaries."""
    plain, joined = (fit(fused, pto)["weights"] for pto in (False, True))
    return float((plain - joined).abs().max() / plain.abs().max())


@pytest.mark.slow
def test_fused_kernels_differ_by_rounding(results: list[dict[str, Any]]) -> None:
    assert all(each["close"] < 1e-6 for each in results)


class Counted:
    """Bytes that collectives inside the node bring to this rank."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __enter__(self) -> "Counted":
        self._kept = {name: getattr(HierCommunicator, name) for name in ("gather", "broadcast")}
        counted, kept = self, self._kept

        def gather(self: HierCommunicator, shard_S: Tensor, **options: bool) -> Tensor:
            counted.nbytes += (self.node.size - 1) * shard_S.nbytes
            return kept["gather"](self, shard_S, **options)

        def broadcast(self: HierCommunicator, tensor: Tensor, device_index: int) -> Any:
            counted.nbytes += tensor.nbytes * (device_index != self.node.place)
            return kept["broadcast"](self, tensor, device_index)

        HierCommunicator.gather, HierCommunicator.broadcast = gather, broadcast  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for name, method in self._kept.items():
            setattr(HierCommunicator, name, method)


@scenario
def traffic() -> dict[str, float]:
    """A step's bytes once everything has settled."""
    out = {}
    for name, pto in (("without", False), ("joined", True)):
        begins: list[int] = []
        with Counted() as counted:
            note = lightning_of(FLAVOUR).callbacks.LambdaCallback(
                on_train_batch_start=lambda *_, to=begins, counted=counted: to.append(counted.nbytes)
            )
            fit(momentum, pto, callbacks=[note], steps=17)
        out[name] = (begins[16] - begins[6]) / 10
    return out


def test_no_more_bytes_inside_the_node_than_without_it(results: list[dict[str, Any]]) -> None:
    for each in results:
        # Parts begin at multiples of 16 bytes, and the float64 parameter is reduced whole and now gathered.
        assert each["traffic"]["joined"] <= each["traffic"]["without"] + 8 * 16 + 24


@SCENARIOS.slow
def reasons() -> dict[str, str]:
    pl = lightning_of(FLAVOUR)

    class Looks(pl.Callback):  # type: ignore[misc, name-defined]
        def on_before_optimizer_step(self, *_: Any) -> None: ...

    def said(make: Any = momentum, pto: Any = None, **options: Any) -> str:
        lines = Lines()
        fit(make, True, steps=6, **options)
        return next((line for line in lines.lines if "joined with the reduction" in line), "")

    return {
        "joined": said(),
        "module": said(overrides={"on_after_backward": lambda self: None}),
        "callback": said(callbacks=[Looks()]),
        "keeps": said(overrides={"optimizer_zero_grad": lambda self, *_: self.zero_grad()}),
        "16 bit": said(precision="bf16-true"),
        "hook": said(hooked),
        "optimizer": said(lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01)),
        "dense": said(strategy="ddp"),
        "clipping": said(gradient_clip_val=0.05),
        "scaler": said(plugins=[pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]),
    }


def hooked(parameters: Any) -> Any:
    optimizer = momentum(parameters)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.slow
def test_what_rules_it_out_is_told(results: list[dict[str, Any]]) -> None:
    said = results[0]["reasons"]
    assert said["joined"] == "PTOCallback: joined with the reduction"
    assert "on_after_backward may read whole gradients" in said["module"]
    assert "Looks.on_before_optimizer_step may read" in said["callback"]
    assert "optimizer_zero_grad may read" in said["keeps"]
    assert "16-bit parameters" in said["16 bit"]
    assert "a hook of the optimizer's step" in said["hook"]
    assert "Muon is not known to be elementwise" in said["optimizer"]
    assert "no gradients are gathered" in said["dense"]
    assert "clipping by norm reads whole gradients" in said["clipping"]
    assert "a loss scaler looks for inf in whole gradients" in said["scaler"]


@scenario
def resumed() -> dict[str, bool]:
    """Joined -> plain -> joined, and a second fit without the callback."""
    whole = fit(adamw, False)
    first = fit(adamw, True, steps=5)
    first["trainer"].save_checkpoint("first.ckpt")
    second = fit(adamw, False, steps=9, resume="first.ckpt")
    second["trainer"].save_checkpoint("second.ckpt")
    third = fit(adamw, True, resume="second.ckpt")
    loaded = torch.load("second.ckpt", weights_only=True)
    return {
        "weights": torch.equal(whole["weights"], third["weights"]),
        "residual": same(whole["residual"], third["residual"]),
        "loads": bool(loaded["optimizer_states"]),
    }


def test_checkpoints_go_in_both_directions(results: list[dict[str, Any]]) -> None:
    for each in results:
        assert all(each["resumed"].values()), each["resumed"]


def test_a_rank_killed_while_parameters_travel_hangs_nobody(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(die_in_the_gather, str(tmp_path), nodes=2, devices=2, timeout=60, init=False)
    assert list(failed.value.killed) == [3]
    assert failed.value.hung == {}
    assert sorted([*failed.value.raised, *failed.value.stopped]) == [0, 1, 2]
    assert "while step 8 gathered the parameters" in failed.value.raised[2]


def die_in_the_gather(folder: str) -> None:
    os.chdir(folder)

    class Dies:
        def __new__(cls) -> Any:
            def on_train_batch_start(self: Any, t: Any, *_: Any) -> None:
                if t.global_step == 8 and t.global_rank == 3:
                    assert t.strategy.hier_state.kept_sharded
                    HierCommunicator.gather = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
                    HierCommunicator.broadcast = HierCommunicator.gather  # type: ignore

            return type("Dies", (lightning_of(FLAVOUR).Callback,), {"on_train_batch_start": on_train_batch_start})()

    fit(momentum, True, callbacks=[Dies()])
