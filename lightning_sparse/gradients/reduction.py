"""The reduction of a bucket: hierarchical top-k communication (HiTopKComm, Shi et al., MLSys 2021).

M nodes x L devices, P = M * L ranks; this rank is device l of node m. A group of N gradient elements is padded to
L * S elements, and K = ceil(density * S):

==================== =============== ======================================================= ======================
step                 where           in -> out                                               received between nodes
==================== =============== ======================================================= ======================
1 reduce-scatter     inside node m   grad_N -> shard_S                                       0
2 compress           the device      acc_S = shard_S / P + residual_S;                       0
                                     the K largest |acc_S| -> message;
                                     residual_S = acc_S - sent
3 exchange           devices l of    message -> M messages, added in node order -> shard_S   (M-1) * message
                     all nodes
4 gather             inside node m   shard_S -> grad_N                                       0
==================== =============== ======================================================= ======================

A path (lightning_sparse.exchange.paths) implements steps 2 and 3. The path "flat"
replaces all four steps with one all-reduce. All ranks choose the same path, and a dense path until the layout is
settled. The new residual counts only after the optimizer step (lightning_sparse.gradients.residual). Stages and lanes:
lightning_sparse.exchange.lanes. Buckets: groups.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.exchange import Shard, Transfer
from lightning_sparse.gradients.groups import Bucket, BucketGroup
from lightning_sparse.gradients.state import HierState


class Reduction:
    def __init__(self, state: HierState, bucket: Bucket) -> None:
        self._state, self._bucket = state, bucket
        self._transfers: list[Transfer] = []
        self._used: Tensor | None = None  # which parameters any rank used in this round

    # -- stages of the job ---------------------------------------------------------------------------------------------

    def select(self) -> Sequence[Tensor]:
        """Run steps 1 and 2. With the last bucket, all ranks agree on unused parameters."""
        bucket, unused, comm = self._bucket, self._state.unused, self._state.exchange.communicator
        comm.error_context = f"in round {self._state.round}, bucket {bucket.index}"
        if unused is not None:
            for name in bucket.unused:  # DDP keeps these gradients if no rank used their parameters
                unused.save(name, bucket.gradient(name), bucket.gradient(name).clone())
        self._transfers = [self._begin(part) for part in bucket.groups]
        if unused is not None and bucket.last:
            self._used = unused.agree(comm, bucket.flat_N.device)  # here, because only this lane uses the world's group
        return self._tensors_in_use()

    def transfer(self) -> Sequence[Tensor]:
        for transfer in self._transfers:
            transfer.transfer()
        return self._tensors_in_use()

    def apply(self) -> Sequence[Tensor]:
        for part, transfer in zip(self._bucket.groups, self._transfers, strict=True):
            self._sum(part, transfer)
            if part.has_residual:
                self._stage(part, transfer.shard.next_S)
            elif self._bucket.applies_by_name:
                self._state.store.apply_by_name(
                    part.group, self._state.topology.num_nodes, self._state.rescale, part.grad_N
                )
            part.write_back()
        if self._bucket.last:
            self._state.end_round(self._used)
        return ()

    def _tensors_in_use(self) -> list[Tensor]:
        tensors = [tensor for transfer in self._transfers for tensor in transfer.tensors]
        tensors += [part.grad_N for part in self._bucket.groups]
        if self._state.unused is not None and self._used is not None:
            tensors += [self._used, *self._state.unused.saved]
        return tensors

    # -- steps 1 and 2 of a group --------------------------------------------------------------------------------------

    def _begin(self, part: BucketGroup) -> Transfer:
        part.read()
        transfer, momentum = self._state.exchange.begin(part.path, self._contribution(part)), self._state.momentum
        if momentum is not None and (sent := part.path.indices(transfer.payload)) is not None:
            momentum.stop(part.group, sent)
        return transfer

    def _contribution(self, part: BucketGroup) -> Shard:
        state, comm, path = self._state, self._state.exchange.communicator, part.path
        grad_N, share = part.grad_N, 1.0 / state.topology.world_size
        # Divide before the sum, as DDP does, to get the same bits. In fp16, the sum could also exceed 65,504.
        if path.in_place or grad_N.dtype == torch.float16:
            grad_N.mul_(share)
            share = 1.0
        residual_S = self._residual(part)
        sum_S = comm.reduce_scatter(grad_N) if path.reduces_shards else grad_N
        if not path.in_place:
            sum_S, factor = self._averaged(part, sum_S, share)
            return Shard(sum_S, residual_S, state.store.buffer(part.group, grad_N.device), factor)
        if state.momentum is not None and path.reduces_shards:
            sum_S = state.rescale(self._averaged(part, sum_S, share)[0]).to(grad_N.dtype)
        return Shard(sum_S, None if residual_S is None else state.rescale(residual_S.clone()))

    def _residual(self, part: BucketGroup) -> Tensor | None:
        """Return the group's residual shard for this round, fp32; None stands for zero.

        A collective inside the node if the parameters had residuals in other groups.
        """
        state = self._state
        if not part.has_residual:
            return None
        for store in state.stores:
            store.regroup(part.group, state.exchange.communicator.gather, part.grad_N.device)
        latest = state.store.latest(part.group)
        if latest is None or not part.unused:
            return latest
        # DDP may drop the result for parameters that this rank did not use, so withhold their residuals.
        sendable = latest.clone()
        state.store.copy_slices(part.group, part.unused, None, sendable)
        return sendable

    def _averaged(self, part: BucketGroup, sum_S: Tensor, share: float) -> tuple[Tensor, Tensor]:
        # Residuals are in unscaled units, so a change of the loss scale does not affect them. The division here and the
        # multiplication in `_sum` are exact, because scales are powers of two.
        # `share` of `sum_S` is this node's share of the mean gradient. With momentum correction, the velocity takes the
        # place of the gradient.
        factor, momentum = self._state.unscaled(share, sum_S.device), self._state.momentum
        if momentum is None:
            return sum_S, factor
        sum_S = sum_S.mul_(factor) if sum_S.dtype == torch.float32 else sum_S.float().mul_(factor)
        return momentum.advance(part.group, sum_S), torch.ones_like(factor)

    # -- step 4 of a group, and its next residual ----------------------------------------------------------------------

    def _sum(self, part: BucketGroup, transfer: Transfer) -> None:
        comm, grad_N, sum_S = self._state.exchange.communicator, part.grad_N, transfer.sum()
        if not part.path.reduces_shards:
            return  # in place: the bucket has the sum
        # If any rank has a non-finite gradient, this shard is NaN on every node, so all ranks see it in this round.
        shard_S = sum_S if part.path.in_place else self._state.rescale(sum_S).to(grad_N.dtype)
        grad_LS = comm.gather(shard_S, last=True, into=grad_N)
        if grad_LS is not grad_N:  # it was padded
            grad_N.copy_(grad_LS[: grad_N.numel()])

    def _stage(self, part: BucketGroup, next_S: Tensor | None) -> None:
        group, store, momentum = part.group, self._state.store, self._state.momentum
        if momentum is not None:
            before_S = momentum.store.latest(group)
            self._save_unused(part, momentum.stage(group), before_S)
        latest = store.latest(group)
        if part.unused and latest is not None:  # `_residual` withheld it
            next_S = torch.zeros_like(latest) if next_S is None else next_S
            for _, shard_slice, _ in group.shard_slices(part.unused, store.device_index, store.num_devices):
                next_S[shard_slice] += latest[shard_slice]
        if next_S is not None:
            self._save_unused(part, next_S, latest)
        store.propose(group, next_S)

    def _save_unused(self, part: BucketGroup, next_S: Tensor, before_S: Tensor | None) -> None:
        unused, store = self._state.unused, self._state.store
        if unused is None:
            return
        for name, shard_slice, _ in part.group.shard_slices(part.unused, store.device_index, store.num_devices):
            unused.save(name, next_S[shard_slice], None if before_S is None else before_S[shard_slice])
