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

Steps 2 and 3 have a dense twin, an all-reduce of shard_S + residual_S between nodes, which leaves a zero residual. It
is taken in dense rounds, while the bucket layout is not settled, and where it is predicted to be faster; so is one flat
all-reduce over all ranks, and a dense round with 16-bit values (lightning_sparse.strategy.rounded), which leaves their
rounding error. With exchange="regional" they go by regions (lightning_sparse.strategy.regional): then the
volume does not grow with M. Every such choice is a function of values that all ranks share.

**Lanes.** A reduction is a generator that yields where the work changes place: inside the node, between nodes, inside
the node again. The runner (lightning_sparse.strategy.overlap) may give each of the three a lane of its own, so that one
bucket is on the slow network while the next is selected; written down, it stays one algorithm.

With a loss scaler the gradients arrive scaled. Residuals are kept in unscaled units, so a change of the scale means
nothing to them: step 2 divides by the scale and what arrives is multiplied by it again, both exact for powers of two.

A non-finite gradient anywhere makes the whole shard NaN on every node (the message's header counts them), and step 4
carries it to every rank: all ranks see it in the same round.

    topology = lightning_sparse.topology.discover()
    state = HierState(model, HierConfig(density=0.01), topology)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, hier_hook)
"""

from collections.abc import Generator

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # torch.distributed re-exports it unannounced

from lightning_sparse.kernels import accumulate, compress, indices_of
from lightning_sparse.strategy.communicator import HierCommunicator
from lightning_sparse.strategy.parts import Arrived, Part
from lightning_sparse.strategy.regional import Regions
from lightning_sparse.strategy.rounded import Rounded
from lightning_sparse.strategy.state import HierState

Lanes = Generator[None, None, None]
"""Work in three stretches: up to the first ``yield`` inside the node, up to the second between nodes, then inside."""


def hier_hook(state: HierState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce one bucket. Register it with ``ddp.register_comm_hook(state, hier_hook)``.

    Raises:
        CommunicationError: when a collective failed, naming the step, the ranks, the round and the bucket. With overlap
            it is raised at the end of the backward pass.
    """
    arrived = state.receive(bucket)
    return state.runner.run(reduce_bucket(state, arrived), arrived.flat_N)


def reduce_bucket(state: HierState, arrived: Arrived) -> Lanes:
    """Reduce what a bucket holds, in place."""
    comm, where = state.communicator, f"in round {state.round}, bucket {arrived.index}"
    comm.where = where
    parts = state.parts(arrived)
    rounds = [round_of(state, part) for part in parts]
    for _ in range(2):
        for each in rounds:
            next(each, None)
        yield
        comm.where = where
    for each in rounds:
        next(each, None)
    for part in parts:
        state.finish(part)
    state.close(arrived)


def round_of(state: HierState, part: Part) -> Lanes:
    """The part's path in this round."""
    plan = state.plan(part)
    if plan.path == "sparse":
        return sparse_round(state, part, plan.k)
    if plan.path == "regional":
        return regional_round(state, part, plan.k)
    if plan.path == "dense":
        return dense_round(state, part)
    if plan.path == "dense16":
        return dense16_round(state, part)
    if plan.path == "flat":
        return flat_round(state, part)
    return identity(state.communicator, part.grad_N)


def sparse_round(state: HierState, part: Part, k: int) -> Lanes:
    """Steps 1 to 4: the node's sums, the largest of them, those of all nodes, everywhere."""
    comm, residual_S, next_S = state.communicator, state.residual(part), state.next_residual(part)
    sum_S, factor = state.contribution(part, *node_sums(comm, part.grad_N))
    message = compress(sum_S, residual_S, next_S, k, state.config.dtype, factor)
    if state.momentum is not None and k < sum_S.numel():
        state.momentum.mask(part.group, indices_of(message, sum_S.numel(), k, state.config.dtype))
    yield
    messages = comm.exchange(message)
    yield
    shard_S = _room_for_result(sum_S)
    accumulate(messages, shard_S, k, state.config.dtype)
    _finish(state, part, shard_S, next_S)


def regional_round(state: HierState, part: Part, k: int) -> Lanes:
    """Steps 2 and 3 by regions: two exchanges whose volume does not grow with M."""
    comm, residual_S, next_S = state.communicator, state.residual(part), state.next_residual(part)
    sum_S, factor = state.contribution(part, *node_sums(comm, part.grad_N))
    regions = Regions(sum_S.numel(), comm.topology.num_nodes, k, state.config.dtype)
    rows = regions.select(sum_S, residual_S, next_S, factor)
    if state.momentum is not None and k < sum_S.numel():
        state.momentum.mask(part.group, regions.sent(rows))
    yield
    row = regions.merge(comm.all_to_all(rows), comm.topology.node_index, next_S)
    rows = comm.exchange(row)
    yield
    shard_S = _room_for_result(sum_S)
    regions.apply(rows, shard_S)
    _finish(state, part, shard_S, next_S)


