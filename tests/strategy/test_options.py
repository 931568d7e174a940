"""Options that the strategy refuses, passes on, or warns about, without a fit."""

import copy
import re
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from lightning_sparse.checkpoint.side_files import EngineCheckpoint
from lightning_sparse.exchange import engine
from lightning_sparse.exchange.engine import Exchange
from lightning_sparse.kernels import KernelReport
from lightning_sparse.messages import LogOnce
from lightning_sparse.strategy import HierConfig, HierState
from lightning_sparse.strategy.options import bucket_cap_mb
from lightning_sparse.topology import Topology
from lightning_sparse.updates import LocalUpdates
from tests.helpers.distributed import run_ranks
from tests.strategy.trainers import PACKAGES, lightning_of, ours, plain_module

BAD: list[tuple[str, Any]] = [
    *(("density", value) for value in (0.0, 1.5, float("nan"), "0.1", True, None)),
    ("exchange", "sometimes"),
    ("value_dtype", "float16"),
    ("warmup_steps", -1),
    ("warmup_epochs", 1.5),
    ("inter_gbps", 0),
]
REFUSED: list[tuple[str, Any, str]] = [
    ("density", 0.0, r"density=0.0 must be a number in \(0, 1\]"),
    ("ddp_comm_hook", 1, "cannot be combined with MSTopKHierStrategy"),
    ("model_averaging_period", 2, "cannot be combined with MSTopKHierStrategy"),
    ("densty", 0.1, r"MSTopKHierStrategy has no option densty=0.1. Did you mean density\?"),
    ("node_name", 3, "node_name=3 must be a string"),
    ("value_dtype", "float16", "value_dtype='float16' must be .*'bfloat16'"),
]


@pytest.mark.parametrize(("option", "value"), BAD)
def test_hier_option_out_of_range_is_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{option}={value!r}")):
        HierConfig(**{option: value})


