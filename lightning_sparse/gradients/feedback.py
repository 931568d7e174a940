"""Error feedback: what joins a group's sum before the exchange, and what the exchange leaves for the next round.

    acc_S = sum_S / (P * loss scale) + residual_S        or, with momentum correction, velocity_S + residual_S
    residual_S = acc_S - what was sent

Residuals are in unscaled units. Those of parameters that this rank did not use are withheld: DDP may not take the
result for them (lightning_sparse.gradients.unused).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_sparse.exchange import HierCommunicator
from lightning_sparse.gradients.buckets import Bucket, BucketGroup
from lightning_sparse.gradients.momentum import MomentumCorrection
from lightning_sparse.gradients.residual import Gather, ResidualStore
from lightning_sparse.gradients.unused import UnusedParameters


class ErrorFeedback:
    """Residuals, and velocities if there are, of one device.

    Args:
        store: of the residuals.
        momentum: of SGD, where it is kept with the residuals.
        keeps: whether what is not sent is kept.

    Attributes:
        loss_scale: returns the scale of a loss scaler, a 0-dim tensor, or None; called in each round.
        unused: of DDP's ``find_unused_parameters``.
    """

    def __init__(self, store: ResidualStore, momentum: MomentumCorrection | None, *, keeps: bool) -> None:
        self.store, self.momentum = store, momentum
        self.loss_scale: Callable[[], Tensor | None] = lambda: None
        self.unused: UnusedParameters | None = None
        self._keeps = keeps
        self._factors: dict[tuple[float, torch.device], Tensor] = {}  # one fill less a bucket

    @property
    def stores(self) -> list[ResidualStore]:
        """Of the residuals, and of the velocities if there are."""
        return [self.store] if self.momentum is None else [self.store, self.momentum.store]

    def residual(self, part: BucketGroup, gather: Gather) -> Tensor | None:
        """The group's residual shard for this round, fp32; None stands for zero. A collective inside the node where its
        parameters had residuals in other groups."""
        if not part.has_residual:
            return None
        for store in self.stores:
            store.regroup(part.group, gather, part.grad_N.device)
        latest = self.store.latest(part.group)
        if latest is None or not part.unused:
            return latest
        sendable = latest.clone()
        self.store.restore(part.group, part.unused, None, sendable)
        return sendable

    def contribution(self, part: BucketGroup, sum_S: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """What the residual is added to: a tensor, and what it is to be multiplied by. ``share`` of ``sum_S`` is this
        node's share of the mean gradient; with momentum correction its velocity takes the place of it."""
        factor = self._factors.get((share, sum_S.device))
        if factor is None:
            factor = torch.full((), share, dtype=torch.float32, device=sum_S.device)
            self._factors[share, sum_S.device] = factor
        scale = self.loss_scale()
        factor = factor if scale is None else factor / scale
        if self.momentum is None:
            return sum_S, factor
        sum_S = sum_S.mul_(factor) if sum_S.dtype == torch.float32 else sum_S.float().mul_(factor)
        return self.momentum.advance(part.group, sum_S), torch.ones_like(factor)

    def rescale(self, shard_S: Tensor) -> Tensor:
        """Multiply by the loss scale, in place."""
        scale = self.loss_scale()
        return shard_S if scale is None else shard_S.mul_(scale)

    def next_residual(self, part: BucketGroup) -> Tensor | None:
        """Room for what the round leaves, uninitialised; None when error feedback is off."""
        return self.store.buffer(part.group, part.grad_N.device) if self._keeps else None

    def save_unused(self, bucket: Bucket) -> None:
        """Before the reduction: keep the gradients that DDP will keep if no rank used their parameters."""
        for name in bucket.unused:
            assert self.unused is not None
            self.unused.save(name, bucket.gradient(name), bucket.gradient(name).clone())

    def agree_on_unused(self, communicator: HierCommunicator, bucket: Bucket) -> Tensor | None:
        """With the last bucket: which parameters any rank used in this round, or None if DDP does not look for unused
        ones. A collective of the world."""
        if self.unused is None or not bucket.last:
            return None
        return self.unused.agree(communicator, bucket.flat_N.device)

    def undone_by(self, used: Tensor | None) -> list[Tensor]:
        """What ends a round with ``used``, from ``agree_on_unused``."""
        return [] if self.unused is None or used is None else [used, *self.unused.saved]

    def stage(self, part: BucketGroup) -> None:
        """Propose what the round left as the group's next residual."""
        group, next_S = part.group, part.next_S
        if self.momentum is not None:
            before_S = self.momentum.store.latest(group)
            self._save_unused(part, self.momentum.stage(group), before_S)
        if not self._keeps:
            return
        latest = self.store.latest(group)
        if part.unused and latest is not None:  # it was withheld
            next_S = torch.zeros_like(latest) if next_S is None else next_S
            for _, here, _ in group.shard_slices(part.unused, self.store.device_index, self.store.num_devices):
                next_S[here] += latest[here]
        if next_S is not None:
            self._save_unused(part, next_S, latest)
        self.store.stage(group, next_S)

    def spend_parked(self, part: BucketGroup, num_nodes: int) -> None:
        """Add residuals of a run on several nodes to a gradient that is already summed over all ranks."""
        if self._keeps:
            self.store.spend_parked(part.group, num_nodes, self.rescale, part.grad_N)

    def norm(self) -> Tensor:
        """L2 norm of the residual on this device, a 0-dim tensor there (no host sync)."""
        shards = [t for t in (self.store.current | self.store.staged).values() if t is not None]
        return torch.stack([torch.linalg.vector_norm(t) for t in shards]).norm() if shards else torch.zeros(())

    def _save_unused(self, part: BucketGroup, next_S: Tensor, before_S: Tensor | None) -> None:
        if self.unused is None:
            return
        for name, here, _ in part.group.shard_slices(part.unused, self.store.device_index, self.store.num_devices):
            self.unused.save(name, next_S[here], None if before_S is None else before_S[here])
