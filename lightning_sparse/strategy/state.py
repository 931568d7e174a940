"""What the hook remembers between rounds.

One *round* is one reduction of all buckets. Its life, as seen from here:

    before_backward()            the last round's residuals are settled: kept, or dropped with a gradient thrown away,
                                 or left open while the gradient waits for more before the step
    receive(bucket)              once a bucket, while backward runs
    parts(), finish(), close()   once a bucket, on the runner's threads; groups are read from it and written back
    optimizer.step()             watch() notes which parameters were stepped, hence whose residual counts

Whoever uses the hook without a strategy need not call before_backward(): then a round counts as used when the next one
begins.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed re-exports it unannounced

from lightning_sparse.messages import log
from lightning_sparse.strategy.choices import Choices
from lightning_sparse.strategy.communicator import MAX, HierCommunicator
from lightning_sparse.strategy.config import HierConfig
from lightning_sparse.strategy.cost import effective_density
from lightning_sparse.strategy.layout import (
    Layout,
    ParamGroup,
    excluded_names,
    group_of,
    refuse_sparse_gradients,
)
from lightning_sparse.strategy.momentum import MomentumCorrection
from lightning_sparse.strategy.overlap import Inline, Runner, SideStream, lanes_of
from lightning_sparse.strategy.parameters import Parameters
from lightning_sparse.strategy.parts import Arrived, Part
from lightning_sparse.strategy.plan import Plan, bytes_of
from lightning_sparse.strategy.residual import ResidualStore
from lightning_sparse.strategy.schedule import density_at
from lightning_sparse.strategy.stats import CommStats
from lightning_sparse.strategy.stepped import StepWatch
from lightning_sparse.strategy.usage import UsageTracker, unused_everywhere
from lightning_sparse.strategy.zeros import heads_of, mark_heads
from lightning_sparse.topology import Topology


class HierState:
    """State of ``hier_hook``.

    Args:
        module: the module that DDP wraps (not the wrapper).
        config: the user's choices.
        topology: where this rank stands; from ``topology.discover()``.
        find_unused_parameters: give what DDP was given: unused parameters are then left out of the round.

    Attributes:
        epoch: set it at the start of each epoch; the density schedule reads it.
        round: how many rounds are over.
        parameters: of the module.
        stats: what was communicated.
        choices: which path each group takes, and what that is decided by.
        kept_sharded: groups whose gradients are not gathered inside the node after the exchange: each device's shard is
            in its place in the bucket, the rest of the bucket means nothing.
        momentum: of SGD, where the hook has taken it over.
        loss_scale: answers with the scale of a loss scaler, a 0-dim tensor, or None; asked in each round.
    """

    def __init__(
        self, module: nn.Module, config: HierConfig, topology: Topology, *, find_unused_parameters: bool = False
    ) -> None:
        self._said: set[str] = set()
        self.config = config
        self.topology = topology
        self.communicator = HierCommunicator(topology)
        self.epoch = 0
        self.round = 0
        self.stats = CommStats()
        self.runner: Runner = _runner(topology, module) if config.overlap else Inline()
        excluded = excluded_names(module, config.exclude)
        sends_sparsely = topology.kind == "hierarchical" and config.exchange != "dense"
        self.layout = Layout(excluded=excluded if sends_sparsely else frozenset())
        self.store = ResidualStore(topology.device_index, topology.num_devices)
        refuse_sparse_gradients(module)
        self.parameters = Parameters(module)
        self.kept_sharded: frozenset[ParamGroup] = frozenset()
        self.loss_scale: Callable[[], Tensor | None] = lambda: None
        numel = sum(p.numel() for p in module.parameters())
        self.choices = Choices(config, topology, self.layout, self.parameters.dtypes, numel, self.say)
        self._usage = UsageTracker(module) if find_unused_parameters else None
        self._steps = StepWatch(self.parameters, self._open_names)
        self.momentum: MomentumCorrection | None = None
        if config.momentum_correction and topology.kind == "hierarchical":
            self.momentum = MomentumCorrection(self.parameters, topology, self.say)
            self.say("SGD's momentum is kept with the residuals: what callbacks see as gradient is the velocity")
        elif config.momentum_correction:
            self.say("momentum_correction: here nothing is left out, so the optimizer's own momentum serves")
        self._heads: dict[ParamGroup, Tensor] = {}
        self._round_is_open = False  # buckets are to come
        self._is_reducing = False  # from the first bucket on, until the last one was reduced
        self._bypass = ""

    # -- the life of a round ------------------------------------------------------------------------------------------

    def before_backward(self, bypass: str = "") -> None:
        """Settle the last round and say how the next one goes. Call it before each backward, on all ranks.

        Args:
            bypass: a reason to reduce the next round as DDP would, leaving residuals alone; empty for none.
        """
        waiting = self.settle()
        if self.momentum is not None:
            self.momentum.check(waiting)
        self._bypass = bypass
        if bypass:
            self.say(f"this round is reduced as plain DDP does, and residuals wait: {bypass}")

    def receive(self, bucket: GradBucket) -> Arrived:
        """Read a bucket while it is at hand: DDP takes it back when the hook returns."""
        if not self._round_is_open:
            self.settle()
            device = bucket.buffer().device
            self.choices.prepare(self.communicator, device, self.round, self.epoch, self.runner.wait)
            self.choices.window.first(device)
            self._round_is_open = self._is_reducing = True
        group = group_of(bucket.parameters(), self.parameters.names)
        used = self._usage.take(group) if self._usage is not None else None
        if bucket.is_last():
            self.choices.window.last(bucket.buffer().device)
            self._round_is_open = False
        return Arrived(group, bucket.buffer(), bucket.index(), bucket.is_last(), used)

    def parts(self, arrived: Arrived) -> list[Part]:
        """The bucket's groups, ready to be reduced; finish() each of them after it was."""
        whole = arrived.group
        self.layout.record(whole)
        unused = self._unused(arrived)
        parts = []
        for group in self.layout.parts(whole):
            masked = unused.intersection(group.names)
            if len(masked) == len(group.names) or not group.numel:
                continue  # no rank used any of them: nothing to send, and the buffer stays as DDP would leave it
            part = Part(arrived, group, masked)
            if self._choose(group, part.grad_N.dtype).path != "identity":
                for store in self.stores():
                    store.regroup(group, self.communicator.gather, part.grad_N.device)
            parts.append(part)
        return parts

    def finish(self, part: Part) -> None:
        """After a part was reduced."""
        group, grad_N = part.group, part.grad_N
        if self.topology.kind != "hierarchical" and self.config.error_feedback and not self._bypass:
            self.store.spend_parked(group, self.topology.num_nodes, self.rescale, grad_N)
        if self._steps.watching and (group in self.store.staged or not self.store.spent.isdisjoint(group.names)):
            self._mark(group, grad_N)
        part.restore()

    def close(self, arrived: Arrived) -> None:
        """After the bucket was reduced; the last bucket ends the round."""
        if not arrived.last:
            return
        if self.layout.end_round() and self.topology.kind == "hierarchical":
            self._describe_layout()
        self.stats.end_round()
        self.round += 1
        self._is_reducing = False

    def settle(self) -> set[str]:
        """Decide which residuals of the last rounds count: those of parameters that were stepped. Where the gradient is
        gone they return to what they were; where it is still there to be stepped, the choice stays open. A round that
        an exception cut short is as if it had not been. Returns the parameters whose choice stays open."""
        if self._is_reducing:
            self.runner.drain()
            self._is_reducing = False
        if self.layout.abandon_round() or self._round_is_open:
            for store in self.stores():
                store.staged.clear()
            self.stats.abandon_round()
            self._round_is_open = False
        waiting: set[str] = set()
        if self.store.staged or self.store.spent:
            discarded, waiting = self._steps.not_stepped()
            for store in self.stores():
                store.settle(discarded, waiting)
        self._steps.clear()
        return waiting

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Note from now on which parameters are stepped, by these optimizers or others. Without any every round counts
        as used.

        Whoever watches also calls before_backward(): inside a backward pass gradients say nothing yet.

        Raises:
            ValueError: for an optimizer that cannot tell when it steps, or whose momentum cannot be corrected.
        """
        optimizers = list(optimizers)
        self._steps.watch(optimizers)
        if self.momentum is not None:
            self.momentum.watch(optimizers)

    def detach(self) -> None:
        """Take all hooks off module and optimizers, and end the runner's threads. The last round is settled when the
        next one begins: only then is it known whether its gradient was stepped, and after an exception its buckets may
        still be under way."""
        self._steps.unwatch()
        self.runner.end()
        if self.momentum is not None:
            self.momentum.unwatch()
        self.kept_sharded = frozenset()
        if self._usage is not None:
            self._usage.close()
            self._usage = None

    def forget(self) -> None:
        """Drop all residuals, and the round that may be open."""
        self.settle()
        for store in self.stores():
            store.clear()

    def track_unused(self, module: nn.Module) -> None:
        """Watch again which parameters are used: other ones may be frozen now."""
        if self._usage is not None:
            self._usage.close()
        self._usage = UsageTracker(module)

    def is_sharded(self, group: ParamGroup) -> bool:
        """Whether devices reduce the group by shards, in settled rounds."""
        return self.choices.is_sharded(group)

    def plan(self, part: Part) -> Plan:
        """The part's path in this round, counted in the statistics."""
        group, dtype = part.group, part.grad_N.dtype
        plan = self._choose(group, dtype)
        nbytes, dense_nbytes = bytes_of(plan, self.config, self.topology, group, dtype)
        shard = group.shard_numel(self.topology.num_devices)
        sent = plan.k or shard
        applied = shard * effective_density(plan.path, self.topology.num_nodes, sent / shard)
        self.stats.record(plan.path, sent=sent, applied=applied, total=shard, nbytes=nbytes, dense_nbytes=dense_nbytes)
        return plan

    def _choose(self, group: ParamGroup, dtype: torch.dtype) -> Plan:
        if self._bypass:
            return Plan("identity")
        return self.choices.path(group, dtype, self.round, self.epoch)

    # -- error feedback ------------------------------------------------------------------------------------------------

    def residual(self, part: Part) -> Tensor | None:
        """The part's residual shard for this round, fp32; None stands for zero."""
        latest = self.store.latest(part.group)
        if latest is None or not part.masked:
            return latest
        masked = latest.clone()
        self.store.restore(part.group, part.masked, None, masked)
        return masked

    def contribution(self, part: Part, sum_S: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """What joins the residual: a tensor, and by what it is to be multiplied. ``share`` of ``sum_S`` is this node's
        share of the mean gradient; with momentum correction its velocity takes the place of it."""
        factor = self.unscale(sum_S, share)
        if self.momentum is None:
            return sum_S, factor
        sum_S = sum_S.mul_(factor) if sum_S.dtype == torch.float32 else sum_S.float().mul_(factor)
        return self.momentum.advance(part, sum_S), torch.ones_like(factor)

    def next_residual(self, part: Part) -> Tensor | None:
        """Room for what the round leaves, uninitialised; None when error feedback is off."""
        return self.store.buffer(part.group, part.grad_N.device) if self.config.error_feedback else None

    def stage(self, part: Part, next_S: Tensor | None) -> None:
        """Propose what the round left (None: nothing); parameters left out of the round keep what they had."""
        if self.momentum is not None:
            self.momentum.stage(part.group, part.masked)
        if not self.config.error_feedback:
            return
        latest = self.store.latest(part.group)
        if part.masked and latest is not None:
            next_S = torch.zeros_like(latest) if next_S is None else next_S
            self.store.restore(part.group, part.masked, latest, next_S)
        self.store.stage(part.group, next_S)

    def settled_stores(self) -> list[ResidualStore]:
        """Residuals, and velocities if there are, as settle() would leave them now, without settling: what a checkpoint
        holds. Gradients that wait to be stepped do not survive a restart, so their round is as if it had not been."""
        pending = self._open_names() - self._steps.stepped()
        discarded = frozenset(pending) if self._steps.watching else frozenset()
        return [store.settled_copy(discarded) for store in self.stores()]

    def residual_norm(self) -> Tensor:
        """L2 norm of what this device has not sent yet, a 0-dim tensor on its device (no host sync)."""
        shards = [t for t in (self.store.current | self.store.staged).values() if t is not None]
        return torch.stack([torch.linalg.vector_norm(t) for t in shards]).norm() if shards else torch.zeros(())

    def unscale(self, like: Tensor, share: float) -> Tensor:
        """``share`` / loss scale, what a sum is multiplied by: a 0-dim fp32 tensor, no host sync."""
        factor = torch.full((), share, dtype=torch.float32, device=like.device)
        scale = self.loss_scale()
        return factor if scale is None else factor / scale

    def rescale(self, shard_S: Tensor) -> Tensor:
        """Multiply by the loss scale, in place."""
        scale = self.loss_scale()
        return shard_S if scale is None else shard_S.mul_(scale)

    def say(self, line: str, level: int = logging.INFO, *, every_rank: bool = False) -> None:
        """Log a line once, on rank 0 unless it concerns another rank alone."""
        if (every_rank or self.topology.rank == 0) and line not in self._said:
            self._said.add(line)
            log.log(level, line)

    # -- inside --------------------------------------------------------------------------------------------------------

    def stores(self) -> list[ResidualStore]:
        """Residuals, and velocities if there are."""
        return [self.store] if self.momentum is None else [self.store, self.momentum.store]

    def _open_names(self) -> set[str]:
        """The parameters whose residual waits for what becomes of their gradient."""
        return {name for group in list(self.store.staged) for name in group.names} | self.store.spent

    def _unused(self, arrived: Arrived) -> frozenset[str]:
        if arrived.used is None or self.topology.kind != "hierarchical" or self._bypass:
            return frozenset()  # no residual to guard: DDP's own way with unused parameters will do
        max_reduce = partial(self.communicator.flat_all_reduce, op=MAX)
        return unused_everywhere(arrived.group, arrived.used, arrived.flat_N.device, max_reduce)

    def _mark(self, group: ParamGroup, grad_N: Tensor) -> None:
        if group not in self._heads:
            self._heads[group] = heads_of(group.numels, grad_N.device)
        mark_heads(grad_N, self._heads[group])

    def _describe_layout(self) -> None:
        paths = [self._choose(group, self.parameters.dtypes[group.names[0]]).path for group in self.layout.settled]
        counted = ", ".join(f"{paths.count(path)} {path}" for path in dict.fromkeys(paths))
        self.say(
            f"round {self.round + 1}: {len(paths)} group(s) of parameters, {counted}, at density "
            f"{density_at(self.config, self.epoch, self.choices.density):g} (exchange={self.config.exchange!r})"
        )


def _runner(topology: Topology, module: nn.Module) -> Runner:
    devices = {parameter.device for parameter in module.parameters()}
    if all(device.type == "cpu" for device in devices):
        return lanes_of(topology)
    device = devices.pop()
    return SideStream(device) if device.type == "cuda" and not devices else Inline()
