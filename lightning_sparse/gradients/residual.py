"""Error feedback: what was not sent, per compression group. No communication here but the gather that is passed in.

Each device keeps, for each group, one fp32 shard of S elements: the part of its node's gradients that has not been
applied yet, in units of the averaged gradient. Nothing is lost means, over any rounds,

    (1/P) * sum over ranks of gradients = sum of what was applied + sum over nodes of residuals.

**Staged, then settled.** A round writes the next residual beside the current one. Which of them counts is known only
later: when the optimizer stepped, the round's gradient was used and the staged one becomes current; when the user (or
a loss scaler that met an inf) threw the gradient away, the current one stays as it was before the round. And while a
gradient accumulates over several rounds before its step, each round starts from the staged residual and the choice
stays open: all of these rounds count, or none. All may happen in one group, so the choice is
per parameter.

**Parked.** When a group no longer exists because the layout changed, its residual is gathered inside the node and
parked by parameter name until a new group has those names. A parameter that was frozen stays parked. A staged residual
whose choice is open is kept in the same way, as *proposed*: the choice stays open.
"""

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sparse.gradients.groups import ParamGroup

Gather = Callable[[Tensor], Tensor]
"""All-gather inside the node: shard_S -> flat tensor of L*S elements."""


@dataclass
class ResidualStore:
    """The residuals of one device.

    Args:
        device_index: l, this device's place in its node.

    Attributes:
        known: groups of which some device of the node may hold a residual; the same on all of them, which `current` is
            not: where all was sent but a parameter's gradient thrown away, only devices with a piece of it keep any.
    """

    device_index: int
    num_devices: int
    current: dict[ParamGroup, Tensor] = field(default_factory=dict)
    staged: dict[ParamGroup, Tensor | None] = field(default_factory=dict)
    parked: dict[str, Tensor] = field(default_factory=dict)
    proposed: dict[str, Tensor] = field(default_factory=dict)
    spent: set[str] = field(default_factory=set)
    known: set[ParamGroup] = field(default_factory=set)
    _spare: dict[ParamGroup, Tensor] = field(default_factory=dict)

    def buffer(self, group: ParamGroup, device: torch.device) -> Tensor:
        """Uninitialised room for the group's next residual, fp32 of S elements; stage() takes it."""
        spare = self._spare.pop(group, None)
        if spare is not None and spare.device == device:
            return spare
        return torch.empty(group.shard_numel(self.num_devices), dtype=torch.float32, device=device)

    def clear(self) -> None:
        """Drop everything."""
        for held in (self.current, self.staged, self.parked, self.proposed, self.spent, self.known, self._spare):
            held.clear()

    def latest(self, group: ParamGroup) -> Tensor | None:
        """What a round starts from: the staged residual where one is still open."""
        return self.staged[group] if group in self.staged else self.current.get(group)

    def stage(self, group: ParamGroup, shard_S: Tensor | None) -> None:
        """Propose the group's next residual; None means that everything was sent."""
        replaced = self.staged.get(group)
        if replaced is not None:
            self._spare[group] = replaced
        self.staged[group] = shard_S
        self.known.add(group)

    def settle(self, discarded: Set[str], waiting: Set[str] = frozenset()) -> None:
        """Make the staged residuals current, but for these parameters.

        Args:
            discarded: their gradient was thrown away, so they keep the residual they had before it.
            waiting: not decided yet; both residuals stay.
        """
        for name in self.spent - discarded - waiting:
            self.parked.pop(name, None)
        self.spent &= waiting
        for name in self.proposed.keys() - waiting:
            proposed = self.proposed.pop(name)
            if name not in discarded:
                self.parked[name] = proposed
        for group in list(self.staged):
            if waiting.isdisjoint(group.names):
                self._settle_whole(group, discarded)
            else:
                self._settle_part(group, discarded, waiting)

    def _settle_whole(self, group: ParamGroup, discarded: Set[str]) -> None:
        before, proposed = self.current.pop(group, None), self.staged.pop(group)
        kept = [name for name in group.names if name in discarded]
        if len(kept) == len(group.names):
            after, free = before, proposed
        else:
            after = self._copied(group, kept, before, proposed) if kept else proposed
            free = before
        if after is not None:
            self.current[group] = after
        if free is not None and free is not after:
            self._spare[group] = free

    def _settle_part(self, group: ParamGroup, discarded: Set[str], waiting: Set[str]) -> None:
        kept = [name for name in group.names if name in discarded]
        used = [name for name in group.names if name not in discarded and name not in waiting]
        before, proposed = self.current.get(group), self.staged[group]
        after = self._copied(group, used, proposed, before) if used else before
        if after is not None:
            self.current[group] = after
        self.staged[group] = self._copied(group, kept, before, proposed) if kept else proposed

    def settled_copy(self, discarded: Set[str]) -> "ResidualStore":
        """What settle() would leave, in a store of its own that may share tensors with this one."""
        copy = ResidualStore(
            self.device_index, self.num_devices, dict(self.current), parked=dict(self.parked), spent=set(self.spent)
        )
        copy.known, copy.proposed = set(self.known), dict(self.proposed)
        copy.staged = {  # where a part of it is not to count, settle() writes to it
            group: t if t is None or discarded.isdisjoint(group.names) else t.clone()
            for group, t in list(self.staged.items())
        }
        copy.settle(discarded)
        return copy

    def restore(self, group: ParamGroup, names: Iterable[str], source_S: Tensor | None, target_S: Tensor) -> None:
        """Copy the named parameters' pieces of ``source_S`` (None: zeros) into ``target_S``."""
        for _, here, _ in group.shard_slices(names, self.device_index, self.num_devices):
            if source_S is None:
                target_S[here].zero_()
            else:
                target_S[here].copy_(source_S[here])

    def regroup(self, group: ParamGroup, gather: Gather, device: torch.device) -> None:
        """Give a new group the residual that its parameters had under other groups.

        A collective inside the node whenever an old group overlaps; all ranks see the same layouts, so all call it.
        Groups of the running round may be staged already, on another thread even: they hold other parameters.
        """
        if group in self.known and not self.parked and not self.proposed:
            return  # groups hold different parameters, so no other overlaps
        names = set(group.names)
        gone = [old for old in list(self.known) if old != group and not names.isdisjoint(old.names)]
        for old in sorted(gone, key=lambda each: each.names):  # a set's order is another in each process
            self.known.remove(old)
            self._spare.pop(old, None)
            self.parked.update(self._gathered(old, self.current.pop(old, None), gather, device) or {})
            if old in self.staged:  # the choice stays open
                found = self._gathered(old, self.staged.pop(old), gather, device)
                zeros = {name: torch.zeros(n, device=device) for name, n in zip(old.names, old.numels, strict=True)}
                self.proposed.update(found or zeros)
        if not names.isdisjoint(self.parked):
            self.current[group] = self._taken(group, self.parked, None, device)
            self.known.add(group)
        if not names.isdisjoint(self.proposed):
            self.staged[group] = self._taken(group, self.proposed, self.current.get(group), device)
            self.known.add(group)

    def _gathered(
        self, group: ParamGroup, shard_S: Tensor | None, gather: Gather, device: torch.device
    ) -> dict[str, Tensor] | None:
        """Return each parameter's residual from all devices; None if no device has any. A collective of the node."""
        if not gather(torch.tensor([shard_S is not None], dtype=torch.uint8, device=device)).any():
            return None
        nothing = torch.zeros(group.shard_numel(self.num_devices), dtype=torch.float32, device=device)
        flat = gather(nothing if shard_S is None else shard_S)
        return {name: flat[place].clone() for name, place in group.slices.items()}

    def _taken(
        self, group: ParamGroup, held: dict[str, Tensor], before_S: Tensor | None, device: torch.device
    ) -> Tensor:
        """Move the group's parameters from ``held`` into the shard of this device, and return the shard.

        Args:
            before_S: the shard so far, for the other parameters; None stands for zeros.
        """
        numel, names = group.shard_numel(self.num_devices), [name for name in group.names if name in held]
        shard_S = torch.zeros(numel, dtype=torch.float32, device=device) if before_S is None else before_S.clone()
        for name, here, there in group.shard_slices(names, self.device_index, self.num_devices):
            shard_S[here].copy_(held[name][there])
        for name in names:
            del held[name]
        return shard_S

    def spend_parked(
        self, group: ParamGroup, num_nodes: int, rescale: Callable[[Tensor], Tensor], grad_N: Tensor
    ) -> None:
        """Add what is parked to a gradient that is already summed over all ranks: where there are no shards, as on one
        node after a run on several, it would wait for ever. It stays parked until the gradient was used."""
        for name, place in group.slices.items():
            if name in self.parked and name not in self.spent:
                grad_N[place].add_(rescale(self.parked[name] * num_nodes))
                self.spent.add(name)

    def _copied(
        self, group: ParamGroup, names: list[str], source_S: Tensor | None, target_S: Tensor | None
    ) -> Tensor | None:
        """``target_S`` with the named parameters' pieces of ``source_S``, in place; None stands for zeros."""
        if target_S is None:
            if source_S is None or not group.shard_slices(names, self.device_index, self.num_devices):
                return None
            target_S = torch.zeros_like(source_S)
        self.restore(group, names, source_S, target_S)
        return target_S