@pytest.mark.parametrize(("option", "value", "says"), REFUSED)
@pytest.mark.parametrize("package", PACKAGES)
def test_hier_strategy_option_that_is_bad_or_unknown_is_refused(
    package: str, option: str, value: Any, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        ours(package).MSTopKHierStrategy(**{option: value})


def test_strategy_of_the_other_lightning_package_is_refused() -> None:
    with pytest.raises(ValueError, match=r"use lightning_sparse.flavours.pytorch_lightning.MSTopKHierStrategy"):
        lightning_of("pytorch_lightning").Trainer(strategy=ours("lightning").MSTopKHierStrategy(), accelerator="cpu")


def test_static_graph_with_accumulation_is_refused() -> None:
    t = lightning_of("pytorch_lightning").Trainer(
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        strategy=ours("pytorch_lightning").MSTopKHierStrategy(static_graph=True),
    )
    t.state.fn = "fit"
    with pytest.raises(ValueError, match="static_graph=True with accumulate_grad_batches=2"):
        t.strategy.setup(t)


def test_callback_with_its_own_schedule_is_accepted() -> None:
    pl = lightning_of("pytorch_lightning")
    callback = pl.Callback()
    callback.scheduling = {0: "warm", 5: "cold"}
    module, strategy = plain_module("pytorch_lightning"), ours("pytorch_lightning").MSTopKHierStrategy()
    state = SimpleNamespace(fn="fit")
    t = SimpleNamespace(callbacks=[callback], accumulate_grad_batches=1, state=state, save_checkpoint=print)
    strategy.model = module
    with pytest.raises(AssertionError):  # raised by Lightning, which has no accelerator yet: our own check has passed
        strategy.setup(t)


def test_ddp_receives_default_options() -> None:
    strategy = ours("pytorch_lightning").MSTopKHierStrategy(find_unused_parameters=True)
    assert strategy.config == HierConfig()
    strategy._prepare_ddp()
    assert strategy._ddp_kwargs == {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    strategy = ours("pytorch_lightning").MSTopKHierStrategy(gradient_as_bucket_view=False)
    strategy._prepare_ddp()
    assert strategy._ddp_kwargs == {"gradient_as_bucket_view": False}


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_lightning_cli_accepts_options_of_the_strategy_and_of_ddp(package: str) -> None:
    """LightningCLI reads a class's options from its constructor. The interpreter has only one Lightning package."""
    pytest.importorskip("jsonargparse")
    options = {"density": 0.05, "find_unused_parameters": True, "process_group_backend": "gloo"}
    expected = {**options, "gradient_as_bucket_view": True}
    (parsed,) = run_ranks(parse_options, package, options, nodes=1, devices=1, init=False, start_method="spawn")
    assert parsed == {name: expected for name in STRATEGIES}


STRATEGIES = ["MSTopKHierStrategy", "MSTopKLocalStrategy", "MSTopKElasticStrategy"]


def parse_options(package: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that LightningCLI passes to each strategy: the given options, and an option with a default."""
    from jsonargparse import ArgumentParser

    found = {}
    for name in STRATEGIES:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(getattr(ours(package), name), "strategy")
        parsed = parser.parse_object({"strategy": options}).strategy
        found[name] = {option: parsed[option] for option in [*options, "gradient_as_bucket_view"]}
    return found


NODES_OF_8 = Topology(tuple(tuple(range(8 * node, 8 * node + 8)) for node in range(2)), 0)
MB = 1 << 20


@pytest.mark.parametrize(
    ("device", "topology", "nbytes", "size"),
    [
        ("cpu", NODES_OF_8, 500 * MB, None),
        ("cuda", Topology((tuple(range(8)),), 0), 500 * MB, None),  # one node: DDP's all-reduce
        ("cuda", NODES_OF_8, 100 * MB, 25),
        ("cuda", NODES_OF_8, 800 * MB, 100),  # eight buckets
        ("cuda", NODES_OF_8, 28_000 * MB, 200),
        ("cuda", Topology(((0,), (1,)), 0), 28_000 * MB, 25),  # each device selects in the whole bucket
    ],
)
def test_bucket_size_on_gpus_grows_with_devices_per_node(
    device: str, topology: Topology, nbytes: int, size: int | None
) -> None:
    assert bucket_cap_mb(nbytes, topology, torch.device(device)) == size


class _Wrapped(Exception):
    """Raised where the host wraps the module, with the options for DDP."""


@pytest.mark.parametrize("package", [*PACKAGES, "fabric", "lightning_fabric"])
@pytest.mark.parametrize(("given", "size"), [({}, 100), ({"bucket_cap_mb": 7}, 7)])
def test_bucket_size_is_set_only_while_ddp_wraps(
    package: str, given: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrap(self: Any, module: torch.nn.Module) -> None:
        raise _Wrapped(self._ddp_kwargs)

    cls = ours(package).MSTopKHierStrategy
    method = "setup_module" if "fabric" in package else "_setup_model"
    monkeypatch.setattr(cls, "root_device", torch.device("cuda"))
    monkeypatch.setattr(cls.__bases__[1], method, wrap)
    strategy = cls(**given)
    strategy._topology = NODES_OF_8
    with pytest.raises(_Wrapped) as wrapped:
        getattr(strategy, method)(torch.nn.Linear(25 * MB, 8, device="meta"))
    assert wrapped.value.args[0]["bucket_cap_mb"] == size
    assert strategy._ddp_kwargs.get("bucket_cap_mb") == given.get("bucket_cap_mb"), "the user's options changed"


@pytest.mark.parametrize(
    ("nodes", "density", "advice"),
    [(4, 0.01, ""), (64, 0.01, ""), (128, 0.01, "use exchange='regional'"), (4, 1.0, "use exchange='dense'")],
)
def test_sparse_exchange_larger_than_dense_is_logged_once(
    nodes: int, density: float, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = HierConfig(exchange="sparse", density=density)
    topology = Topology(tuple((rank,) for rank in range(nodes)), 0)
    Exchange(config, topology, torch.device("cpu"), 10**8, LogOnce(0))
    warnings = [line for line in caplog.messages if not line.startswith("no compiled kernels")]
    assert [advice in line for line in warnings] == [True] * bool(advice)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("name", "option"), [("MSTopKFSDPStrategy", "cluster_environment"), ("MSTopKHierStrategy", "kwargs")]
)
def test_option_that_no_base_class_accepts_is_refused(package: str, name: str, option: str) -> None:
    """The options are not ignored, either."""
    with pytest.raises(ValueError, match=rf"{name} has no option {option}=2"):
        getattr(ours(package), name)(**{option: 2})


@pytest.mark.parametrize("package", [*PACKAGES, "fabric"])
@pytest.mark.parametrize("name", ["MSTopKHierStrategy", "MSTopKLocalStrategy"])
def test_subclass_with_its_own_constructor_passes_on_options_of_all_base_classes(package: str, name: str) -> None:
    base, timeout = getattr(ours(package), name), timedelta(seconds=77)

    class Own(base):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(density=0.02, timeout=timeout, find_unused_parameters=True, **options)

    class Fixed(Own):
        def __init__(self) -> None:
            super().__init__(process_group_backend="gloo")

    strategy = Fixed()
    assert (strategy.config.density, strategy._timeout) == (0.02, timeout)
    assert strategy._ddp_kwargs["find_unused_parameters"]
    with pytest.raises(ValueError, match="Own has no option bogus=1"):
        Own(bogus=1)


# -- warnings about slow settings, and errors for impossible ones ------------------------------------------------------

TWO_NODES = Topology(((0,), (1,)), 0)


def a_state() -> HierState:
    return HierState(nn.Linear(2, 2), HierConfig(), TWO_NODES)


def test_python_reducer_is_refused() -> None:
    with (
        torch._dynamo.config.patch(optimize_ddp="python_reducer"),
        pytest.raises(ValueError, match="python_reducer.*Set it to True or False"),
    ):
        a_state()


def updates_step(state: HierState) -> None:
    updates = LocalUpdates.__new__(LocalUpdates)  # an instance with groups needs ranks
    updates.active, updates.exchange = True, state.exchange
    updates.step()


BEGINNINGS: dict[str, Callable[[Any], object]] = {
    "step": HierState.before_backward,
    "hook": lambda state: state.on_bucket(None),
    "updates": updates_step,
}


@pytest.mark.parametrize("begin", BEGINNINGS.values(), ids=BEGINNINGS)
def test_cuda_graph_capture_of_a_round_is_refused(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[[Any], object]
) -> None:
    state = a_state()
    monkeypatch.setattr(state.exchange, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="cannot be captured in a CUDA graph"):
        begin(state)


@pytest.mark.gpu
def test_cuda_graph_capture_on_a_gpu_is_refused() -> None:
    state = HierState(nn.Linear(2, 2, device="cuda"), HierConfig(), TWO_NODES)
    x = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x += 1  # torch warns about an empty graph
        with pytest.raises(ValueError, match="cannot be captured"):
            state.before_backward()


def test_missing_compiled_kernels_are_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    report = KernelReport(cpu="plain torch", cuda="plain torch", reasons=("nothing was built",))
    monkeypatch.setattr(engine, "kernel_report", lambda: report)
    with caplog.at_level("INFO", "lightning_sparse"):
        a_state()
    assert [line for line in caplog.messages if "no compiled kernels for cpu" in line and "nothing was built" in line]


@pytest.mark.parametrize("package", PACKAGES)
def test_strategy_warns_of_a_checkpoint_with_another_engine(package: str, caplog: pytest.LogCaptureFixture) -> None:
    classes = ours(package)
    made = {
        "gradients": classes.MSTopKHierStrategy(),
        "updates": classes.MSTopKLocalStrategy(),
        "elastic": classes.MSTopKElasticStrategy(lighthouse="http://127.0.0.1:1"),
    }
    for own, strategy in made.items():
        for kind in made:
            caplog.clear()
            strategy._side_files.take([EngineCheckpoint({"kind": kind}, "a.ckpt", None)], "a.ckpt", rank=0)
            assert ("was saved by a strategy that exchanges" in caplog.text) == (kind != own)


def test_copy_of_a_hook_state_is_refused() -> None:
    """`copy.deepcopy(ddp)` copies the hook's state, too."""
    state = HierState(nn.Linear(3, 5), HierConfig(), Topology(((0,),), 0))
    with pytest.raises(TypeError, match=r"HierState cannot be copied .* copy.deepcopy\(ddp.module\)"):
        copy.deepcopy(state)
