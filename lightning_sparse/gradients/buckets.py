"""A DDP bucket cut into compression groups, and put together again.

Mostly a bucket *is* a group. It is several when the whole model comes as one bucket again (a second fit, a resumed
run): then each group is a copy that is written back.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sparse.exchange import Path
from lightning_sparse.gradients.groups import ParamGroup


class BucketGroup:
    """One group of a bucket; what is written to ``grad_N`` reaches the bucket with write_back().

    Args:
        bucket: that holds it.
        group: a settled group inside it, or its own.
        path: that it takes in this round.
        has_residual: False where it is reduced as DDP does.
        keeps_shard: its gradient is not gathered inside the node: each device's shard is in its place, the rest of the
            bucket means nothing.

    Attributes:
        unused: those of its parameters that this rank did not use.
        next_S: what the round leaves.
    """

    def __init__(
        self, bucket: "Bucket", group: ParamGroup, path: Path, *, has_residual: bool, keeps_shard: bool
    ) -> None:
        self.group, self.path = group, path
        self.has_residual, self.keeps_shard = has_residual, keeps_shard
        self.unused = bucket.unused.intersection(group.names)
        self.next_S: Tensor | None = None
        self.grad_N = bucket.flat_N
        self._pieces = [bucket.gradient(name) for name in group.names] if group != bucket.group else []

    def read(self) -> None:
        """Before the reduction, on its thread or stream: take a copy where the group is a part of the bucket."""
        if self._pieces:
            self.grad_N = torch.cat(self._pieces)

    def gradients(self, device_index: int, num_devices: int) -> dict[str, Tensor]:
        """By parameter, its gradient, or what this device's shard holds of it; empty ones are left out."""
        if self.keeps_shard:
            shard_S = self.grad_N[device_index * self.group.shard_numel(num_devices) :]
            pieces = self.group.shard_slices(self.group.names, device_index, num_devices)
            return {name: shard_S[here] for name, here, _ in pieces}
        flats = zip(self.group.names, torch.split(self.grad_N, list(self.group.numels)), strict=True)
        return {name: flat for name, flat in flats if flat.numel()}

    def write_back(self) -> None:
        """After the reduction: a copy is written to the bucket."""
        if self._pieces:
            torch._foreach_copy_(self._pieces, list(torch.split(self.grad_N, list(self.group.numels))))


@dataclass
class Bucket:
    """What a bucket holds; DDP takes its own object back when the hook returns.

    Attributes:
        unused: those of its parameters that this rank did not use; empty unless DDP looks for them.
        groups: that are reduced.
    """

    group: ParamGroup
    flat_N: Tensor
    index: int
    last: bool
    unused: frozenset[str] = frozenset()
    groups: list[BucketGroup] = field(default_factory=list)

    def gradient(self, name: str) -> Tensor:
        """Of a parameter, flat; a view of the bucket."""
        return self.flat_N[self.group.slices[name]]
