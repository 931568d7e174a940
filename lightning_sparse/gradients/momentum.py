"""Momentum correction and masking for torch's SGD (Deep Gradient Compression, Lin et al., ICLR 2018, 3.2 and 3.3).

With error feedback alone, a gradient that waited in the residual for many rounds enters the optimizer's momentum at
once and without the momentum it would have gathered meanwhile. Corrected, momentum comes first: each node keeps a
velocity u beside its residual v, in shards as the residual is, and what is selected from is the velocity, added up:

    d = g + weight_decay / M * parameter        this node's share of the gradient of SGD
    u = momentum * u + d
    v = v + u                                   Nesterov: v + d + momentum * u
    the K largest of v are sent; there v and u become zero (u: masking, where not everything is sent)

So the sum over nodes of what a *dense* round sends is what torch's SGD subtracts (times the learning rate), weight
decay and Nesterov included; at density 1 a run equals that SGD to rounding. (Except for parameters that no rank uses
while their gradient is zero rather than None: torch's SGD still moves them, here their velocity stays.) The optimizer's
own momentum, weight decay and Nesterov are therefore out of its hands while it steps, and in their places at all other
times: schedulers may change them, checkpoints hold what the user gave.

What callbacks, loggers and clipping see as gradient is the velocity. Parameters that are not stepped keep theirs.
"""

import logging
from collections.abc import Callable, Iterable, Set
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.gradients.groups import BY_SHARD, ParamGroup, in_bucket_order
from lightning_sparse.gradients.residual import ResidualStore
from lightning_sparse.gradients.tracking import Parameters
from lightning_sparse.topology import Topology

_TAKEN_OUT = {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False}


class _Terms(NamedTuple):
    """u = ``keep`` * u + d, and ``own`` * d + ``velocity`` * u joins the residual."""

    keep: float
    own: float
    velocity: float


_UNKNOWN = _Terms(0.0, 0.0, 1.0)
"""The terms of a parameter that is in no optimizer."""


