"""A model by name, without its weights: how many gradients it has, and what it eats."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Model:
    """A network that is not there yet.

    Args:
        shapes: of the parameters that have gradients, in order.
        input_shape: of one sample, [C, H, W].
        build: makes it, with random weights, on the device that is current.
    """

    name: str
    shapes: tuple[torch.Size, ...]
    input_shape: tuple[int, ...]
    build: Callable[[], nn.Module]

    @property
    def numel(self) -> int:
        return sum(shape.numel() for shape in self.shapes)


def find(name: str) -> Model:
    """A model of torchvision, else of timm. Nothing is downloaded and next to nothing allocated.

    Raises:
        ValueError: when neither is installed, or neither knows the name; it names the closest ones.
    """
    known: list[str] = []
    for source in (_torchvision, _timm):
        names, build, input_shape = source()
        if name in names:
            with torch.device("meta"):
                network = build(name)
            shapes = tuple(p.shape for p in network.parameters() if p.requires_grad)
            return Model(name, shapes, input_shape(network), lambda build=build: build(name))  # type: ignore[misc]
        known += names
    if not known:
        raise ValueError(
            f"model={name!r} is looked up in torchvision and timm, and neither is installed: "
            f"pip install torchvision, or give --parameters instead."
        )
    close = difflib.get_close_matches(name, dict.fromkeys(known), n=4)
    hint = f"Did you mean {' or '.join(close)}?" if close else "See torchvision.models.list_models()."
    raise ValueError(f"model={name!r} is no classifier of torchvision or timm. {hint} Or give --parameters instead.")


Source = tuple[Iterable[str], Callable[[str], nn.Module], Callable[[nn.Module], tuple[int, ...]]]


def _torchvision() -> Source:
    try:
        from torchvision import models
    except ImportError:
        return (), _nothing, _picture
    return models.list_models(module=models), lambda name: models.get_model(name, weights=None), _picture


def _timm() -> Source:
    try:
        import timm
    except ImportError:
        return (), _nothing, _picture
    return timm.list_models(), lambda name: timm.create_model(name, pretrained=False), _picture


def _nothing(name: str) -> nn.Module:
    raise AssertionError(f"{name} is in no list")


def _picture(network: nn.Module) -> tuple[int, ...]:
    """timm's models say what they eat; the others take what ImageNet is usually cut to."""
    told: Any = getattr(network, "default_cfg", None) or {}
    return tuple(told.get("input_size", (3, 224, 224)))
