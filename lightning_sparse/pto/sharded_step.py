"""The user's optimizer, made to step this rank's share: hooks around its step, nothing else of it is touched."""

import logging
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.pto.agreement import all_say, differing
from lightning_sparse.pto.consolidate import State, collect
from lightning_sparse.pto.gather import FlatGather
from lightning_sparse.pto.ownership import assign, loads_of
from lightning_sparse.pto.trial import TESTED, Trial, parameters_of
from lightning_sparse.strategy.communicator import HierCommunicator

log = logging.getLogger("lightning_sparse")

_REFUSED = {
    "LBFGS": "it evaluates the closure several times within a step and mixes all parameters",
    "ZeroRedundancyOptimizer": "it shares out the step already",
    "PostLocalSGDOptimizer": "ranks hold different parameters between its averagings",
}


class ShardedStep:
    """Makes `optimizer` step this rank's share of its parameters and gather the rest. All ranks make one.

    Args:
        optimizer: whose step to share. It gets ``consolidate_state_dict(to=0)``, to be called on all ranks before
            ``state_dict()`` is called on one.
        communicator: from ``communicator_of()``.
        names: names of parameters by their ``id()``, for messages.

    Raises:
        ValueError: for an optimizer that cannot be shared.
    """

    def __init__(
        self, optimizer: Optimizer, communicator: HierCommunicator, names: Mapping[int, str] | None = None
    ) -> None:
        refuse(optimizer)
        self.optimizer = optimizer
        self.communicator = communicator
        self.topology = communicator.topology
        self.active = True
        self.steps = 0
        self.parameters: list[Tensor] = []
        self.owners: list[int] = []
        self._names = names or {}
        self._untested = type(optimizer) not in TESTED
        self._trial: Trial | None = None
        self._compared = False
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._running: FrameType | None = None
        self._consolidated: State | None = None
        self._follow_groups()
        self._device = self.parameters[0].device  # that of the groups, also after the module has moved to the CPU
        self._drop_foreign_state()
        self._install()

    @property
    def owned(self) -> list[bool]:
        """For each parameter, whether this rank steps it."""
        return [owner == self.topology.device_index for owner in self.owners]

    def describe(self) -> str:
        """One line for the log."""
        size = self.topology.num_devices
        loads = loads_of([p.numel() for p in self.parameters], self.owners, size)
        unbalance = max(loads) * size / max(1, sum(loads))
        return (
            f"{type(self.optimizer).__name__}: {len(self.parameters)} parameters are stepped by {size} ranks; the "
            f"largest share is {unbalance:.2f}x the mean; {self._gather.nbytes / 1e6:.1f} MB are gathered a step"
        )

    # -- around the step -----------------------------------------------------------------------------------------------

    def _before(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        caller = sys._getframe(1)
        if not self.active or self._is_inside(caller):
            return None
        self._refuse_if_unfinished()
        self._consolidated = None
        replay, args, kwargs = _closure_first(args, kwargs)
        self._follow_groups()
        self._compare_ranks()
        if self._untested and not self._try_beside(replay):
            return args, kwargs
        self._running = caller
        for parameter, owned in zip(self.parameters, self.owned, strict=True):
            if not owned and parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None
        if replay is not None:
            replay.only_once = type(self.optimizer).__name__
        return args, kwargs

    def _after(self, *_: Any) -> None:
        if self._running is None or sys._getframe(1) is not self._running:
            return
        self._restore()
        self.communicator.where = f"while step {self.steps} gathered the parameters"
        self._gather(self.communicator.gather)
        self._running = None
        self.steps += 1
        if self._trial is not None:
            self._judge(self._trial)

    def _restore(self) -> None:
        for parameter, grad in self._hidden:
            parameter.grad = grad
        self._hidden.clear()

    def _is_inside(self, frame: FrameType | None) -> bool:
        """Whether this is a step within the step: a subclass calls super().step(), and torch wraps both with hooks.

        A step is known by the frame of torch's wrapper, because a step that an exception left looks the same otherwise.
        """
        while frame is not None and self._running is not None:
            if frame is self._running:
                return True
            frame = frame.f_back
        return False

    def _refuse_if_unfinished(self) -> None:
        if self._running is not None:
            self._restore()
            raise RuntimeError(
                f"step {self.steps} of {type(self.optimizer).__name__} was left by an exception before its parameters "
                f"were gathered: ranks hold different ones. Resume from the last checkpoint."
            )

    def _follow_groups(self) -> None:
        """Parameters may come later, with add_param_group(); those known keep their owners, and so their state."""
        parameters = parameters_of(self.optimizer)
        if len(parameters) == len(self.parameters) and all(map(_is, parameters, self.parameters)):
            return
        size = self.topology.num_devices
        owner_of = {id(p): owner for p, owner in zip(self.parameters, self.owners, strict=True)}
        kept = [p for p in parameters if id(p) in owner_of]
        new = [p for p in parameters if id(p) not in owner_of]
        loads = loads_of([p.numel() for p in kept], [owner_of[id(p)] for p in kept], size)
        owner_of.update({id(p): o for p, o in zip(new, assign([p.numel() for p in new], loads), strict=True)})
        self.parameters, self.owners = parameters, [owner_of[id(p)] for p in parameters]
        self._gather = FlatGather(self.parameters, self.owners, self.topology.device_index, size)

    def _compare_ranks(self) -> None:
        if self._compared:
            return
        for index, what in differing(self.parameters, self.communicator):
            name = self._names.get(id(self.parameters[index]), f"number {index}")
            raise ValueError(
                f"parameter {name}: ranks hold different {what}s of it, and a shared step needs the same on all. Let "
                f"DDP reduce every gradient (no no_sync() around the backward before a step, no parameter outside the "
                f"module), or leave PTOCallback out."
            )
        self._compared = True

    # -- optimizers nobody has tested ----------------------------------------------------------------------------------

    def _try_beside(self, replay: "_Replay | None") -> bool:
        """Make the plain step on a copy. False: it cannot be done, and the step is a plain one from here on."""
        reason, first = "", self._trial is None
        try:
            self._trial = self._trial or Trial(self.optimizer)
            closure = None if replay is None else _Replay(replay.result, replay.closure)
            self._trial.plain_step(self.optimizer, closure and closure.counted)
            if closure is not None and closure.calls > 1:
                reason = "it evaluates its closure more than once"
        except Exception as error:  # whatever a foreign step may raise on a copy: then there is nothing to compare
            reason = f"its plain step cannot be tried on a copy ({type(error).__name__}: {error})"
        if self._all_say(not reason):
            self._drop_foreign_state(even_untested=first)
            return True
        reason = reason or "another rank cannot try it"
        if not first:  # each rank has its share of the state only, and the copy's can no longer be trusted
            raise RuntimeError(f"PTO cannot go on with {type(self.optimizer).__name__}: {reason}. Leave it out.")
        self._turn_off(reason)
        return False

    def _judge(self, trial: Trial) -> None:
        if not self._all_say(trial.agrees(self.optimizer)):
            trial.adopt(self.optimizer)
            self._turn_off("sharing its step changes the result")
        elif trial.steps_left == 0:
            self._untested, self._trial = False, None

    def _turn_off(self, reason: str) -> None:
        self.active, self._trial = False, None
        del self.optimizer.consolidate_state_dict  # type: ignore[attr-defined]
        if self.topology.rank == 0:
            log.warning("PTO is off for %s, which steps as without it: %s.", type(self.optimizer).__name__, reason)

    def _all_say(self, yes: bool) -> bool:
        return all_say(yes, self.communicator, self._device)

    # -- state and checkpoints -----------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring all state to rank `to`, where ``state_dict()`` is then whole until the next step. All ranks call it."""
        self._refuse_if_unfinished()
        if to not in self.topology.nodes[self.topology.node_index]:
            return  # another node holds the same
        state = self.optimizer.state
        mine = {i: state[p] for i, p in enumerate(self.parameters) if self.owned[i] and p in state}
        self._consolidated = collect(mine, self.topology, self._device, to)

    def _complete(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        if not self.active:
            return
        if self._consolidated is None:
            raise RuntimeError(
                f"state_dict() of {type(self.optimizer).__name__}: this rank holds the state of its own share only. "
                f"Call optimizer.consolidate_state_dict(to=rank) on all ranks first, and state_dict() on that rank."
            )
        known = range(len(self.parameters))
        general = {key: value for key, value in state_dict["state"].items() if key not in known}
        state_dict["state"] = {**self._consolidated, **general}

    def _select(self, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Of what is loaded, keep what this rank steps."""
        self._follow_groups()
        self._consolidated = None
        ids = [key for group in state_dict["param_groups"] for key in group["params"]]
        if not self.active or self._untested or len(ids) != len(self.owners):  # the optimizer itself refuses the last
            return None
        foreign = {key for key, owned in zip(ids, self.owned, strict=True) if not owned}
        return {**state_dict, "state": {k: v for k, v in state_dict["state"].items() if k not in foreign}}

    def _drop_foreign_state(self, even_untested: bool = False) -> None:
        if self._untested and not even_untested:  # the twin needs all of it
            return
        for parameter, owned in zip(self.parameters, self.owned, strict=True):
            if not owned:
                self.optimizer.state.pop(parameter, None)

    def _install(self) -> None:
        self.optimizer.register_step_pre_hook(self._before)
        post = self.optimizer.register_step_post_hook(self._after)
        # Whoever looks after a step must see all parameters and gradients, also who came before. The hooks' order has
        # no public name; torch keeps them in this OrderedDict.
        self.optimizer._optimizer_step_post_hooks.move_to_end(post.id, last=False)  # type: ignore[attr-defined]
        self.optimizer.register_state_dict_post_hook(self._complete)
        self.optimizer.register_load_state_dict_pre_hook(self._select)
        self.optimizer.consolidate_state_dict = self.consolidate_state_dict  # type: ignore[attr-defined]


class _Replay:
    """A closure that was run already: answers with its result once, and is the closure from then on."""

    def __init__(self, result: Any, closure: Callable[[], Any]) -> None:
        self.result, self.closure = result, closure
        self.calls = 0
        self.only_once = ""

    def __call__(self) -> Any:
        self.calls += 1
        if self.calls == 1:
            return self.result
        if self.only_once:
            raise RuntimeError(
                f"{self.only_once} evaluates its closure more than once in a step, which cannot be shared: leave "
                f"PTOCallback out."
            )
        return self.closure()

    def counted(self) -> Any:
        """The result at every call, counted."""
        self.calls += 1
        return self.result


def _closure_first(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple["_Replay | None", tuple[Any, ...], dict[str, Any]]:
    """Run the closure of a step(optimizer, closure) now, so that gradients exist; the step itself gets the result."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None, args, kwargs
    with torch.enable_grad():
        replay = _Replay(closure(), closure)
    if "closure" in kwargs:
        return replay, args, {**kwargs, "closure": replay}
    return replay, (args[0], replay, *args[2:]), kwargs


def refuse(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer that is known not to treat parameters independently."""
    for cls in type(optimizer).__mro__:
        if cls.__name__ in _REFUSED:
            raise ValueError(
                f"PTOCallback cannot share the step of {type(optimizer).__name__}: {_REFUSED[cls.__name__]}. Use an "
                f"optimizer that steps each parameter by itself, or leave the callback out."
            )
    limits = {group["max_grad_norm"] for group in optimizer.param_groups if group.get("max_grad_norm")}
    if limits:
        raise ValueError(
            f"{type(optimizer).__name__}(max_grad_norm={limits.pop()}) clips by the norm of all gradients, of which "
            f"each rank sees its share only. Set max_grad_norm=None and clip with Trainer(gradient_clip_val=...)."
        )
    if isinstance(getattr(optimizer, "consolidate_state_dict", None), Callable):  # type: ignore[arg-type]
        raise ValueError(
            f"the step of {type(optimizer).__name__} is shared already: use one PTOCallback, and create optimizers in "
            f"configure_optimizers()."
        )


def _is(a: object, b: object) -> bool:
    return a is b
