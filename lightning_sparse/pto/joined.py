"""The sharded step joined with the hierarchical reduction: gradients stay where they were summed, parameters travel.

After the exchange between nodes each device of a node holds one shard of the mean gradient. Alone, the reduction now
gathers the shards inside the node, and the sharded step gathers parameters afterwards: the same bytes, twice. Joined,
each device steps exactly the shards that it holds, and only the parameters travel:

==================== ======================================================= ===========================================
                     alone                                                   joined
==================== ======================================================= ===========================================
reduction, step 4    all-gather of gradients inside the node                 none
ownership            balanced by cost                                        the shards of the reduction's groups
gradients            whole on every rank                                     this rank's part; the rest is zero or None
clipping by norm     of the whole                                            partial norms, summed over the node
inf of a scaler      seen by all                                             seen by one device, told to the node
==================== ======================================================= ===========================================

Whatever wants to see whole gradients rules it out; `why_not` says what it was.
"""

from typing import Any

import torch
import torch.distributed as dist

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.pto.narrow import keep_part, part_of_grad
from lightning_sparse.pto.optimizers import is_elementwise
from lightning_sparse.pto.ownership import Part, Parts
from lightning_sparse.pto.sharded_step import ShardedStep

_SEES_GRADIENTS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_OF_THE_MODULE = (
    *_SEES_GRADIENTS, "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "backward"
)  # fmt: skip
_WHOLE_BITS = (torch.float32, torch.float64)


def why_not(trainer: Any, module: Any, communicator: HierCommunicator, own: object) -> str:
    """What rules the joined form out, for the log; empty for nothing.

    Args:
        own: the callback that asks.
    """
    state = getattr(trainer.strategy, "hier_state", None)
    if state is None or state.topology.kind != "hierarchical" or state.topology.num_devices == 1:
        return "no gradients are gathered inside a node"
    if communicator.topology.nodes != state.topology.nodes:
        return "the step is shared by more ranks than a node has"
    if not module.automatic_optimization or len(trainer.optimizers) != 1:
        return "it needs automatic optimization with one optimizer"
    optimizer = trainer.optimizers[0]
    if not is_elementwise(optimizer):
        return f"{type(optimizer).__name__} is not known to step each element by itself"
    if any(p.dtype not in _WHOLE_BITS for group in optimizer.param_groups for p in group["params"]):
        return "steps of 16-bit parameters round differently at the edges of a shard"
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    if any(not type(getattr(hook, "__self__", None)).__module__.startswith("lightning_sparse.") for hook in hooks):
        return "a hook of the optimizer's step may look at whole gradients"
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and any(group.get("fused") for group in optimizer.param_groups):
        return "a fused optimizer and a loss scaler look for inf in the gradients that a rank has"
    base = next(cls for cls in type(module).__mro__ if cls.__name__ == "LightningModule")
    seen = [name for name in _OF_THE_MODULE if getattr(type(module), name) is not getattr(base, name)]
    for callback in trainer.callbacks:
        base = next(cls for cls in type(callback).__mro__ if cls.__name__ == "Callback")
        overrides = [name for name in _SEES_GRADIENTS if getattr(type(callback), name) is not getattr(base, name)]
        seen += [f"{type(callback).__name__}.{name}" for name in overrides if callback is not own]
    return f"{', '.join(seen)} may look at whole gradients" if seen else ""


