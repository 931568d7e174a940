"""The state of a node's optimizers in a checkpoint, by pieces of parameters, so that any division can load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sparse.checkpoint.state import Piece, State, layout_of, read_slice
from lightning_sparse.sharding import Part, flat_view, flat_view_of_part, flatten_like, local_of, part_of
from lightning_sparse.updates.optimizer import LocalOptimizer

Stepped = Sequence[tuple[Optimizer, Sequence[tuple[Tensor, Part]]]]
"""Of optimizers the part of each parameter that this device steps."""


def state_of(optimizers: Sequence[LocalOptimizer], names: Mapping[int, str]) -> State:
    """Return this device's part of the state of all optimizers, on the CPU."""
    state, other_values = State(), dict[str, dict[str, Any]]()
    for local_optimizer in optimizers:
        for parameter, part in local_optimizer.state.slices.pieces:
            name = names[id(parameter)]
            state.layouts[name] = layout_of(parameter)
            flats, other_values[name] = split(local_optimizer.optimizer, parameter, part)
            for quantity, flat in flats.items():
                piece = Piece(name, part.begin, part.end, flat.to("cpu", copy=True))
                state.pieces.setdefault(quantity, []).append(piece)
    # Values that do not follow a parameter's elements, such as step counts, are stored whole.
    state.own = {
        "rest": other_values,
        "groups": [options_of(local_optimizer.optimizer) for local_optimizer in optimizers],
    }
    return state


def split(optimizer: Optimizer, parameter: Tensor, part: Part) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split the state of a parameter into flat tensors, which follow the elements of the part, and other values.

    Flat tensors may be views. Tensors among the other values are on the CPU.
    """
    flats, other_values = dict[str, Tensor](), dict[str, Any]()
    for quantity, value in optimizer.state.get(parameter, {}).items():
        flat = _own_part(value, parameter, part)
        if flat is not None:
            flats[quantity] = flat
        else:
            other_values[quantity] = local_of(value).detach().cpu() if isinstance(value, Tensor) else to_python(value)
    return flats, other_values


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.param_groups
    return [{name: to_python(value) for name, value in group.items() if name != "params"} for group in groups]


def _own_part(value: Any, parameter: Tensor, part: Part) -> Tensor | None:
    # None: the value does not follow the elements of the parameter.
    if not isinstance(value, Tensor) or not value.dim():
        return None
    if isinstance(value, DTensor):
        return flat_view(value.to_local()) if value.shape == parameter.shape else None
    if value.shape == parameter.shape:
        return flatten_like(parameter, value)[part.begin : part.end]
    numel = part.end - part.begin
    return value.detach() if value.shape == (numel,) and numel < parameter.numel() else None


@torch.no_grad()
def load(names: Mapping[int, str], stepped: Stepped, devices: Sequence[State]) -> None:
    """Load the state that the devices of one node saved, for any number of devices and any division."""
    other_values = dict(chain.from_iterable(device.own["rest"].items() for device in devices))
    quantities = dict.fromkeys(quantity for device in devices for quantity in device.pieces)
    load_options([optimizer for optimizer, _ in stepped], devices[0].own["groups"])
    for optimizer, parts in stepped:
        for parameter, part in parts:
            name = names[id(parameter)]
            state = dict(other_values.get(name, {}))
            for quantity in quantities:
                flat = _read(devices, quantity, name, part, parameter)
                if flat is not None:
                    state[quantity] = as_stepped(flat, parameter, part)
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = placed(state, optimizer, parameter)


@torch.no_grad()
def load_whole(optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> None:
    """Load an unsharded optimizer's ``state_dict()``. The parameters may be sharded now.

    Raises:
        ValueError: if the groups differ in number or size.
    """
    groups, saved_groups = optimizer.param_groups, saved["param_groups"]
    sizes, saved_sizes = ([len(group["params"]) for group in of] for of in (groups, saved_groups))
    if sizes != saved_sizes:
        raise ValueError(
            f"{type(optimizer).__name__} was saved with groups of {saved_sizes} parameters, and has groups of {sizes} "
            f"now. Give it the groups that it had, or continue from the weights alone."
        )
    # Keys are indices in the order of the groups, or names. Parameters without saved state get none, as in
    # ``Optimizer.load_state_dict``.
    by_name = {key: key for group in saved_groups for key in group["params"] if isinstance(key, str)}
    for group, options in zip(groups, saved_groups, strict=True):
        for parameter, key in zip(group["params"], options["params"], strict=True):
            values = saved["state"].get(by_name.get(names[id(parameter)], key), {})
            part = part_of(parameter)
            own = {name: _cut(value, parameter, part) for name, value in values.items()}
            optimizer.state.pop(parameter, None)
            if own:
                optimizer.state[parameter] = placed(own, optimizer, parameter)
        group.update({name: value for name, value in options.items() if name != "params"})


def _cut(value: Any, parameter: Tensor, part: Part) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return as_stepped(flatten_like(parameter, value)[part.begin : part.end], parameter, part)


def check(optimizers: Sequence[Optimizer], devices: Sequence[State]) -> None:
    """Raise ValueError if the checkpoint belongs to other optimizers, as far as their groups tell."""
    for number, (optimizer, saved) in enumerate(zip(optimizers, devices[0].own["groups"], strict=False)):
        now = optimizer.param_groups
        if len(now) != len(saved):
            raise ValueError(
                f"optimizer {number} was saved with {len(saved)} parameter group(s), and has {len(now)} now: give it "
                f"the groups that it had, or continue from the weights alone."
            )
        for group, options in zip(now, saved, strict=True):
            lacks, foreign = optimizer.defaults.keys() - options.keys(), options.keys() - group.keys()
            if lacks and foreign:  # only one of them: another version of torch, or a scheduler
                raise ValueError(
                    f"optimizer {number} was saved with the option(s) {', '.join(sorted(foreign))}, and "
                    f"{type(optimizer).__name__} takes {', '.join(sorted(lacks))} instead: resume with the optimizer "
                    f"that was saved, or continue from the weights alone."
                )


def load_options(optimizers: Sequence[Optimizer], saved: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Restore the options of groups, such as learning rates, if the groups are equal in number."""
    groups = [optimizer.param_groups for optimizer in optimizers]
    if list(map(len, groups)) != list(map(len, saved)):
        return
    for group, options in zip(chain.from_iterable(groups), chain.from_iterable(saved), strict=True):
        group.update(options)


