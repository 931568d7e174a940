"""The joined form: step the gradient shards of the hierarchical reduction, so that only parameters are gathered.

After the exchange between nodes, each device of a node holds one shard of the mean gradient. Separately, the reduction
gathers gradients and the sharded step gathers parameters: the same bytes twice. Joined, each device steps its shards:

================== ======================================= ===========================================
                   separate                                joined
================== ======================================= ===========================================
reduction, step 4  all-gather of gradients inside the node none
ownership          balanced by cost                        the shards of the reduction's groups
gradients          whole on every rank                     this rank's part; the rest is zero or None
================== ======================================= ===========================================

The joined form is not used if something may read whole gradients; see `fallback_reason`.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.pto.optimizers import is_elementwise
from lightning_sparse.pto.step import ShardedStep
from lightning_sparse.sharding import Part, Parts, in_order_of, memory_of

_CALLBACK_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_MODULE_HOOKS = (*_CALLBACK_HOOKS, "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "backward")


def fallback_reason(trainer: Any, module: Any, communicator: HierCommunicator, own: object) -> str:
    """Return why the joined form cannot be used, for the log; "" if it can.

    Args:
        own: the PTO callback, which is not checked.
    """
    state = getattr(trainer.strategy, "hier_state", None)
    if state is None or state.topology.kind != "hierarchical" or state.topology.num_devices == 1:
        return "no gradients are gathered inside a node"
    if communicator.node.size != state.topology.num_devices:
        return "the scope spans several nodes"
    if not module.automatic_optimization or len(trainer.optimizers) != 1:
        return "it needs automatic optimization with one optimizer"
    optimizer = trainer.optimizers[0]
    if not is_elementwise(optimizer):
        return f"{type(optimizer).__name__} is not known to be elementwise"
    if any(p.dtype not in (torch.float32, torch.float64) for group in optimizer.param_groups for p in group["params"]):
        return "16-bit parameters round differently at the edges of a shard"
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    if any(not type(getattr(hook, "__self__", None)).__module__.startswith("lightning_sparse.") for hook in hooks):
        return "a hook of the optimizer's step may read whole gradients"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "a loss scaler looks for inf in whole gradients"
    if trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "norm").endswith("norm"):
        return "clipping by norm reads whole gradients"
    base = next(cls for cls in type(module).__mro__ if cls.__name__ == "LightningModule")
    seen = [name for name in _MODULE_HOOKS if getattr(type(module), name) is not getattr(base, name)]
    for callback in trainer.callbacks:
        base = next(cls for cls in type(callback).__mro__ if cls.__name__ == "Callback")
        overrides = [name for name in _CALLBACK_HOOKS if getattr(type(callback), name) is not getattr(base, name)]
        seen += [f"{type(callback).__name__}.{name}" for name in overrides if callback is not own]
    return f"{', '.join(seen)} may read whole gradients" if seen else ""


class Joined:
    """Restricts gradients and the step to this device's shards of the reduction's groups.

    Args:
        step: sharded step of the only optimizer.
        state: state of the reduction.
        names: names of the parameters by ``id()``.
    """

    def __init__(self, step: ShardedStep, state: Any, names: dict[int, str]) -> None:
        self._step, self._state, self._names = step, state, names
        self._seen: tuple[Any, ...] = ()
        self._round = state.round

    def before_batch(self) -> None:
        """Take over the reduction's groups when they or the optimizer's parameters change. All ranks call it."""
        if not self._step.sharing:
            self._state.kept_sharded = frozenset()
            return
        if not self._step.steps:  # the first step compares the ranks
            return
        self._step.follow_groups()
        seen = (self._state.layout.settled, tuple(map(id, self._step.parameters)))
        if seen == self._seen:
            return
        self._seen = seen
        named = [self._names.get(id(p), "") for p in self._step.parameters]
        # groups with parameters that are not in the optimizer, or were added later, stay whole
        groups = [g for g in seen[0] if self._state.is_sharded(g) and set(named).issuperset(g.names)]
        shards = self._shards(groups)
        devices = {part.owner for parts in shards.values() for part in parts}
        if len(devices) < self._state.topology.num_devices:  # shards so small that a device would step nothing
            groups, shards = [], {}
        self._step.take_over([shards.get(name, parts) for name, parts in zip(named, self._step.parts, strict=True)])
        self._state.kept_sharded = frozenset(groups)

    def after_backward(self) -> None:
        """After a reduction, keep only this device's part of each gradient that was not gathered."""
        if self._state.round == self._round:
            return  # gradients are still accumulating
        self._round = self._state.round
        if not self._step.sharing:
            return
        kept = {name for group in self._state.kept_sharded for name in group.names}
        for parameter, part in zip(self._step.parameters, self._step.mine, strict=True):
            if parameter.grad is None or self._names.get(id(parameter)) not in kept:
                continue
            if part is None:
                parameter.grad = None
            elif part.end - part.begin < parameter.numel():
                keep_part(parameter, part)

    def end(self) -> None:
        """Let the reduction gather all gradients again."""
        self._state.kept_sharded = frozenset()

    def _shards(self, groups: list[Any]) -> dict[str, Parts]:
        """Return the parts of each parameter by name."""
        topology = self._state.topology
        parts: dict[str, list[Part]] = {}
        for group in groups:
            for device in range(topology.num_devices):
                for name, _, there in group.shard_slices(group.names, device, topology.num_devices):
                    parts.setdefault(name, []).append(Part(device, there.start, there.stop))
        return {name: tuple(each) for name, each in parts.items()}


def keep_part(parameter: Tensor, part: Part) -> None:
    """Zero the gradient outside the part, in place. Its memory layout may differ from that of the parameter."""
    grad = parameter.grad
    assert grad is not None
    kept = torch.empty_strided(parameter.shape, parameter.stride(), dtype=grad.dtype, device=grad.device).zero_()
    here = slice(part.begin, part.end)
    memory_of(kept)[here] = in_order_of(parameter, grad)[here]
    grad.copy_(kept)
