"""Residuals: the entries of gradients that this device has not sent yet (error feedback).

Each device keeps one shard [S] per group, fp32, in units of the mean gradient. Nothing is lost:

    1/P * sum over ranks of all gradients = sum of all applied gradients + sum over nodes of the residuals

A round proposes the next residual of each group. It is committed after the optimizer has stepped the parameters, so a
dropped gradient leaves the residual unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sparse.gradients.groups import ParamGroup

Gather = Callable[[Tensor], Tensor]
"""All-gather inside the node: shard_S -> flat tensor of L*S elements."""


@dataclass
class Entry:
    """The residual shards of one group, fp32 [S]; None stands for zeros.

    Attributes:
        has_proposal: whether ``proposed`` counts. It is None if everything was sent.
    """

    committed: Tensor | None = None
    proposed: Tensor | None = None
    has_proposal: bool = False

    @property
    def latest(self) -> Tensor | None:
        return self.proposed if self.has_proposal else self.committed


@dataclass
class ResidualStore:
    """The residuals of one device.

    Attributes:
        entries: residuals by group. All devices of a node have the same keys, because collectives follow from them.
        by_name: residuals of parameters in no group, flat and whole.
        proposed_by_name: proposed residuals of these parameters.
        applied: names whose residual in ``by_name`` was added to a gradient that is not stepped yet.
    """

    device_index: int
    num_devices: int
    entries: dict[ParamGroup, Entry] = field(default_factory=dict)
    by_name: dict[str, Tensor] = field(default_factory=dict)
    proposed_by_name: dict[str, Tensor] = field(default_factory=dict)
    applied: set[str] = field(default_factory=set)
    _free_buffers: dict[ParamGroup, Tensor] = field(default_factory=dict)

    @property
    def committed(self) -> dict[ParamGroup, Tensor]:
        entries = list(self.entries.items())
        return {group: entry.committed for group, entry in entries if entry.committed is not None}

    def latest(self, group: ParamGroup) -> Tensor | None:
        return self.entries[group].latest if group in self.entries else None

    def undecided_names(self) -> set[str]:
        """Return the parameters whose residual depends on whether their gradient is stepped."""
        groups = [group for group, entry in list(self.entries.items()) if entry.has_proposal]
        return {name for group in groups for name in group.names} | self.proposed_by_name.keys() | self.applied

    # -- one round -----------------------------------------------------------------------------------------------------

    def buffer(self, group: ParamGroup, device: torch.device) -> Tensor:
        free = self._free_buffers.pop(group, None)
        if free is not None and free.device == device:
            return free
        return torch.empty(group.shard_numel(self.num_devices), dtype=torch.float32, device=device)

    def propose(self, group: ParamGroup, shard_S: Tensor | None) -> None:
        """Propose the next residual; None if everything was sent."""
        entry = self.entries.setdefault(group, Entry())
        if entry.proposed is not None:
            self._free_buffers[group] = entry.proposed
        entry.proposed, entry.has_proposal = shard_S, True

    def commit(self, not_stepped: Set[str], undecided: Set[str] = frozenset()) -> None:
        """Commit the proposals of stepped parameters.

        Args:
            not_stepped: parameters whose gradient was dropped. They keep their committed residual.
            undecided: parameters whose gradient may still be stepped. They keep both residuals.
        """
        for name in self.applied - not_stepped - undecided:
            self.by_name.pop(name, None)
        self.applied &= undecided
        for name in self.proposed_by_name.keys() - undecided:
            proposed = self.proposed_by_name.pop(name)
            if name not in not_stepped:
                self.by_name[name] = proposed
        for group, entry in self.entries.items():
            if entry.has_proposal:
                self._commit_entry(group, entry, not_stepped, undecided)

    def _commit_entry(self, group: ParamGroup, entry: Entry, not_stepped: Set[str], undecided: Set[str]) -> None:
        kept_names = [name for name in group.names if name in not_stepped]
        if not undecided.isdisjoint(group.names):
            stepped = [name for name in group.names if name not in not_stepped and name not in undecided]
            entry.committed = self._with_slices(group, stepped, entry.proposed, entry.committed)
            entry.proposed = self._with_slices(group, kept_names, entry.committed, entry.proposed)
            return
        if len(kept_names) < len(group.names):  # usually nothing is kept, so this copies nothing
            before = entry.committed
            entry.committed = self._with_slices(group, kept_names, before, entry.proposed)
            entry.proposed = before
        if entry.proposed is not None:
            self._free_buffers[group] = entry.proposed
        entry.proposed, entry.has_proposal = None, False

    def drop_proposals(self) -> None:
        for entry in self.entries.values():
            entry.proposed, entry.has_proposal = None, False
        self.proposed_by_name.clear()

    def clear(self) -> None:
        for container in (self.entries, self.by_name, self.proposed_by_name, self.applied, self._free_buffers):
            container.clear()

    def committed_copy(self, not_stepped: Set[str]) -> ResidualStore:
        """Return a copy as `commit` would leave it. It may share tensors with this store."""
        copy = ResidualStore(
            self.device_index,
            self.num_devices,
            by_name=dict(self.by_name),
            proposed_by_name=dict(self.proposed_by_name),
            applied=set(self.applied),
        )
        for group, entry in list(self.entries.items()):
            proposed = entry.proposed
            if proposed is not None and not not_stepped.isdisjoint(group.names):
                proposed = proposed.clone()  # commit() writes into it
            copy.entries[group] = Entry(entry.committed, proposed, entry.has_proposal)
        copy.commit(not_stepped)
        return copy

    def apply_by_name(
        self, group: ParamGroup, num_nodes: int, rescale: Callable[[Tensor], Tensor], grad_N: Tensor
    ) -> None:
        """Add residuals in ``by_name`` to a gradient that is summed over all ranks."""
        # One node has no shards, so it would never send residuals that it loaded from a run on several nodes. The
        # residual stays in ``by_name`` until the gradient is stepped.
        for name, place in group.slices.items():
            if name in self.by_name and name not in self.applied:
                grad_N[place].add_(rescale(self.by_name[name] * num_nodes))
                self.applied.add(name)

    # -- groups that change --------------------------------------------------------------------------------------------

    def regroup(self, group: ParamGroup, gather: Gather, device: torch.device) -> None:
        """Move the residuals of the group's parameters from other groups. A collective if an old group overlaps."""
        # All ranks have the same layouts, so all ranks of the node gather the same groups.
        if group in self.entries and not self.by_name and not self.proposed_by_name:
            return  # groups hold different parameters, so no other group overlaps
        names = set(group.names)
        # A list, because another thread may propose residuals of other groups at the same time.
        overlapping = [old for old in list(self.entries) if old != group and not names.isdisjoint(old.names)]
        for old in sorted(overlapping, key=lambda group: group.names):  # the order of dicts may differ between ranks
            entry = self.entries.pop(old)
            self._free_buffers.pop(old, None)
            self.by_name |= self._gather(old, entry.committed, gather, device)
            if entry.has_proposal:
                zeros = {
                    name: torch.zeros(n, dtype=torch.float32, device=device)
                    for name, n in zip(old.names, old.numels, strict=True)
                }
                self.proposed_by_name |= self._gather(old, entry.proposed, gather, device) or zeros
        entry = self.entries.get(group, Entry())
        if not names.isdisjoint(self.by_name):
            entry.committed = self._scatter(group, self.by_name, None, device)
            self.entries[group] = entry
        if not names.isdisjoint(self.proposed_by_name):
            entry.proposed = self._scatter(group, self.proposed_by_name, entry.committed, device)
            entry.has_proposal = True
            self.entries[group] = entry

    def _gather(
        self, group: ParamGroup, shard_S: Tensor | None, gather: Gather, device: torch.device
    ) -> dict[str, Tensor]:
        # A collective of the node, so all devices must know whether another device has a residual.
        if not gather(torch.tensor([shard_S is not None], dtype=torch.uint8, device=device)).any():
            return {}
        zeros_S = torch.zeros(group.shard_numel(self.num_devices), dtype=torch.float32, device=device)
        flat = gather(zeros_S if shard_S is None else shard_S)
        return {name: flat[place].clone() for name, place in group.slices.items()}

    def _scatter(
        self, group: ParamGroup, by_name: dict[str, Tensor], others_S: Tensor | None, device: torch.device
    ) -> Tensor:
        numel, names = group.shard_numel(self.num_devices), [name for name in group.names if name in by_name]
        # Parameters that are not in `by_name` keep their values of `others_S`.
        shard_S = torch.zeros(numel, dtype=torch.float32, device=device) if others_S is None else others_S.clone()
        for name, shard_slice, param_slice in group.shard_slices(names, self.device_index, self.num_devices):
            shard_S[shard_slice].copy_(by_name[name][param_slice])
        for name in names:
            del by_name[name]
        return shard_S

    def copy_slices(self, group: ParamGroup, names: Iterable[str], source_S: Tensor | None, target_S: Tensor) -> None:
        for _, shard_slice, _ in group.shard_slices(names, self.device_index, self.num_devices):
            if source_S is None:
                target_S[shard_slice].zero_()
            else:
                target_S[shard_slice].copy_(source_S[shard_slice])

    def _with_slices(
        self, group: ParamGroup, names: list[str], source_S: Tensor | None, target_S: Tensor | None
    ) -> Tensor | None:
        if target_S is None:
            if source_S is None or not group.shard_slices(names, self.device_index, self.num_devices):
                return None
            target_S = torch.zeros_like(source_S)
        self.copy_slices(group, names, source_S, target_S)
        return target_S