def dense_round(state: HierState, part: Part) -> Lanes:
    """The twin: everything, the residual included, is sent; what is left is zero."""
    comm, residual_S, grad_N = state.communicator, state.residual(part), part.grad_N
    grad_N.mul_(1.0 / comm.topology.world_size)
    shard_S = comm.reduce_scatter(grad_N)
    if state.momentum is not None:
        velocity_S, _ = state.contribution(part, shard_S, 1.0)
        shard_S = state.rescale(velocity_S).to(grad_N.dtype)
    if residual_S is not None:
        shard_S.add_(state.rescale(residual_S.clone()))
    yield
    comm.all_reduce(shard_S)
    yield
    _gather(state, part, shard_S)
    state.stage(part, None)


def dense16_round(state: HierState, part: Part) -> Lanes:
    """The twin with values of 16 bits, in two exchanges, so that sums are made in fp32; what is left is their error."""
    comm, residual_S, next_S = state.communicator, state.residual(part), state.next_residual(part)
    sum_S, factor = state.contribution(part, *node_sums(comm, part.grad_N))
    rounded = Rounded(sum_S.numel(), comm.topology.num_nodes)
    rows = rounded.split(sum_S, residual_S, next_S, factor)
    yield
    row = rounded.merge(comm.all_to_all(rows), comm.topology.node_index, next_S)
    rows = comm.exchange(row)
    yield
    shard_S = _room_for_result(sum_S)
    rounded.join(rows, shard_S)
    _finish(state, part, shard_S, next_S)


def flat_round(state: HierState, part: Part) -> Lanes:
    """DDP's all-reduce with the residual in it, where the network between nodes is no slower than the rest."""
    comm, residual_S, grad_N = state.communicator, state.residual(part), part.grad_N
    grad_N.mul_(1.0 / comm.topology.world_size)
    if residual_S is not None:  # a shard stands on one device of each node, so the sum over ranks has it once a node
        own = grad_N[comm.topology.device_index * residual_S.numel() :][: residual_S.numel()]
        own.add_(state.rescale(residual_S[: own.numel()].clone()))
    comm.flat_all_reduce(grad_N)  # in the first lane, which alone uses the group of the world
    yield
    yield
    state.stage(part, None)


def identity(comm: HierCommunicator, grad_N: Tensor) -> Lanes:
    """What DDP does, bit for bit: multiplied by 1/P before the sum (after it, the last bits differ)."""
    grad_N.mul_(1.0 / comm.topology.world_size)
    comm.flat_all_reduce(grad_N)
    yield
    yield


def node_sums(comm: HierCommunicator, grad_N: Tensor) -> tuple[Tensor, float]:
    """The node's sums of this device's shard, and by what they must be multiplied to be shares of the mean."""
    share = 1.0 / comm.topology.world_size
    if grad_N.dtype == torch.float16:  # the sum may pass 65,504 where the mean does not
        grad_N.mul_(share)
        share = 1.0
    return comm.reduce_scatter(grad_N), share


def _room_for_result(sum_S: Tensor) -> Tensor:
    """fp32 of S elements, uninitialised: the node's sums themselves where they allow it, for nobody needs them now."""
    return sum_S if sum_S.dtype == torch.float32 else torch.empty_like(sum_S, dtype=torch.float32)


def _finish(state: HierState, part: Part, shard_S: Tensor, next_S: Tensor | None) -> None:
    """Step 4, and the residual is proposed."""
    state.rescale(shard_S)
    _gather(state, part, shard_S.to(part.grad_N.dtype))
    state.stage(part, next_S)


def _gather(state: HierState, part: Part, shard_S: Tensor) -> None:
    """Step 4, or without it the shard in its place, where that is enough."""
    comm, grad_N = state.communicator, part.grad_N
    if part.group in state.kept_sharded:
        own = grad_N[comm.topology.device_index * shard_S.numel() :][: shard_S.numel()]
        own.copy_(shard_S[: own.numel()])
        return
    grad_LS = comm.gather(shard_S, last=True, into=grad_N)
    if grad_LS.data_ptr() != grad_N.data_ptr():  # it was padded; with one device a node the shard is the bucket itself
        grad_N.copy_(grad_LS[: grad_N.numel()])
