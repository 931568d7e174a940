"""Hooks that make the optimizer step this rank's share and gather the other shares."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, wraps
from operator import is_
from types import MethodType
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.agree import differing
from lightning_sparse.exchange.communicator import Group, HierCommunicator
from lightning_sparse.internals import runs_first, runs_last
from lightning_sparse.messages import human_bytes, log
from lightning_sparse.optimizers import ELEMENTWISE, is_tested, refuse, step_cost
from lightning_sparse.pto.gather import FlatGather
from lightning_sparse.pto.state import StateByPart, collect, cut_state, join_states, placed_like
from lightning_sparse.sharding import Part, Parts, flat_view, flatten_like, loads_of, parameters_of, partition_new
from lightning_sparse.topology import Topology, new_subgroup

STEPS = 6
"""Number of steps of each kind that ``scope="auto"`` times. The first step allocates memory, and does not count."""

UNTESTED = (
    "it is not tested. If it computes each parameter from the parameter's gradient and state alone, use "
    "PTOCallback(trusted_optimizers=['{}'])"
)
Scope = Literal["auto", "node", "world"]
"""The ranks that share a step."""


def check_scope(scope: object) -> None:
    if scope not in get_args(Scope):
        raise ValueError(
            f"scope={scope!r} must be 'auto', 'node' or 'world'. Use 'auto' to shard the optimizer step if this is "
            f"faster. 'node' gathers over the fast links inside each node. 'world' saves the most memory, but gathers "
            f"over slow links."
        )


def communicator_of(topology: Topology, scope: Scope, *, timeout: timedelta | None = None) -> HierCommunicator:
    """Return a communicator whose ``gather`` spans the scope. A collective if nodes have different numbers of devices.

    ``"auto"`` is the node, or the world if every node has one rank.

    Args:
        topology: from ``topology.discover()``, with process groups for this communicator only.
        timeout: timeout of new groups.
    """
    check_scope(scope)
    # The gradient reduction runs in other threads, so it must not share process groups with this communicator.
    alone = all(len(node) == 1 for node in topology.nodes)
    if scope == "world" or (scope == "auto" and alone) or topology.kind in ("one node", "one rank"):
        return HierCommunicator(topology, node=Group(tuple(range(topology.world_size)), topology.rank, topology.world))
    # A group gathers in ascending order of ranks, even if the node's devices have another order.
    nodes = tuple(tuple(sorted(node)) for node in topology.nodes)
    handle = topology.intra
    if topology.kind == "unequal nodes":  # the topology has no groups for them
        handle = new_subgroup(nodes, timeout, "the shared step")
    return HierCommunicator(topology, node=Group(nodes[topology.node_index], topology.rank, handle))


class ShardedStep:
    """Shards the step of `optimizer`: each rank steps its parameters and gathers the others. Create it on all ranks.

    Args:
        optimizer: the optimizer. It gets a method ``consolidate_state_dict(to=0)``: call it on all ranks before
            ``state_dict()`` on rank `to`.
        communicator: from ``communicator_of()``.
        names: names of the parameters by ``id()``, for messages.
        uncut: ``id()`` of each parameter with sparse gradients, which is not divided.
        auto: time the full step, then the sharded step, and keep the faster one.
        gather: gather the parameters after each step. False: the caller gathers, on every rank.
        trusted: shard the step although the optimizer is untested.

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
        trusted: bool = False,
    ) -> None:
        refuse(optimizer)
        self.optimizer, self._cost = optimizer, partial(step_cost, optimizer)
        self.communicator = communicator
        self.group = communicator.node
        self.active = True
        self.steps = 0
        self.parameters: list[Tensor] = []
        self.parts: list[Parts] = []
        self._names = names or {}
        self._uncut = frozenset(uncut)
        self._choice = AutoScope() if auto else None
        self._compared = False
        self._gathers = gather
        self._share = LocalShard()
        # Parameters that leave the groups and return keep their owners, and so their optimizer state. Python reuses the
        # ids of freed tensors, so the keys are tensors.
        self._parts_of: dict[Tensor, Parts] = {}
        self._depth = 0  # number of nested steps
        self._unfinished = False
        self._consolidated: dict[int, Any] | None = None
        self.follow_groups()
        self.device = self.parameters[0].device  # for the collectives, even if the module moves to the CPU
        if not (trusted or is_tested(optimizer)):
            self._turn_off(UNTESTED.format(type(optimizer).__name__))
            return
        self._drop_unowned_state()
        self._install()

    @property
    def sharing(self) -> bool:
        return self.active and (self._choice is None or self._choice.sharing)

    @property
    def local_parts(self) -> list[Part | None]:
        """The part of each parameter that this rank steps, or None."""
        place = self.group.place
        return [next((part for part in parts if part.owner == place), None) for parts in self.parts]

    def describe(self) -> str:
        size = self.group.size
        loads = loads_of(self.parts, list(map(self._cost, self.parameters)), size)
        unbalance = max(loads) * size / max(1, sum(loads))
        cut = sum(len(parts) > 1 for parts in self.parts)
        return (
            f"{size} ranks share the step of {type(self.optimizer).__name__}: {len(self.parameters)} parameters, of "
            f"which {cut} are split between ranks. The largest share is {unbalance:.2f} times the mean. A rank "
            f"receives {human_bytes(self._gather.nbytes)} per step"
        )

    # -- around the step -----------------------------------------------------------------------------------------------

    def _install(self) -> None:
        optimizer = self.optimizer
        step: Callable[..., Any] = optimizer.step

        @wraps(getattr(step, "__func__", step))
        def outermost(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._depth = 0  # in case a step raised
            runs_last(optimizer, before.id)  # other hooks see all gradients, also if they were registered later
            try:
                return step(*args, **kwargs)
            except BaseException:
                self._share.restore()  # restore the shapes after any exception
                raise

        # A subclass may call super().step(), which runs the hooks again, so only the outermost call counts. It is a
        # bound method because learning rate schedulers wrap its __func__.
        optimizer.step = MethodType(outermost, optimizer)  # type: ignore[method-assign]
        before = optimizer.register_step_pre_hook(self._before)
        post = optimizer.register_step_post_hook(self._after)
        runs_first(optimizer, post.id)  # before all other hooks, which see all parameters and gradients
        optimizer.register_state_dict_post_hook(self._complete)
        optimizer.register_load_state_dict_pre_hook(self._select)
        optimizer.consolidate_state_dict = self.consolidate_state_dict  # type: ignore[attr-defined]

    def _before(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        if not self.active or self._depth > 1:
            return None
        self._refuse_if_unfinished()
        self._consolidated = None
        # The closure must run before the step, because it computes the gradients that this hook hides.
        replay, args, kwargs = closure_first(args, kwargs)
        self.follow_groups()
        self._compare_ranks()
        if self._choice is not None:
            self._choice.begin(self.device)
        if self.sharing:
            self._unfinished = True
            self._share.apply(self.parameters, self.local_parts)
            if replay is not None:
                replay.only_once = type(self.optimizer).__name__
        return args, kwargs

    def _after(self, *_: Any) -> None:
        self._depth -= 1
        if not self.active or self._depth:
            return
        if self.sharing:
            self._share.restore()
            if self._gathers:
                self.communicator.error_context = f"while step {self.steps} gathered the parameters"
                self._gather(self.communicator)
        self._unfinished = False
        self.steps += 1
        if self._choice is not None:
            self._choose(self._choice)

    def _refuse_if_unfinished(self) -> None:
        if self._unfinished:
            self._share.restore()
            raise RuntimeError(
                f"step {self.steps} of {type(self.optimizer).__name__} raised an exception before the parameters were "
                f"gathered, so ranks have different parameters. Resume from the last checkpoint."
            )

    def _turn_off(self, reason: str) -> None:
        self.active, self._choice = False, None
        if self.group.rank == 0:
            log.warning("PTO is off for %s; every rank runs the full step: %s.", type(self.optimizer).__name__, reason)

    def follow_groups(self) -> None:
        # add_param_group() may have added parameters.
        parameters = parameters_of(self.optimizer)
        if len(parameters) == len(self.parameters) and all(map(is_, parameters, self.parameters)):
            return
        size = self.group.size
        by_id = {id(parameter): parts for parameter, parts in self._parts_of.items()}
        elementwise = type(self.optimizer) in ELEMENTWISE
        self.parts = partition_new(
            parameters, by_id, size, self._cost, lambda parameter: elementwise and id(parameter) not in self._uncut
        )
        self.parameters = parameters
        self._parts_of |= dict(zip(parameters, self.parts, strict=True))
        self._gather = FlatGather(self.parameters, self.parts, self.group.place, size)

    def _compare_ranks(self) -> None:
        # Sharding needs bit-identical parameters and gradients on all ranks, which the first step checks.
        if self._compared:
            return
        both = [tensor for p in self.parameters for tensor in (p, p.grad)]
        for place in differing(both, self.communicator.flat_all_reduce, self.parameters[0].device):
            index, what = place // 2, ("parameter", "gradient")[place % 2]
            name = self._names.get(id(self.parameters[index]), f"number {index}")
            raise ValueError(
                f"parameter {name}: its {what} differs between ranks, but a sharded step needs it equal. Let DDP "
                f"reduce every gradient (no no_sync() before a step, no parameter outside the module), or remove "
                f"PTOCallback."
            )
        self._compared = True

    def release(self) -> None:
        """Give all state to all ranks, which run the full step from now on. Collectives of the scope."""
        if self.sharing:
            self._return_state()
            self.active, self._choice = False, None
            del self.optimizer.consolidate_state_dict  # type: ignore[attr-defined]

    # -- scope "auto" --------------------------------------------------------------------------------------------------

    def _choose(self, choice: AutoScope) -> None:
        choice.end(self.device)
        if choice.left == STEPS:
            self._drop_unowned_state()
        if choice.left:
            return
        timing = choice.verdict(self.communicator, self.device)
        if timing.shared < timing.plain:
            self._choice = None
            if self.group.rank == 0:
                log.info("PTO is on for %s: %s", type(self.optimizer).__name__, timing)
        else:
            self.release()
            if self.group.rank == 0:
                log.info("PTO is off for %s; every rank runs the full step: %s.", type(self.optimizer).__name__, timing)

    def _return_state(self) -> None:
        state = self.optimizer.state
        like = next((dict(state[p]) for p in self.parameters if state.get(p)), {})
        mine: dict[int, Any] = {}
        for rank in self.group.ranks:
            self.consolidate_state_dict(to=rank)
            mine = mine or self._consolidated or {}
            self._consolidated = None
        for place, whole in mine.items():
            parameter = self.parameters[place]
            if len(self.parts[place]) > 1 or parameter not in state:
                state[parameter] = placed_like(whole, like, parameter.device)

    # -- state and checkpoints -----------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect all state on rank `to`, before ``state_dict()``. All ranks call it."""
        self._refuse_if_unfinished()
        if not self.sharing or to not in self.group.ranks:
            return  # every rank has all state
        state = self.optimizer.state
        owned = [
            (i, part) for i, part in enumerate(self.local_parts) if part is not None and self.parameters[i] in state
        ]
        mine = {(i, part.begin): state[self.parameters[i]] for i, part in owned}
        collected = collect(mine, self.group, self.device, to)
        self._consolidated = None if collected is None else self._joined(collected)

    def _joined(self, collected: StateByPart) -> dict[int, Any]:
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
                f"state_dict() of {type(self.optimizer).__name__}: this rank has only the state of its share. Call "
                f"optimizer.consolidate_state_dict(to=rank) on all ranks first, then state_dict() on that rank."
            )
        indices = range(len(self.parameters))
        general = {key: value for key, value in state_dict["state"].items() if key not in indices}
        state_dict["state"] = {**self._consolidated, **general}

    def _select(self, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        self.follow_groups()
        self._consolidated = None
        ids = [key for group in state_dict["param_groups"] for key in group["params"]]
        if not self.sharing or len(ids) != len(self.parts):  # for a wrong number, the optimizer raises
            return None
        places = {key: place for place, key in enumerate(ids)}
        states = {key: self._own_state(state, places.get(key)) for key, state in state_dict["state"].items()}
        return {**state_dict, "state": {key: state for key, state in states.items() if state is not None}}

    def _own_state(self, state: Any, place: int | None) -> Any:
        # State that belongs to no parameter stays on every rank.
        if place is None:
            return state
        part = self.local_parts[place]
        if part is None:
            return None
        return state if len(self.parts[place]) == 1 else cut_state(state, self.parameters[place], part)

    def _drop_unowned_state(self) -> None:
        if not self.sharing:
            return
        for place, parameter in enumerate(self.parameters):
            state = self.optimizer.state.pop(parameter, None)
            own = None if state is None else self._own_state(state, place)
            if own is not None:
                self.optimizer.state[parameter] = own


def has_unfinished_step(optimizer: Optimizer) -> bool:
    """Return whether an exception interrupted a sharded step."""
    # The ranks then hold different parameters.
    owner = getattr(getattr(optimizer, "consolidate_state_dict", None), "__self__", None)
    return isinstance(owner, ShardedStep) and owner._unfinished


class LocalShard:
    """Hides gradients of other ranks' parameters from the optimizer, and narrows divided parameters."""

    def __init__(self) -> None:
        self._whole: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, its data, its gradient

    def apply(self, parameters: Sequence[Tensor], local_parts: Sequence[Part | None]) -> None:
        for parameter, part in zip(parameters, local_parts, strict=True):
            grad = parameter.grad
            if grad is None or (part is not None and part.end - part.begin == parameter.numel()):
                continue
            if part is not None and grad.is_sparse:
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse and cannot be divided. "
                    f"Use sparse=False, or pass its id() to ShardedStep in `uncut`."
                )
            self._whole.append((parameter, parameter.data, grad))
            parameter.grad = None
            if part is not None:
                narrow = flatten_like(parameter, grad)[part.begin : part.end]
                parameter.data = flat_view(parameter)[part.begin : part.end]
                parameter.grad = narrow

    def restore(self) -> None:
        for parameter, data, grad in self._whole:
            parameter.grad = None
            parameter.data = data
            parameter.grad = grad
        self._whole.clear()


# -- closures: their gradients are needed first, and they must not run twice -------------------------------------------


class CachedClosure:
    """A closure that has already run. The first call returns its result; later calls run it."""

    def __init__(self, result: Any, closure: Callable[[], Any]) -> None:
        self.result, self.closure = result, closure
        self.calls = 0
        self.only_once = ""  # name of an optimizer with a sharded step, for which a second call is an error

    def __call__(self) -> Any:
        self.calls += 1
        if self.calls == 1:
            return self.result
        if self.only_once:
            raise RuntimeError(
                f"{self.only_once} evaluates its closure more than once per step, so its step cannot be sharded. "
                f"Remove PTOCallback."
            )
        return self.closure()


def closure_first(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[CachedClosure | None, tuple[Any, ...], dict[str, Any]]:
    """Run the closure of step(), and return its `CachedClosure` and the arguments of step() with it."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None, args, kwargs
    with torch.enable_grad():
        replay = CachedClosure(closure(), closure)
    if "closure" in kwargs:
        return replay, args, {**kwargs, "closure": replay}
    return replay, (args[0], replay, *args[2:]), kwargs


# -- scope "auto": time the full step, then the shared one, and keep the faster ----------------------------------------


class Timing(NamedTuple):
    """Seconds per step of the slowest rank: the full step, and the sharded step with its gather."""

    plain: float
    shared: float

    def __str__(self) -> str:
        return f"{self.plain * 1e3:.2f} ms for the full step, {self.shared * 1e3:.2f} ms shared and gathered"


@dataclass
class AutoScope:
    _taken: list[float] = field(default_factory=list)
    _since: float = 0.0

    @property
    def sharing(self) -> bool:
        return self.left <= STEPS

    @property
    def left(self) -> int:
        return 2 * STEPS - len(self._taken)

    def begin(self, device: torch.device) -> None:
        self._since = _now(device)

    def end(self, device: torch.device) -> None:
        self._taken.append(_now(device) - self._since)

    def verdict(self, communicator: HierCommunicator, device: torch.device) -> Timing:
        kinds = [self._taken[1:STEPS], self._taken[STEPS + 1 :]]
        slowest = torch.tensor([statistics.median(kind) for kind in kinds], dtype=torch.float64, device=device)
        communicator.flat_all_reduce(slowest, op=dist.ReduceOp.MAX)
        return Timing(*slowest.tolist())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