class MomentumCorrection:
    """The velocities of one device.

    Args:
        topology: a hierarchical one.

    Raises:
        ValueError: when a parameter's gradient would not be reduced by shards.
    """

    def __init__(self, parameters: Parameters, topology: Topology, log_once: Callable[[str, int], None]) -> None:
        odd = [n for n, dtype in parameters.dtypes.items() if parameters[n].requires_grad and dtype not in BY_SHARD]
        if odd:
            raise ValueError(
                f"momentum_correction=True with parameters of 64 bits or complex ones ({', '.join(odd[:3])}): these "
                f"are reduced whole, without a velocity. Use float32 or 16 bits, or leave momentum_correction out."
            )
        self.store = ResidualStore(topology.device_index, topology.num_devices)
        self._topology, self._log_once = topology, log_once
        self._parameters = parameters
        self._optimizer: torch.optim.Optimizer | None = None
        self._in_step: list[dict[str, Any]] = []  # what was taken out of each param group
        self._handles: list[Any] = []
        self._proposed: dict[ParamGroup, Tensor] = {}
        self._terms: dict[str, _Terms] = {}  # of the parameters of the optimizer, in the next round
        self._decays: dict[str, float] = {}  # their weight decay, this node's share

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Take over the momentum of the one optimizer.

        Raises:
            ValueError: for another optimizer than SGD, several, one without momentum, or one with dampening.
        """
        optimizers = list(optimizers)
        way_out = "Leave momentum_correction out."
        if len(optimizers) != 1:
            raise ValueError(f"momentum_correction=True with {len(optimizers)} optimizers; it needs one. {way_out}")
        (optimizer,) = optimizers
        if type(optimizer).step is not torch.optim.SGD.step:
            raise ValueError(
                f"momentum_correction=True with {type(optimizer).__name__}: the correction is that of torch.optim.SGD. "
                f"{way_out}"
            )
        if not any(group["momentum"] for group in optimizer.param_groups):
            raise ValueError(f"momentum_correction=True with SGD(momentum=0), which must be more than 0. {way_out}")
        if any(group["dampening"] for group in optimizer.param_groups):
            raise ValueError(f"momentum_correction=True with SGD(dampening=...), which must be 0. {way_out}")
        self.unwatch()
        if self._optimizer not in (None, optimizer):
            self.store.clear()  # a new optimizer begins without momentum
        self._optimizer, self._terms = optimizer, {}
        self._handles = [
            optimizer.register_step_pre_hook(self._disable_momentum),
            optimizer.register_step_post_hook(self._restore_momentum),
            optimizer.register_state_dict_post_hook(self._correct_saved),
            optimizer.register_load_state_dict_post_hook(self._look_at_loaded),
        ]
        self._look_at_loaded(optimizer)

    def unwatch(self) -> None:
        """Leave the optimizer as it was given."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._restore_momentum()

    def begin_round(self, waiting: Set[str]) -> None:
        """Read what the optimizer's options are now: schedulers change them at any step.

        Args:
            waiting: parameters whose last gradient has been reduced and not been stepped.

        Raises:
            ValueError: without an optimizer, or where a velocity is in the gradients already; naming the way out.
        """
        self._read_options()
        stepped = waiting & self._terms.keys()
        if stepped:
            raise ValueError(
                f"momentum_correction=True with another backward pass before the step, for which "
                f"{', '.join(sorted(stepped)[:3])} wait: momentum moves once a step. Wrap all but the last pass in "
                f"no_sync(), as Trainer(accumulate_grad_batches=...) does, or leave momentum_correction out."
            )

    def momentum_equivalents(self) -> dict[str, tuple[float, float]]:
        """By name, what a checkpoint must say so that another run can give SGD its momentum back: a gradient of
        ``tail[0] * v + tail[1] * u``, met by SGD's own momentum, moves the parameter as far as v and u would have."""
        if self._optimizer is not None:
            self._read_options()
        return {name: (1.0 - each.keep, each.keep * each.velocity) for name, each in self._terms.items() if name}

    def advance(self, group: ParamGroup, sum_S: Tensor) -> Tensor:
        """Move the group's velocity, and return what joins the residual.

        Args:
            sum_S: the node's share of its mean gradient, fp32, unscaled; overwritten by the answer.
        """
        device_index, num_devices = self._topology.device_index, self._topology.num_devices
        old_S, next_S = self.store.latest(group), self.store.buffer(group, sum_S.device)
        if old_S is None:
            old_S = torch.zeros_like(next_S)
        if not self._terms:
            self._read_options()
        pieces = group.shard_slices(group.names, device_index, num_devices)
        for decay in {self._decays.get(name, 0.0) for name, _, _ in pieces} - {0.0}:
            decayed = [
                (here, in_bucket_order(self._parameters[name])[there])
                for name, here, there in pieces
                if self._decays.get(name) == decay
            ]
            values = [value.to(sum_S.dtype) for _, value in decayed]
            torch._foreach_add_([sum_S[here] for here, _ in decayed], values, alpha=decay)
        covered = 0
        for each, run in groupby(pieces, key=lambda piece: self._terms.get(piece[0], _UNKNOWN)):
            places = [here for _, here, _ in run]
            place = slice(places[0].start, places[-1].stop)
            gradient, velocity = sum_S[place], next_S[place]
            torch.add(gradient, old_S[place], alpha=each.keep, out=velocity)
            gradient.mul_(each.own).add_(velocity, alpha=each.velocity)
            covered = place.stop
        next_S[covered:].zero_()  # padding
        self._proposed[group] = next_S
        return sum_S

    def stop(self, group: ParamGroup, sent: Tensor) -> None:
        """Stop the velocity at the indices that are sent (section 3.3), for what it carried will be applied."""
        self._proposed[group].index_fill_(0, sent, 0.0)

    def stage(self, group: ParamGroup) -> Tensor:
        """Propose the velocity of this round, and return it."""
        next_S = self._proposed.pop(group)
        self.store.propose(group, next_S)
        return next_S

    def _read_options(self) -> None:
        """Return how the velocity of each parameter moves, and its share of weight decay, by name."""
        if self._optimizer is None:
            raise ValueError(
                "momentum_correction=True needs to know the optimizer: call state.watch([optimizer]) before the first "
                "backward pass, and state.before_backward() before each one."
            )
        groups = self._optimizer.param_groups
        given = [*self._in_step, *groups[len(self._in_step) :]]  # one may be added in a closure
        self._terms, self._decays = {}, {}
        for options, group in zip(given, groups, strict=True):
            momentum, nesterov = float(options["momentum"]), bool(options["nesterov"])
            moving = _Terms(momentum, 1.0, momentum) if nesterov else _Terms(momentum, 0.0, 1.0)
            decay = float(options["weight_decay"]) / self._topology.num_nodes * (-1 if group["maximize"] else 1)
            for parameter in group["params"]:
                name = self._parameters.name_of(parameter)
                self._terms[name], self._decays[name] = moving, decay

    def _disable_momentum(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._restore_momentum()  # after a step that raised
        self._in_step = [{name: group[name] for name in _TAKEN_OUT} for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group.update(_TAKEN_OUT)

    def _restore_momentum(self, *_: Any) -> None:
        if self._optimizer is not None:
            for group, given in zip(self._optimizer.param_groups, self._in_step, strict=False):
                group.update(given)
        self._in_step = []

    def _correct_saved(self, _: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """A state dict taken while a step is under way, or after one that raised, holds what the user gave."""
        for group, given in zip(state["param_groups"], self._in_step, strict=False):
            group.update(given)

    def _look_at_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Momentum that is there already is the mean of all nodes', and no node's: it is not taken over."""
        if any(state.get("momentum_buffer") is not None for state in optimizer.state.values()):
            self._log_once(
                "momentum_correction: the optimizer brings momentum along, of a run without the correction. It is not "
                "used: momentum begins at zero",
                logging.WARNING,
            )
