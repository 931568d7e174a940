"""The joined form: step the gradient shards of the hierarchical reduction, so that only parameters are gathered.

After the exchange between nodes, each device of a node holds one shard of the mean gradient. Separately, the reduction
gathers gradients and the sharded step gathers parameters: the same bytes twice. Joined, each device steps its shards:

================== ======================================= ===========================================
                   separate                                joined
================== ======================================= ===========================================
reduction, step 4  all-gather of gradients inside the node none
ownership          balanced by cost                        the shards of the reduction's groups
gradients          whole on every rank                     this rank's part; the rest is zero or None
clipping by norm   of the whole                            partial norms, summed over the node
inf of a scaler    found by all devices                    found by one device, reduced over the node
================== ======================================= ===========================================

The joined form is not used if something may read whole gradients; see `fallback_reason`.
"""

from typing import Any

import torch
import torch.distributed as dist

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.pto.narrow import keep_part, part_of_grad
from lightning_sparse.pto.optimizers import is_elementwise
from lightning_sparse.pto.sharded_step import ShardedStep
from lightning_sparse.sharding import Part, Parts

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
    if communicator.topology.nodes != state.topology.nodes:
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
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and any(group.get("fused") for group in optimizer.param_groups):
        return "a fused optimizer checks only the gradients of its own rank for inf"
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
        precision: Lightning's precision plugin. Its clipping by norm is replaced until end().
    """

    def __init__(self, step: ShardedStep, state: Any, names: dict[int, str], precision: Any) -> None:
        self._step, self._state, self._names, self._precision = step, state, names, precision
        self._seen: tuple[Any, ...] = ()
        self._round = state.round
        self._in_parts = False  # whether gradients are sharded now
        self._clip_whole = precision.clip_grad_by_norm
        precision.clip_grad_by_norm = self._clip_by_norm

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
        if len(devices) < self._state.topology.num_devices:  # a device without gradients cannot check for inf
            groups, shards = [], {}
        self._step.take_over([shards.get(name, parts) for name, parts in zip(named, self._step.parts, strict=True)])
        self._state.kept_sharded = frozenset(groups)

    def after_backward(self) -> None:
        """After a reduction, keep only this device's part of each gradient that was not gathered."""
        if self._state.round == self._round:
            return  # gradients are still accumulating
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
        """Reduce the scaler's inf flag over the node. A collective of the node."""
        if not self._in_parts:
            return
        found = list(scaler._per_optimizer_states[id(self._step.optimizer)]["found_inf_per_device"].values())
        worst = torch.stack(found).amax(0) if found else torch.zeros(1, device=self._step.device)
        self._step.communicator.node_all_reduce(worst, op=dist.ReduceOp.MAX)
        for each in found:
            each.copy_(worst)

    @torch.no_grad()
    def _clip_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip as ``clip_grad_norm_`` clips whole gradients. A collective of the node."""
        if not self._in_parts:
            self._clip_whole(optimizer, clip_val)
            return
        held = [(p, part) for p, part in zip(self._step.parameters, self._step.mine, strict=True) if p.grad is not None]
        own = [part_of_grad(p, part) for p, part in held if part is not None]
        squares = torch.zeros((), dtype=torch.float32, device=self._step.device)
        if own:
            squares += torch.stack([norm.float() for norm in torch._foreach_norm(own)]).square().sum()
        self._step.communicator.node_all_reduce(squares, op=dist.ReduceOp.SUM)
        factor = (clip_val / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for parameter, _ in held:
            assert parameter.grad is not None
            parameter.grad.mul_(factor.to(parameter.grad.dtype))

    def end(self) -> None:
        """Undo the changes to the reduction and the precision plugin."""
        self._state.kept_sharded = frozenset()
        del self._precision.clip_grad_by_norm  # the instance attribute, which hid the method

    def _shards(self, groups: list[Any]) -> dict[str, Parts]:
        """Return the parts of each parameter by name."""
        topology = self._state.topology
        parts: dict[str, list[Part]] = {}
        for group in groups:
            for device in range(topology.num_devices):
                for name, _, there in group.shard_slices(group.names, device, topology.num_devices):
                    parts.setdefault(name, []).append(Part(device, there.start, there.stop))
        return {name: tuple(each) for name, each in parts.items()}
