"""Random programs of hooks that read the weights or change them, for a callback or for the module itself."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.lines import raised
from tests.strategy.trainers import ddp, dense_one, lightning_of, ours, plain_module, ranks, trainer, weights

PACKAGE = "pytorch_lightning"
BETWEEN_BATCHES = ["on_train_batch_start", "on_train_batch_end"]
OUTSIDE_BATCHES = [
    "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end",
    "on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end",
    "on_save_checkpoint",
]  # fmt: skip
OF_THE_MODULE = ["on_validation_model_eval", "on_validation_model_zero_grad"]
READS = ["read", "save"]
CHANGES = ["scale", "clamp", "prune", "shift", "load"]
# These options send everything in each step, so the result must equal DDP.
EXACT: list[dict[str, Any]] = [
    {"density": 1.0, "value_dtype": "float32", "delay": 0},
    {"exchange": "dense", "delay": 0},
    {"density": 1.0, "value_dtype": "float32", "delay": 0, "step_ahead": 0.5},
]
LATE: list[dict[str, Any]] = [
    {"density": 0.1}, {"density": 0.1, "sync_every": 3, "outer_lr": 1.5}, {"density": 0.3, "delay": 0},
    {"density": 0.2, "sync_every": 4, "delay": 2}, {"exchange": "dense"}, {"exchange": "regional", "density": 0.1},
    {"density": 0.1, "step_ahead": 0.5},
]  # fmt: skip


@dataclass(frozen=True)
class Act:
    """The action of one hook in one of its calls, or in all calls if ``call`` is None."""

    hook: str
    call: int | None
    what: str
    in_module: bool
    alike: bool


@dataclass(frozen=True)
class Program:
    """A training with hooks."""

    acts: tuple[Act, ...]
    strategy: str
    options: dict[str, Any]
    trainer: dict[str, Any]
    swaps: bool  # whether validation replaces the weights by an average
    save_every: int

    @property
    def equals_ddp(self) -> bool:
        return (self.strategy == "hier" or self.options in EXACT) and all(act.alike for act in self.acts)


def program(seed: int) -> Program:
    """Return the random program with this seed."""
    chance = random.Random(seed)
    strategy = chance.choice(["local", "local", "local", "hier"])
    acts = []
    for _ in range(chance.randint(1, 4)):
        hook = chance.choice([*OUTSIDE_BATCHES, *OUTSIDE_BATCHES, *BETWEEN_BATCHES, *OF_THE_MODULE])
        alike = strategy == "hier" or hook in BETWEEN_BATCHES or chance.random() < 0.8  # DDP requires this
        what = chance.choice([*READS, *CHANGES, *CHANGES])
        if hook == "on_save_checkpoint":
            what = "read"
        in_module = hook in OF_THE_MODULE or chance.random() < 0.4
        call = chance.choice([None, 0, 1, 2]) if what != "save" else chance.randrange(3)
        acts.append(Act(hook, call, what, in_module, alike))
    options = {} if strategy == "hier" else chance.choice([*EXACT, *EXACT, *LATE])
    train = {
        "max_epochs": chance.randint(1, 3), "limit_train_batches": chance.choice([3, 4, 7]), "limit_val_batches": 2,
        "val_check_interval": chance.choice([1.0, 1.0, 0.5, 0.34]), "num_sanity_val_steps": chance.choice([0, 1]),
        "accumulate_grad_batches": chance.choice([1, 1, 2]), "max_steps": chance.choice([-1, -1, 5]),
    }  # fmt: skip
    return Program(tuple(acts), strategy, options, train, chance.random() < 0.3, chance.choice([0, 0, 2]))


class Player:
    """Runs a program, and records the weights that each hook sees."""

    def __init__(self, given: Program, folder: str) -> None:
        self.program, self.folder = given, folder
        self.calls: dict[tuple[str, bool], int] = {}
        self.seen: list[tuple[str, Tensor]] = []
        self.first: Tensor | None = None

    @torch.no_grad()
    def play(self, hook: str, in_module: bool, module: Any, trainer: Any) -> None:
        call = self.calls.get((hook, in_module), 0)
        self.calls[hook, in_module] = call + 1
        acts = [act for act in self.program.acts if (act.hook, act.in_module) == (hook, in_module)]
        if not acts:
            return
        self.note(hook, module)
        for act in acts:
            if act.call in (None, call):
                self.act(act, module, trainer)
        self.note(f"after {hook}", module)

    def note(self, where: str, module: Any) -> None:
        self.seen.append((where, weights(module).clone()))
        self.first = self.seen[0][1] if self.first is None else self.first

    def act(self, act: Act, module: Any, trainer: Any) -> None:
        if act.what == "save":
            trainer.save_checkpoint(f"{self.folder}/{act.hook}.ckpt")
        chance = torch.Generator().manual_seed(7 if act.alike else 7 + dist.get_rank())
        for parameter in module.parameters():
            change_of(act.what, parameter, chance)
        if act.what == "load" and self.first is not None:
            nn.utils.vector_to_parameters(self.first.clone(), module.parameters())


def change_of(what: str, parameter: Tensor, chance: torch.Generator) -> None:
    if what == "scale":
        parameter.mul_(0.9 + 0.1 * torch.rand((), generator=chance))
    elif what == "clamp":
        parameter.clamp_(-0.2, 0.2)
    elif what == "prune":
        parameter.mul_(torch.rand(parameter.shape, generator=chance) > 0.3)
    elif what == "shift":
        parameter.data += 0.01 * torch.randn(parameter.shape, generator=chance)


def callback_of(player: Player) -> Any:
    """Return a callback whose hooks run the player."""
    hooks = {act.hook for act in player.program.acts if not act.in_module}

    def plays(hook: str) -> Any:
        return lambda self, trainer, module, *_: player.play(hook, False, module, trainer)

    return type("Plays", (lightning_of(PACKAGE).Callback,), {hook: plays(hook) for hook in hooks})()


class Swap:
    """Replaces the weights by their average during each validation."""

    def __init__(self) -> None:
        self.average: list[Tensor] = []
        self.kept: list[Tensor] = []

    @torch.no_grad()
    def follow(self, module: Any) -> None:
        if not self.average:
            self.average = [p.detach().clone() for p in module.parameters()]
        for mean, p in zip(self.average, module.parameters(), strict=True):
            mean.lerp_(p, 0.1)

    @torch.no_grad()
    def show(self, module: Any) -> None:
        self.kept = [p.detach().clone() for p in module.parameters()]
        for p, mean in zip(module.parameters(), self.average, strict=False):
            p.copy_(mean)

    @torch.no_grad()
    def put_back(self, module: Any) -> None:
        for p, kept in zip(module.parameters(), self.kept, strict=True):
            p.copy_(kept)


def swapping() -> Any:
    """Return a callback that runs `Swap`."""
    swap = Swap()

    class Swaps(lightning_of(PACKAGE).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            swap.follow(module)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            swap.show(module)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            swap.put_back(module)

    return Swaps()


def module_of(player: Player) -> Any:
    """Return a module whose hooks run the player."""
    torch.manual_seed(0)
    base = type(
        plain_module(PACKAGE, net := nn.Sequential(nn.Linear(13, 11), nn.Tanh(), nn.Linear(11, 5)), by_step=True)
    )

    def plays(hook: str) -> Any:
        def play(self: Any, *given: Any) -> Any:
            player.play(hook, True, self, self.trainer)
            return getattr(super(cls, self), hook)(*given)

        return play

    hooks = {act.hook for act in player.program.acts if act.in_module}
    cls: Any = type("Module", (base,), {hook: plays(hook) for hook in hooks})
    module = cls()
    module.net = net
    return module


def play(given: Program, name: str, folder: str) -> dict[str, Any]:
    """Train with a strategy. Return the weights in each hook, the final weights, and the error, if any."""
    player = Player(given, folder)
    module, callbacks = module_of(player), [callback_of(player)]
    if given.swaps:
        callbacks.append(swapping())
    options: dict[str, Any] = {**given.trainer, "callbacks": callbacks}
    if given.save_every:
        pl = lightning_of(PACKAGE)
        saver = pl.callbacks.ModelCheckpoint(f"{folder}/{name}", every_n_train_steps=given.save_every, save_top_k=1)
        options |= {"callbacks": [*callbacks, saver], "enable_checkpointing": True}
    strategy = ddp(PACKAGE)
    if name == "hier":
        strategy = dense_one(PACKAGE)
    elif name == "local":
        strategy = ours(PACKAGE).MSTopKLocalStrategy(bucket_cap_mb=0.002, **given.options)
    error = raised(trainer(PACKAGE, strategy, **options, **ranks()).fit, module)
    return {"seen": player.seen, "weights": weights(module), "error": error}


def play_all(seeds: range, folder: str) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Return the strategy's result for each program, and DDP's result if both must be equal."""
    found = []
    for seed in seeds:
        given = program(seed)
        ours_ = play(given, given.strategy, f"{folder}/{seed}")
        found.append((ours_, play(given, "ddp", f"{folder}/{seed}/ddp") if given.equals_ddp else None))
    return found