class Joined:
    """Follows the reduction's groups, and keeps gradients and the step to this device's shards.

    Args:
        step: of the one optimizer.
        state: the reduction's state.
        names: of parameters by their ``id()``.
        precision: Lightning's precision plugin, whose clipping by norm is replaced until end().
    """

    def __init__(self, step: ShardedStep, state: Any, names: dict[int, str], precision: Any) -> None:
        self._step, self._state, self._names, self._precision = step, state, names, precision
        self._seen: tuple[Any, ...] = ()
        self._round = state.round
        self._in_parts = False  # whether gradients are, now
        self._clip_whole = precision.clip_grad_by_norm
        precision.clip_grad_by_norm = self._clip_by_norm

    def before_batch(self) -> None:
        """Take over the reduction's groups once they are settled, and again when they or the optimizer's parameters
        change. All ranks call it."""
        if not self._step.sharing:
            self._state.kept_sharded = frozenset()
            return
        if not self._step.steps:  # the first step looks whether ranks agree
            return
        self._step.follow_groups()
        seen = (self._state.layout.settled, tuple(map(id, self._step.parameters)))
        if seen == self._seen:
            return
        self._seen = seen
        named = [self._names.get(id(p), "") for p in self._step.parameters]
        # Of a group with a parameter that nobody steps, or that is added later, everybody needs the whole.
        groups = [g for g in seen[0] if self._state.is_sharded(g) and set(named).issuperset(g.names)]
        shards = self._shards(groups)
        devices = {part.owner for parts in shards.values() for part in parts}
        if len(devices) < self._state.topology.num_devices:  # a device without any gradient cannot look for inf
            groups, shards = [], {}
        self._step.take_over([shards.get(name, parts) for name, parts in zip(named, self._step.parts, strict=True)])
        self._state.kept_sharded = frozenset(groups)

    def after_backward(self) -> None:
        """Nothing of a gradient that was not gathered is left but what this device holds, once a round has reduced it.
        Others stay whole: what waits for them is told by whether they are there when the optimizer steps."""
        if self._state.round == self._round:
            return  # gradients are accumulated still
        self._round = self._state.round
        self._in_parts = bool(self._state.kept_sharded) and self._step.sharing
        if not self._in_parts:
            return
        kept = {name for group in self._state.kept_sharded for name in group.names}
        for parameter, part in zip(self._step.parameters, self._step.mine, strict=True):
            if parameter.grad is None or self._names.get(id(parameter)) not in kept:
                continue
            if part is None:
                parameter.grad = None
            elif part.end - part.begin < parameter.numel():
                keep_part(parameter, part)

    def share_found_inf(self, scaler: Any) -> None:
        """Let all devices of the node know of an inf that one of them has met. A collective of the node."""
        if not self._in_parts:
            return
        found = list(scaler._per_optimizer_states[id(self._step.optimizer)]["found_inf_per_device"].values())
        worst = torch.stack(found).amax(0) if found else torch.zeros(1, device=self._step.device)
        self._step.communicator.node_all_reduce(worst, op=dist.ReduceOp.MAX)
        for each in found:
            each.copy_(worst)

    @torch.no_grad()
    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """As ``clip_grad_norm_`` clips whole gradients. A collective of the node."""
        if not self._in_parts:
            self._clip_whole(optimizer, clip_val)
            return
        with_grad = [
            (p, part) for p, part in zip(self._step.parameters, self._step.mine, strict=True) if p.grad is not None
        ]
        own = [part_of_grad(p, part) for p, part in with_grad if part is not None]
        squares = torch.zeros((), dtype=torch.float32, device=self._step.device)
        if own:
            squares += torch.stack([norm.float() for norm in torch._foreach_norm(own)]).square().sum()
        self._step.communicator.node_all_reduce(squares, op=dist.ReduceOp.SUM)
        factor = (clip_val / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for parameter, _ in with_grad:
            assert parameter.grad is not None
            parameter.grad.mul_(factor.to(parameter.grad.dtype))

    def end(self) -> None:
        """The next fit may be without this."""
        self._state.kept_sharded = frozenset()
        del self._precision.clip_grad_by_norm  # the class's own is found again

    def _shards(self, groups: list[Any]) -> dict[str, Parts]:
        """By parameter name, which device holds what of it."""
        topology = self._state.topology
        parts: dict[str, list[Part]] = {}
        for group in groups:
            for device in range(topology.num_devices):
                for name, _, there in group.shard_slices(group.names, device, topology.num_devices):
                    parts.setdefault(name, []).append(Part(device, there.start, there.stop))
        return {name: tuple(each) for name, each in parts.items()}
