"""Hooks that make the user's optimizer step this rank's share and gather the others."""

import logging
import sys
from collections.abc import Collection, Mapping
from operator import is_
from types import FrameType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.agree import all_agree, differing
from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.messages import log
from lightning_sparse.pto.choice import STEPS, Choice
from lightning_sparse.pto.closure import Replay, closure_first
from lightning_sparse.pto.consolidate import State, collect
from lightning_sparse.pto.gather import FlatGather
from lightning_sparse.pto.narrow import OwnShare, cut_state, join_states, placed_like
from lightning_sparse.pto.optimizers import is_elementwise, is_tested, refuse, step_cost
from lightning_sparse.pto.trial import Trial
from lightning_sparse.sharding import Part, Parts, divide_new, loads_of, parameters_of


class ShardedStep:
    """Shares the step of `optimizer`: each rank steps its parameters and gathers the others. Create it on all ranks.

    Args:
        optimizer: the optimizer. It gets a method ``consolidate_state_dict(to=0)``: call it on all ranks before
            ``state_dict()`` on rank `to`.
        communicator: from ``communicator_of()``.
        names: names of the parameters by ``id()``, for messages.
        uncut: ``id()`` of each parameter with sparse gradients, which is not divided.
        auto: time the full step, then the shared one, and keep the faster.
        gather: gather the parameters after each step. False: the caller does, with ``gather()``, on every rank.

    Raises:
        ValueError: if the optimizer is not supported.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        communicator: HierCommunicator,
        names: Mapping[int, str] | None = None,
        uncut: Collection[int] = (),
        *,
        auto: bool = False,
        gather: bool = True,
    ) -> None:
        refuse(optimizer)
        self.optimizer = optimizer
        self.communicator = communicator
        self.topology = communicator.topology
        self.active = True
        self.steps = 0
        self.parameters: list[Tensor] = []
        self.parts: list[Parts] = []
        self._names = names or {}
        self._uncut = frozenset(uncut)
        self._untested = not is_tested(optimizer)
        self._choice = Choice() if auto else None
        self._trial: Trial | None = None
        self._compared = False
        self._gathers = gather
        self._share = OwnShare()
        self._running: FrameType | None = None
        self._consolidated: dict[int, Any] | None = None
        self.follow_groups()
        self.device = self.parameters[0].device  # of the collectives, also if the module moves to the CPU
        self._drop_unowned_state()
        self._install()

    @property
    def sharing(self) -> bool:
        """Whether the next step is shared: not while ``auto`` times the full step, nor after sharing is turned off."""
        return self.active and (self._choice is None or self._choice.sharing)

    @property
    def choosing(self) -> bool:
        """Whether ``auto`` is still timing."""
        return self._choice is not None

    @property
    def mine(self) -> list[Part | None]:
        """The part of each parameter that this rank steps, or None."""
        here = self.topology.device_index
        return [next((part for part in parts if part.owner == here), None) for parts in self.parts]

    def describe(self) -> str:
        """Return a line for the log."""
        size = self.topology.num_devices
        loads = loads_of(self.parts, list(map(self._cost, self.parameters)), size)
        unbalance = max(loads) * size / max(1, sum(loads))
        cut = sum(len(parts) > 1 for parts in self.parts)
        return (
            f"{type(self.optimizer).__name__}: {len(self.parameters)} parameters, {cut} of them divided, are stepped "
            f"by {size} ranks; the largest share is {unbalance:.2f}x the mean; each step gathers "
            f"{self._gather.nbytes / 1e6:.1f} MB"
        )

    # -- around the step -----------------------------------------------------------------------------------------------

    def _before(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        caller = sys._getframe(1)
        if not self.active or self._is_inside(caller):
            return None
        self._refuse_if_unfinished()
        self._consolidated = None
        replay, args, kwargs = closure_first(args, kwargs)
        self.follow_groups()
        self._compare_ranks()
        if self.sharing and self._untested and not self._run_on_copy(replay):
            return args, kwargs
        self._running = caller
        if self._choice is not None:
            self._choice.begin(self.device)
        if self.sharing:
            self._share.show(self.parameters, self.mine)
            if replay is not None:
                replay.only_once = type(self.optimizer).__name__
        return args, kwargs

    def _after(self, *_: Any) -> None:
        if self._running is None or sys._getframe(1) is not self._running:
            return
        if self.sharing:
            self._share.put_back()
            if self._gathers:
                self.communicator.where = f"while step {self.steps} gathered the parameters"
                self._gather(self.communicator)
        self._running = None
        self.steps += 1
        if self._trial is not None:
            self._compare_with_copy(self._trial)
        if self._choice is not None:
            self._choose(self._choice)

    def _is_inside(self, frame: FrameType | None) -> bool:
        """Whether this step is nested: a subclass calls super().step(), and torch wraps both with hooks.

        The frame of torch's wrapper identifies a step, and distinguishes a nested one from one after an exception.
        """
        while frame is not None and self._running is not None:
            if frame is self._running:
                return True
            frame = frame.f_back
        return False

    def _refuse_if_unfinished(self) -> None:
        if self._running is not None and self.sharing:
            self._share.put_back()
            raise RuntimeError(
                f"step {self.steps} of {type(self.optimizer).__name__} raised an exception before the parameters were "
                f"gathered: ranks hold different parameters. Resume from the last checkpoint."
            )

    def follow_groups(self) -> None:
        """Assign owners to parameters of add_param_group(). Known parameters keep theirs, and so their state."""
        parameters = parameters_of(self.optimizer)
        if len(parameters) == len(self.parameters) and all(map(is_, parameters, self.parameters)):
            return
        size = self.topology.num_devices
        known = {id(p): parts for p, parts in zip(self.parameters, self.parts, strict=True)}
        elementwise = is_elementwise(self.optimizer)
        self.parts = divide_new(
            parameters, known, size, self._cost, lambda parameter: elementwise and id(parameter) not in self._uncut
        )
        self.parameters = parameters
        self._gather = FlatGather(self.parameters, self.parts, self.topology.device_index, size)

    def take_over(self, parts: list[Parts]) -> None:
        """Step other parts from now on, with their state from the previous owners. Collectives of the scope."""
        self._return_state()
        self.parts = parts
        self._gather = FlatGather(self.parameters, self.parts, self.topology.device_index, self.topology.num_devices)
        self._drop_unowned_state()

    def _cost(self, parameter: Tensor) -> int:
        return step_cost(self.optimizer, parameter)

    def _compare_ranks(self) -> None:
        if self._compared:
            return
        both = [tensor for p in self.parameters for tensor in (p, p.grad)]
        for place in differing(both, self.communicator.flat_all_reduce, self.parameters[0].device):
            index, what = place // 2, ("parameter", "gradient")[place % 2]
            name = self._names.get(id(self.parameters[index]), f"number {index}")
            raise ValueError(
                f"parameter {name}: its {what} differs between ranks, and a shared step needs the same on all. Let "
                f"DDP reduce every gradient (no no_sync() around the backward before a step, no parameter outside the "
                f"module), or remove PTOCallback."
            )
        self._compared = True

    # -- untested optimizers -------------------------------------------------------------------------------------------

    def _run_on_copy(self, replay: Replay | None) -> bool:
        """Run the full step on a copy of the optimizer. Return False, and turn sharing off, if that fails."""
        reason, first = "", self._trial is None
        try:
            self._trial = self._trial or Trial(self.optimizer)
            closure = None if replay is None else Replay(replay.result, replay.closure)
            self._trial.plain_step(self.optimizer, closure and closure.counted)
            if closure is not None and closure.calls > 1:
                reason = "it evaluates its closure more than once"
        except Exception as error:  # an untested step may raise anything on a copy
            reason = f"its step cannot be tried on a copy ({type(error).__name__}: {error})"
        if self._all_agree(not reason):
            self._drop_unowned_state(even_untested=first)
            return True
        reason = reason or "another rank cannot try it"
        if not first:  # each rank has only its share of the state, and the copy is unreliable
            raise RuntimeError(f"PTOCallback does not support {type(self.optimizer).__name__}: {reason}. Remove it.")
        self._turn_off(reason)
        return False

    def _compare_with_copy(self, trial: Trial) -> None:
        if not self._all_agree(trial.agrees(self.optimizer)):
            trial.adopt(self.optimizer)
            self._turn_off("sharing its step changes the result")
        elif trial.steps_left == 0:
            self._untested, self._trial = False, None

    def release(self) -> None:
        """Give all state to all ranks, and let each run the full step from now on. Collectives of the scope."""
        if self.sharing:
            self._return_state()
            self.active = False
            del self.optimizer.consolidate_state_dict  # type: ignore[attr-defined]

    def _turn_off(self, reason: str, level: int = logging.WARNING) -> None:
        self.active, self._trial, self._choice = False, None, None
        del self.optimizer.consolidate_state_dict  # type: ignore[attr-defined]
        if self.topology.rank == 0:
            name = type(self.optimizer).__name__
            log.log(level, "PTO is off for %s; every rank runs the full step: %s.", name, reason)

    # -- scope "auto" --------------------------------------------------------------------------------------------------

    def _choose(self, choice: Choice) -> None:
        """After a timed step, start the next phase, or keep the faster step at the end."""
        choice.end(self.device)
        if choice.left == STEPS:
            self._drop_unowned_state()
        if choice.left:
            return
        found = choice.verdict(self.communicator, self.device)
        if found.shared < found.plain:
            self._choice = None
            if self.topology.rank == 0:
                log.info("PTO is on for %s: %s", type(self.optimizer).__name__, found)
        else:
            self._return_state()
            self._turn_off(str(found), logging.INFO)

    def _return_state(self) -> None:
        """Send all state to all ranks. Collectives of the scope."""
        state = self.optimizer.state
        like = next((dict(state[p]) for p in self.parameters if state.get(p)), {})
        mine: dict[int, Any] = {}
        for rank in self.topology.nodes[self.topology.node_index]:
            self.consolidate_state_dict(to=rank)
            mine = mine or self._consolidated or {}
            self._consolidated = None
        for place, whole in mine.items():
            parameter = self.parameters[place]
            if len(self.parts[place]) > 1 or parameter not in state:
                state[parameter] = placed_like(whole, like, parameter.device)

    def _all_agree(self, condition: bool) -> bool:
        return all_agree(condition, self.communicator.flat_all_reduce, self.device)

    # -- state and checkpoints -----------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect all state on rank `to`, for ``state_dict()`` before the next step. All ranks call it."""
        self._refuse_if_unfinished()
        if not self.sharing or to not in self.topology.nodes[self.topology.node_index]:
            return  # every rank, or another scope, has all state
        state = self.optimizer.state
        owned = [(i, part) for i, part in enumerate(self.mine) if part is not None and self.parameters[i] in state]
        mine = {(i, part.begin): state[self.parameters[i]] for i, part in owned}
        collected = collect(mine, self.topology, self.device, to)
        self._consolidated = None if collected is None else self._joined(collected)

    def _joined(self, collected: State) -> dict[int, Any]:
        """Return the state of whole parameters by their index in the optimizer."""
        whole = {}
        for index, (parameter, parts) in enumerate(zip(self.parameters, self.parts, strict=True)):
            states = [collected[index, part.begin] for part in parts if (index, part.begin) in collected]
            if states:
                whole[index] = states[0] if len(parts) == 1 else join_states(states, parameter, parts)
        return whole

    def _complete(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        if not self.sharing:
            return
        if self._consolidated is None:
            raise RuntimeError(
                f"state_dict() of {type(self.optimizer).__name__}: this rank holds only the state of its own share. "
                f"Call optimizer.consolidate_state_dict(to=rank) on all ranks first, and state_dict() on that rank."
            )
        known = range(len(self.parameters))
        general = {key: value for key, value in state_dict["state"].items() if key not in known}
        state_dict["state"] = {**self._consolidated, **general}

    def _select(self, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Keep only this rank's share of the state that is loaded."""
        self.follow_groups()
        self._consolidated = None
        ids = [key for group in state_dict["param_groups"] for key in group["params"]]
        if not self.sharing or self._untested or len(ids) != len(self.parts):  # the optimizer raises for the last
            return None
        places = {key: place for place, key in enumerate(ids)}
        kept = {key: self._own_state(state, places.get(key)) for key, state in state_dict["state"].items()}
        return {**state_dict, "state": {key: state for key, state in kept.items() if state is not None}}

    def _own_state(self, state: Any, place: int | None) -> Any:
        """Return this rank's share of a parameter's state, or None. place: None for state of no parameter."""
        if place is None:
            return state
        part = self.mine[place]
        if part is None:
            return None
        return state if len(self.parts[place]) == 1 else cut_state(state, self.parameters[place], part)

    def _drop_unowned_state(self, even_untested: bool = False) -> None:
        if not self.sharing or (self._untested and not even_untested):  # the twin needs all state
            return
        for place, parameter in enumerate(self.parameters):
            state = self.optimizer.state.pop(parameter, None)
            own = None if state is None else self._own_state(state, place)
            if own is not None:
                self.optimizer.state[parameter] = own

    def _install(self) -> None:
        self.optimizer.register_step_pre_hook(self._before)
        post = self.optimizer.register_step_post_hook(self._after)
        # run first, so that all other hooks see all parameters and gradients; torch has no public API for the order
        self.optimizer._optimizer_step_post_hooks.move_to_end(post.id, last=False)  # type: ignore[attr-defined]
        self.optimizer.register_state_dict_post_hook(self._complete)
        self.optimizer.register_load_state_dict_pre_hook(self._select)
        self.optimizer.consolidate_state_dict = self.consolidate_state_dict  # type: ignore[attr-defined]
