"""Hierarchical top-k communication (HiTopKComm, Shi et al., MLSys 2021) as a DDP communication hook.

M nodes x L devices, P = M * L ranks; this rank is device l of node m. A group of N gradient elements is padded to
L * S, and K = ceil(density * S):

==================== =============== ======================================================= ======================
step                 where           in -> out                                               received, slow link
==================== =============== ======================================================= ======================
1 reduce-scatter     inside node m   grad_N -> shard_S                                       0
2 compress           the device      acc_S = shard_S / P + residual_S;                       0
                                     the K largest |acc_S| -> message;
                                     residual_S = acc_S - what was sent
3 exchange           devices l of    message -> M messages, added in node order -> shard_S   (M-1) * message
                     all nodes
4 gather             inside node m   shard_S -> grad_N                                       0
==================== =============== ======================================================= ======================

Steps 2 and 3 are a path of the engine (lightning_sparse.exchange.paths): the one shown, a dense all-reduce of
shard_S + residual_S, which leaves a zero residual, or another. All ranks choose the same one. Dense is what a layout
that is not settled takes.

A reduction has three stages, where the work changes place: inside the node, between nodes, inside the node again. The
runner (lightning_sparse.exchange.lanes) may give each of the three a lane of its own, so that one bucket is on the slow
network while the next is selected.

With a loss scaler the gradients arrive scaled. Residuals are kept in unscaled units, so a change of the scale means
nothing to them: step 2 divides by the scale and the result is multiplied by it again, both exact for powers of two.

A non-finite gradient anywhere makes the whole shard NaN on every node, and step 4 carries it to every rank: all ranks
see it in the same round.

    topology = lightning_sparse.topology.discover()
    state = HierState(model, HierConfig(density=0.01), topology)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, hier_hook)
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # torch.distributed re-exports it unannounced

from lightning_sparse.exchange import HierCommunicator, Shard, Transfer
from lightning_sparse.gradients.buckets import Bucket, BucketGroup
from lightning_sparse.gradients.state import HierState


def hier_hook(state: HierState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce one bucket. Register it with ``ddp.register_comm_hook(state, hier_hook)``.

    Raises:
        CommunicationError: when a collective failed, naming the step, the ranks, the round and the bucket. With overlap
            it is raised at the end of the backward pass.
    """
    received = state.receive(bucket)
    return state.exchange.runner.run(Reduction(state, received), received.flat_N)


class Reduction:
    """The job of reducing what a bucket holds, in place.

    Args:
        state: of the hook.
        bucket: with its groups, each of which has a path.
    """

    def __init__(self, state: HierState, bucket: Bucket) -> None:
        self._state, self._bucket = state, bucket
        self._where = f"in round {state.round}, bucket {bucket.index}"
        self._transfers: list[Transfer] = []
        self._used: Tensor | None = None

    def select(self) -> Sequence[Tensor]:
        """Steps 1 and 2, and with the last bucket an agreement on what was used."""
        state, comm = self._state, self._state.exchange.communicator
        comm.where = self._where
        state.feedback.save_unused(self._bucket)
        self._transfers = [_begin(state, part) for part in self._bucket.groups]
        self._used = state.feedback.agree_on_unused(comm, self._bucket)  # in the lane that alone uses that group
        return self._used_later()

    def transfer(self) -> Sequence[Tensor]:
        """Step 3."""
        self._state.exchange.communicator.where = self._where
        for each in self._transfers:
            each.transfer()
        return self._used_later()

    def apply(self) -> Sequence[Tensor]:
        """The end of step 3, step 4, and what the round leaves."""
        self._state.exchange.communicator.where = self._where
        for part, each in zip(self._bucket.groups, self._transfers, strict=True):
            _apply(self._state, part, each)
        self._state.close(self._bucket, self._used)
        return ()

    def _used_later(self) -> list[Tensor]:
        tensors = [tensor for each in self._transfers for tensor in each.tensors]
        return [*tensors, *self._state.feedback.undone_by(self._used), *(part.grad_N for part in self._bucket.groups)]


def _begin(state: HierState, part: BucketGroup) -> Transfer:
    """Steps 1 and 2 of a group."""
    part.read()
    transfer = state.exchange.begin(part.path, _contribution(state, part))
    momentum = state.feedback.momentum
    if momentum is not None and (sent := part.path.indices(transfer.carried)) is not None:
        momentum.stop(part.group, sent)
    return transfer


def _apply(state: HierState, part: BucketGroup, transfer: Transfer) -> None:
    """Steps 3, once messages are there, and 4 of a group."""
    sum_S = transfer.apply()
    part.next_S = transfer.shard.next_S
    if part.path.by_shard:
        shard_S = sum_S if part.path.in_place else state.feedback.rescale(sum_S).to(part.grad_N.dtype)
        _gather(state.exchange.communicator, part, shard_S)


def _contribution(state: HierState, part: BucketGroup) -> Shard:
    """Step 1, and what takes part in step 2."""
    feedback, comm, path = state.feedback, state.exchange.communicator, part.path
    grad_N, share = part.grad_N, 1.0 / state.topology.world_size
    # As DDP does: after the sum, the last bits would differ. And in fp16 a sum may pass 65,504 where the mean does not.
    if path.in_place or grad_N.dtype == torch.float16:
        grad_N.mul_(share)
        share = 1.0
    residual_S = feedback.residual(part, comm.gather)
    sum_S = comm.reduce_scatter(grad_N) if path.by_shard else grad_N
    if not path.in_place:
        sum_S, factor = feedback.contribution(part, sum_S, share)
        return Shard(sum_S, residual_S, feedback.next_residual(part), factor)
    if feedback.momentum is not None and path.by_shard:
        sum_S = feedback.rescale(feedback.contribution(part, sum_S, share)[0]).to(grad_N.dtype)
    return Shard(sum_S, None if residual_S is None else feedback.rescale(residual_S.clone()))


def _gather(comm: HierCommunicator, part: BucketGroup, shard_S: Tensor) -> None:
    """Step 4, or without it the shard in its place, where that is enough."""
    grad_N = part.grad_N
    if part.keeps_shard:
        own = grad_N[comm.topology.device_index * shard_S.numel() :][: shard_S.numel()]
        own.copy_(shard_S[: own.numel()])
        return
    grad_LS = comm.gather(shard_S, last=True, into=grad_N)
    if grad_LS is not grad_N:  # it was padded; with one device a node the shard is the bucket itself
        grad_N.copy_(grad_LS[: grad_N.numel()])