def _read(devices: Sequence[State], quantity: str, name: str, part: Part, parameter: Tensor) -> Tensor | None:
    def cut(state: State, *place: Any) -> Any:
        return state.cut(quantity, *place)

    return read_slice(devices, cut, name, part.begin, part.end, layout_of(parameter))


def as_stepped(flat: Tensor, parameter: Tensor, part: Part) -> Tensor:
    """Return a flat state tensor in the form that the optimizer's step uses."""
    flat = flat.to(parameter.device)
    if isinstance(parameter, DTensor):
        local = torch.empty_like(parameter.to_local(), dtype=flat.dtype)
        flat_view(local).copy_(flat)
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    if len(flat) < parameter.numel():
        return flat
    whole = torch.empty_strided(parameter.shape, parameter.stride(), dtype=flat.dtype, device=flat.device)
    flat_view_of_part(whole, part).copy_(flat)
    return whole


def placed(found: Mapping[str, Any], optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return state tensors on their devices."""
    group = next(candidate for candidate in optimizer.param_groups if any(p is parameter for p in candidate["params"]))
    # Step counts stay on the CPU, unless the optimizer runs without the host. A 0-dim parameter has 0-dim state, too.
    all_there = group.get("capturable") or group.get("fused")

    def place(name: str, value: Any) -> Any:
        follows = isinstance(value, Tensor) and (value.dim() or (not parameter.dim() and name != "step"))
        return value.to(parameter.device) if follows or (all_there and isinstance(value, Tensor)) else value

    return {name: place(name, value) for name, value in found.items()}


def to_python(value: Any) -> Any:
    """Replace NumPy numbers by Python's."""
    # A scheduler may leave such numbers in an optimizer, and a safe load refuses them.
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {name: to_python(item) for name, item in value.items()}
    return type(value)(map(to_python, value)) if type(value) in (list, tuple) else value
