"""Momentum correction and masking for torch's SGD (Deep Gradient Compression, Lin et al., ICLR 2018, 3.2 and 3.3).

With error feedback alone, a gradient that waited in the residual lacks the momentum of the rounds in between. So each
node keeps a velocity u and selects from the accumulated velocity, the residual v. Both are sharded:

    d = g + weight_decay / M * parameter        this node's share of the gradient of SGD
    u = momentum * u + d
    v = v + u                                   Nesterov: v + d + momentum * u
    the K largest of v are sent; there v becomes zero, and u, too, unless everything is sent (masking)

So the sum over nodes of a *dense* round is the step of torch's SGD divided by the learning rate. At density 1, a run
equals SGD except for rounding, and except for parameters that no rank uses: they keep their velocity, while torch's SGD
moves them. Callbacks, loggers and clipping see the velocity as the gradient.
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
    """u = ``keep`` * u + d, and v = v + ``own`` * d + ``velocity`` * u."""

    keep: float
    own: float
    velocity: float


_UNKNOWN = _Terms(0.0, 0.0, 1.0)
"""The terms of a parameter that is in no optimizer."""


class MomentumCorrection:
    """The velocities of one device, on a hierarchical topology."""

    def __init__(self, parameters: Parameters, topology: Topology, log_once: Callable[[str, int], None]) -> None:
        odd = [n for n, dtype in parameters.dtypes.items() if parameters[n].requires_grad and dtype not in BY_SHARD]
        if odd:
            raise ValueError(
                f"momentum_correction=True with 64-bit or complex parameters ({', '.join(odd[:3])}): they are reduced "
                f"whole, without a velocity. Use 32 or 16 bits, or omit momentum_correction."
            )
        self.store = ResidualStore(topology.device_index, topology.num_devices)
        self._topology, self._log_once = topology, log_once
        self._parameters = parameters
        self._optimizer: torch.optim.Optimizer | None = None
        self._in_step: list[dict[str, Any]] = []  # options removed from each param group
        self._handles: list[Any] = []
        self._proposed: dict[ParamGroup, Tensor] = {}
        self._terms: dict[str, _Terms] = {}  # by parameter, for the next round
        self._decays: dict[str, float] = {}  # by parameter: this node's share of the weight decay

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Take over the momentum of the optimizer.

        Raises:
            ValueError: for anything but one SGD with momentum and without dampening.
        """
        optimizers = list(optimizers)
        fix = "Leave momentum_correction out."
        if len(optimizers) != 1:
            raise ValueError(f"momentum_correction=True with {len(optimizers)} optimizers; it needs one. {fix}")
        (optimizer,) = optimizers
        if type(optimizer).step is not torch.optim.SGD.step:
            raise ValueError(
                f"momentum_correction=True with {type(optimizer).__name__}: the correction applies to torch.optim.SGD. "
                f"{fix}"
            )
        if not any(group["momentum"] for group in optimizer.param_groups):
            raise ValueError(f"momentum_correction=True with SGD(momentum=0), which must be more than 0. {fix}")
        if any(group["dampening"] for group in optimizer.param_groups):
            raise ValueError(f"momentum_correction=True with SGD(dampening=...), which must be 0. {fix}")
        self.unwatch()
        if self._optimizer not in (None, optimizer):
            self.store.clear()  # a new optimizer has no momentum
        self._optimizer, self._terms = optimizer, {}
        self._handles = [
            optimizer.register_step_pre_hook(self._disable_momentum),
            optimizer.register_step_post_hook(self._restore_momentum),
            optimizer.register_state_dict_post_hook(self._correct_saved),
            optimizer.register_load_state_dict_post_hook(self._look_at_loaded),
        ]
        self._look_at_loaded(optimizer)

    def unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._restore_momentum()

    def begin_round(self, waiting: Set[str]) -> None:
        """Read the current options of the optimizer, which schedulers may have changed.

        Raises:
            ValueError: without an optimizer, or if the gradients of ``waiting`` parameters already contain a velocity.
        """
        self._read_options()
        stepped = waiting & self._terms.keys()
        if stepped:
            raise ValueError(
                f"momentum_correction=True with several backward passes per step ({', '.join(sorted(stepped)[:3])} "
                f"wait for a step): the velocity moves once per step. Wrap all passes except the last in no_sync(), as "
                f"Trainer(accumulate_grad_batches=...) does, or omit momentum_correction."
            )

    def momentum_equivalents(self) -> dict[str, tuple[float, float]]:
        """Return (a, b) by name for a checkpoint.

        Through SGD's own momentum, a gradient of a * v + b * u has the effect of v and u.
        """
        if self._optimizer is not None:
            self._read_options()
        return {name: (1.0 - terms.keep, terms.keep * terms.velocity) for name, terms in self._terms.items() if name}

    def advance(self, group: ParamGroup, sum_S: Tensor) -> Tensor:
        """Update the group's velocity, and return the tensor to add to the residual.

        Args:
            sum_S: the node's share of its mean gradient, fp32, unscaled; overwritten.
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
                (shard_slice, in_bucket_order(self._parameters[name])[param_slice])
                for name, shard_slice, param_slice in pieces
                if self._decays.get(name) == decay
            ]
            values = [value.to(sum_S.dtype) for _, value in decayed]
            torch._foreach_add_([sum_S[shard_slice] for shard_slice, _ in decayed], values, alpha=decay)
        covered = 0
        for terms, run in groupby(pieces, key=lambda piece: self._terms.get(piece[0], _UNKNOWN)):
            places = [shard_slice for _, shard_slice, _ in run]
            place = slice(places[0].start, places[-1].stop)
            gradient, velocity = sum_S[place], next_S[place]
            torch.add(gradient, old_S[place], alpha=terms.keep, out=velocity)
            gradient.mul_(terms.own).add_(velocity, alpha=terms.velocity)
            covered = place.stop
        next_S[covered:].zero_()  # padding
        self._proposed[group] = next_S
        return sum_S

    def stop(self, group: ParamGroup, sent: Tensor) -> None:
        # Masking: the velocity of sent entries becomes zero (section 3.3).
        self._proposed[group].index_fill_(0, sent, 0.0)

    def stage(self, group: ParamGroup) -> Tensor:
        next_S = self._proposed.pop(group)
        self.store.propose(group, next_S)
        return next_S

    def _read_options(self) -> None:
        if self._optimizer is None:
            raise ValueError(
                "momentum_correction=True without an optimizer. Call state.watch([optimizer]) before the first "
                "backward pass, and state.before_backward() before each backward pass."
            )
        groups = self._optimizer.param_groups
        user_options = [*self._in_step, *groups[len(self._in_step) :]]  # a closure may add a group
        self._terms, self._decays = {}, {}
        for options, group in zip(user_options, groups, strict=True):
            momentum, nesterov = float(options["momentum"]), bool(options["nesterov"])
            moving = _Terms(momentum, 1.0, momentum) if nesterov else _Terms(momentum, 0.0, 1.0)
            decay = float(options["weight_decay"]) / self._topology.num_nodes * (-1 if group["maximize"] else 1)
            for parameter in group["params"]:
                name = self._parameters.name_of(parameter)
                self._terms[name], self._decays[name] = moving, decay

    def _disable_momentum(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # The optimizer's own momentum is off only during its step. Schedulers and checkpoints see the user's values.
        self._restore_momentum()  # in case a step raised
        self._in_step = [{name: group[name] for name in _TAKEN_OUT} for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group.update(_TAKEN_OUT)

    def _restore_momentum(self, *_: Any) -> None:
        if self._optimizer is not None:
            for group, user_options in zip(self._optimizer.param_groups, self._in_step, strict=False):
                group.update(user_options)
        self._in_step = []

    def _correct_saved(self, _: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        # Between the hooks, or after a step that raised, the param groups lack the user's options.
        for group, user_options in zip(state["param_groups"], self._in_step, strict=False):
            group.update(user_options)

    def _look_at_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        # Loaded momentum is the mean over nodes, so no node can continue with it.
        if any(state.get("momentum_buffer") is not None for state in optimizer.state.values()):
            self._log_once(
                "momentum_correction: the loaded optimizer state has momentum of a run without the correction. It is "
                "not used, and momentum starts at zero",
                logging.WARNING,
            )
