"""Trains a toy model with the optimizers of three libraries, with DDP and with the strategies.

Some parameters of the model are scalars, and some are zero or one.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.topology import Topology, discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig
from tests.helpers.distributed import groups_of_its_own
from tests.updates.test_foreign_optimizers import Toy

STEPS = 40
RATES = [3e-3, 0.1, 1.0]  # learning rates; the first rate with which DDP trains is used
LEAST, LEAST_OF_DDP = 0.95, 0.9  # an optimizer trains if its last loss is less than this times its first loss
EXPLAINED = {"torch": {"LBFGS"}, "pytorch_optimizer": {"lbfgs", "dadaptadan"}}
"""Optimizers that a strategy may not train. LBFGS compares gradients of one function at several places: `mstopk_local`
refuses it, and the sparse gradients of `mstopk_hier` do not belong to one function. DAdaptAdan increases its step size
from 1e-6, and ends with a different loss in each run, also with DDP."""
Make = Callable[[nn.Module, float], Optimizer]


def of_torch() -> dict[str, Make]:
    """Return the optimizers of torch."""
    found = {
        name: each
        for name, each in vars(torch.optim).items()
        if inspect.isclass(each) and issubclass(each, Optimizer) and each is not Optimizer
    }

    def make(cls: Any) -> Make:
        only = 2 if cls.__name__ == "Muon" else None
        # LBFGS may end its inner loop early, depending on this rank's loss. The other ranks would wait for gradients.
        more = {"tolerance_change": 0.0} if cls.__name__ == "LBFGS" else {}
        return lambda model, lr: cls([p for p in model.parameters() if only in (None, p.dim())], lr=lr, **more)

    return {name: make(cls) for name, cls in sorted(found.items())}


def of_timm() -> dict[str, Make]:
    """Return one optimizer of each class of timm. Longer names of a class change its options."""
    import timm.optim as library

    def make(name: str) -> Make:
        return lambda model, lr: library.create_optimizer_v2(model, opt=name, lr=lr, weight_decay=0.01)

    names = sorted(library.list_optimizers(), key=len, reverse=True)
    shortest = {library.get_optimizer_info(name).opt_class: name for name in names}
    return {name: make(name) for name in shortest.values()}


def of_pytorch_optimizer() -> dict[str, Make]:
    """Return the optimizers of pytorch_optimizer."""
    import pytorch_optimizer as library

    def make(name: str) -> Make:
        return lambda model, lr: library.create_optimizer(model, name, lr=lr)

    return {name: make(name) for name in library.get_supported_optimizers()}


LIBRARIES: dict[str, Callable[[], dict[str, Make]]] = {
    "torch": of_torch,
    "timm": of_timm,
    "pytorch_optimizer": of_pytorch_optimizer,
}


def losses_of(make: Make, lr: float, strategy: str, topology: Topology) -> list[float]:
    """Train on this rank. Return the mean losses of the first and of the last steps."""
    model = Toy()
    optimizer = make(model, lr)
    getattr(optimizer, "train", lambda: None)()
    engine: Any = None
    ddp = DistributedDataParallel(model, process_group=topology.intra if strategy == "mstopk_local" else None)
    if strategy == "mstopk_local":
        engine = LocalUpdates(model, optimizer, UpdatesConfig(density=0.1), topology)
    elif strategy == "mstopk_hier":
        engine = HierState(model, HierConfig(density=0.1, exchange="sparse", warmup_epochs=0), topology)
        ddp.register_comm_hook(engine, hier_hook)
        engine.watch([optimizer])
    try:
        losses = [step(ddp, optimizer, engine, number) for number in range(STEPS)]
    finally:
        if engine is not None:
            engine.close()
    return [sum(losses[:5]) / 5, sum(losses[-5:]) / 5]


def step(ddp: nn.Module, optimizer: Optimizer, engine: Any, number: int) -> float:
    """Make one step with a closure, as Lightning does."""
    chance = torch.Generator().manual_seed(2 * number + dist.get_rank())
    x = torch.randn(32, 16, generator=chance)

    def closure() -> Tensor:
        if isinstance(engine, HierState):
            engine.before_backward()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), x[:, :4].argmax(1))
        loss.backward()
        return loss

    first = closure().detach()
    optimizer.step(closure)  # type: ignore[arg-type]
    if engine is not None:
        engine.step(optimizer)
    dist.all_reduce(first)
    return first.item() / dist.get_world_size()


def tried(make: Make, lr: float, strategy: str, topology: Topology) -> str | list[float]:
    """Return the losses, or the error that the optimizer or the strategy raises on all ranks."""
    try:
        with groups_of_its_own():
            return losses_of(make, lr, strategy, topology)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def trains(result: str | list[float], least: float = LEAST) -> bool:
    """Return whether the loss has fallen."""
    return not isinstance(result, str) and math.isfinite(result[1]) and result[1] < least * result[0]


def results_of(library: str) -> dict[str, dict[str, str | list[float]]]:
    """Return the result of each optimizer with DDP, and with each strategy if DDP trains."""
    warnings.simplefilter("ignore")
    topology, found = discover(), {}
    for name, make in LIBRARIES[library]().items():
        rows: dict[str, str | list[float]] = {}
        for lr in RATES:
            rows = {"ddp": tried(make, lr, "ddp", topology)}
            if trains(rows["ddp"], LEAST_OF_DDP):
                rows |= {each: tried(make, lr, each, topology) for each in ("mstopk_hier", "mstopk_local")}
                break
        found[name] = rows
    return found


def unexplained(library: str, problems: dict[str, str]) -> dict[str, str]:
    """Return the problems without a known reason."""
    return {name: problem for name, problem in problems.items() if name not in EXPLAINED.get(library, set())}


def problems_of(results: dict[str, dict[str, str | list[float]]]) -> dict[str, str]:
    """Return, for optimizers that DDP trains, why a strategy does not train them."""
    failed = {
        name: {each: result for each, result in rows.items() if not trains(result)}
        for name, rows in results.items()
        if len(rows) > 1
    }
    return {
        name: "; ".join(f"{each}: {result}" for each, result in rows.items()) for name, rows in failed.items() if rows
    }
