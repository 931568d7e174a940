"""Random fits that end with an exception: in any hook, step or collective, on all ranks or on some."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.helpers.lines import Lines
from tests.strategy.trainers import lightning_of, ours, plain_module, trainer

PACKAGE = "pytorch_lightning"
WORLD = 4
# Number of calls per fit; the minimum over all strategies.
HOOKS = {
    "on_fit_start": 1, "on_train_start": 1, "on_train_epoch_start": 2, "on_train_batch_start": 12,
    "on_before_zero_grad": 12, "on_before_backward": 12, "on_after_backward": 12, "on_before_optimizer_step": 12,
    "on_train_batch_end": 12, "on_train_epoch_end": 2, "on_validation_start": 2, "on_validation_batch_start": 4,
    "on_validation_end": 2, "on_save_checkpoint": 4, "on_train_end": 1,
}  # fmt: skip
WITHIN_STEPS = {"forward": 12, "gradient": 12, "before_step": 12, "within_step": 12, "after_step": 12}
COLLECTIVES = {
    "all_reduce": 15, "all_to_all_single": 12, "all_gather_object": 4, "gather_object": 4, "broadcast": 86,
    "broadcast_object_list": 3, "barrier": 21, "isend": 4, "irecv": 4, "new_group": 7,
}  # fmt: skip
ERRORS: dict[str, type[BaseException]] = {
    "own": ValueError, "memory": torch.OutOfMemoryError, "interrupt": KeyboardInterrupt, "end": SystemExit,
}  # fmt: skip
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "hier": [{"exchange": "sparse", "warmup_epochs": 0}, {"exchange": "dense"}, {"density": 1.0}],
    "local": [{}, {"delay": 0}, {"sync_every": 3}, {"exchange": "dense"}, {"exchange": "regional"}],
    "fsdp": [{}, {"delay": 0}, {"send": "gradients"}],
}  # fmt: skip


@dataclass(frozen=True)
class RankInfo:
    """The point at which a rank raises: a hook, a part of the step or a collective, and the number of the call."""

    name: str
    call: int


@dataclass(frozen=True)
class Program:
    """A fit that ends with an exception."""

    strategy: str
    options: dict[str, Any]
    shards_step: bool  # with `PTOCallback`
    error: str
    places: dict[int, RankInfo]  # by rank; other ranks do not raise

    @property
    def together(self) -> bool:
        """Whether all ranks raise at the same point, so that they can continue together."""
        first, *others = (self.places.get(rank) for rank in range(WORLD))
        return first is not None and first.name not in COLLECTIVES and all(other == first for other in others)


def program_of(seed: int, together: bool) -> Program:
    """Return a random program."""
    chance = random.Random(seed)
    strategy = chance.choice(["hier", "hier", "local", "local", "fsdp"])

    def place(names: Mapping[str, int]) -> RankInfo:
        name = chance.choice([*names])
        return RankInfo(name, chance.randrange(names[name]))

    steps = HOOKS | WITHIN_STEPS
    if together:
        places = dict.fromkeys(range(WORLD), place(steps))
    elif chance.random() < 0.6:  # some ranks, at the same point
        names = steps if chance.random() < 0.6 else COLLECTIVES
        places = dict.fromkeys(chance.sample(range(WORLD), chance.randint(1, WORLD - 1)), place(names))
    else:  # each rank at its own point
        places = {rank: place(steps | COLLECTIVES) for rank in range(WORLD)}
    shards_step = strategy == "hier" and chance.random() < 0.5
    return Program(strategy, chance.choice(OPTIONS[strategy]), shards_step, chance.choice([*ERRORS]), places)


class Raiser:
    """Raises once, at the point of this rank, and records the time."""

    def __init__(self, program: Program) -> None:
        self.place = program.places.get(int(os.environ["RANK"]))
        self.error, self.calls, self.raised = ERRORS[program.error], 0, 0.0

    def meet(self, name: str) -> None:
        if self.raised or self.place is None or self.place.name != name:
            return
        self.calls += 1
        if self.calls > self.place.call:
            self.raised = time.monotonic()
            raise self.error(f"the user's error in {name}")


def callback_of(raiser: Raiser) -> Any:
    """Return the callback whose hooks raise."""

    def meets(name: str) -> Callable[..., None]:
        return lambda *_: raiser.meet(name)

    return type("Raises", (lightning_of(PACKAGE).Callback,), {hook: meets(hook) for hook in HOOKS})()


def module_of(raiser: Raiser) -> Any:
    """Return a module whose forward pass, backward pass, and optimizer raise."""
    torch.manual_seed(0)
    base = type(plain_module(PACKAGE, net := nn.Sequential(nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 5))))

    class Optimizer(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            raiser.meet("within_step")
            return loss

    class Module(base):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raiser.meet("forward")
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = Optimizer(self.parameters(), lr=0.01)
            optimizer.register_step_pre_hook(lambda *_: raiser.meet("before_step"))
            optimizer.register_step_post_hook(lambda *_: raiser.meet("after_step"))
            return optimizer

    module = Module()
    module.net = net
    net[0].weight.register_hook(lambda _: raiser.meet("gradient"))
    return module


@contextmanager
def collectives_that_raise(raiser: Raiser) -> Iterator[None]:
    kept = {name: getattr(dist, name) for name in COLLECTIVES}

    def meets(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raiser.meet(name)
            return kept[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, meets(name))
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def strategy_of(program: Program) -> tuple[Any, list[Any]]:
    """Return a new strategy and its callbacks."""
    if program.strategy == "fsdp":
        options = {"density": 0.1, "save_distributed_checkpoint": False, **program.options}
        return ours(PACKAGE).MSTopKFSDPStrategy(**options), []
    options = {"density": 0.1, "bucket_cap_mb": 0.002, **program.options}
    if program.strategy == "local":
        return ours(PACKAGE).MSTopKLocalStrategy(**options), []
    callbacks = (
        [ours(PACKAGE).PTOCallback(scope="world", trusted_optimizers=["Optimizer"])] if program.shards_step else []
    )
    return ours(PACKAGE).MSTopKHierStrategy(**options), callbacks


def fit(program: Program, raiser: Raiser, folder: Path, **options: Any) -> tuple[Any, str]:
    """Train two epochs of six batches, with validation and checkpoints. Return the module and the visible error."""
    pl, (strategy, callbacks) = lightning_of(PACKAGE), strategy_of(program)
    module, resume = module_of(raiser), options.pop("ckpt_path", None)
    savers = [pl.callbacks.ModelCheckpoint(folder / "steps", every_n_train_steps=3)]
    if not resume:
        savers.append(pl.callbacks.OnExceptionCheckpoint(folder))
    train = {"max_epochs": 2, "max_steps": -1, "limit_val_batches": 2, **options}
    t = trainer(PACKAGE, strategy, callbacks=[callback_of(raiser), *callbacks, *savers], enable_checkpointing=True,
                **train)  # fmt: skip
    seen = ""
    with collectives_that_raise(raiser):
        try:
            t.fit(module, ckpt_path=resume)
        except BaseException as error:
            seen = f"{type(error).__name__}: {error}"
    return module, seen


def whole(parameter: Tensor) -> Tensor:
    """Return the parameter, gathered if it is sharded."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def play(program: Program, folder: Path) -> dict[str, Any]:
    """Run the program, and a second fit if all ranks can continue. Return the results of this rank."""
    raiser, lines = Raiser(program), Lines()
    module, seen = fit(program, raiser, folder)
    shapes = [tuple(p.shape) for p in module.parameters()]
    waited = time.monotonic() - raiser.raised if raiser.raised else 0.0
    found = {"seen": seen, "raised": bool(raiser.raised), "shapes": shapes, "waited": waited, "lines": [*lines.lines]}
    if program.together and raiser.raised:
        saved = folder / "on_exception.ckpt"
        options = {"ckpt_path": saved} if saved.exists() else {}
        never = Raiser(Program(program.strategy, program.options, program.shards_step, program.error, {}))
        module, error = fit(program, never, folder / "again", **options)
        found |= {"again": error, "weights": torch.cat([whole(p).flatten() for p in module.parameters()])}
    return found


def play_all(programs: list[Program], folder: str) -> None:
    """Run programs in the same processes, and write the results of this rank to files.

    A rank that cannot continue raises, so that the launcher ends the other ranks.
    """
    for index, program in enumerate(programs):
        found = play(program, Path(folder) / str(index))
        torch.save(found, Path(folder) / f"{index}.{os.environ['RANK']}")
        if not program.together and found["seen"]:
            raise RuntimeError(found["seen"])
