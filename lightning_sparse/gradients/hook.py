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

A reduction is a generator that yields where the work changes place: inside the node, between nodes, inside the node
again. The runner (lightning_sparse.exchange.lanes) may give each of the three a lane of its own, so that one bucket is
on the slow network while the next is selected; written down, it stays one algorithm.

With a loss scaler the gradients arrive scaled. Residuals are kept in unscaled units, so a change of the scale means
nothing to them: step 2 divides by the scale and the result is multiplied by it again, both exact for powers of two.

A non-finite gradient anywhere makes the whole shard NaN on every node, and step 4 carries it to every rank: all ranks
see it in the same round.

    topology = lightning_sparse.topology.discover()
    state = HierState(model, HierConfig(density=0.01), topology)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, hier_hook)
"""

from collections.abc import Generator, Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # torch.distributed re-exports it unannounced

from lightning_sparse.exchange import HierCommunicator, Shard
from lightning_sparse.gradients.buckets import Bucket, BucketGroup
from lightning_sparse.gradients.state import HierState

Lanes = Generator[Sequence[Tensor], None, None]
"""Work in three stretches: up to the first ``yield`` inside the node, up to the second between nodes, then inside. Each
``yield`` gives the tensors made so far that later stretches use."""


def hier_hook(state: HierState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce one bucket. Register it with ``ddp.register_comm_hook(state, hier_hook)``.

    Raises:
        CommunicationError: when a collective failed, naming the step, the ranks, the round and the bucket. With overlap
            it is raised at the end of the backward pass.
    """
    received = state.receive(bucket)
    return state.exchange.runner.run(reduce_bucket(state, received), received.flat_N)


def reduce_bucket(state: HierState, bucket: Bucket) -> Lanes:
    """Reduce what a bucket holds, in place."""
    comm, where = state.exchange.communicator, f"in round {state.round}, bucket {bucket.index}"
    comm.where = where
    state.feedback.save_unused(bucket)
    jobs = [reduce_group(state, part) for part in bucket.groups]
    handed = [tensor for job in jobs for tensor in next(job)]
    used = state.feedback.agree_on_unused(comm, bucket)  # in the first lane, which alone uses the group of all ranks
    to_the_end = [*state.feedback.undone_by(used), *(part.grad_N for part in bucket.groups)]
    yield [*handed, *to_the_end]
    comm.where = where
    handed = [tensor for job in jobs for tensor in next(job)]
    yield [*handed, *to_the_end]
    comm.where = where
    for job in jobs:
        next(job, None)
    state.close(bucket, used)


def reduce_group(state: HierState, part: BucketGroup) -> Lanes:
    """Steps 1 to 4."""
    part.read()
    shard = _contribution(state, part)
    sum_S = yield from state.exchange.run(part.path, shard)
    part.next_S = shard.next_S
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
        return Shard(sum_S, residual_S, feedback.next_residual(part), factor, feedback.on_sent(part.group))
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
