"""Models by name, without weights: parameter shapes and input shape."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Model:
    """A model that is not built yet.

    Args:
        shapes: shapes of the parameters that require gradients, in order.
        input_shape: shape of one sample, [C, H, W].
        build: builds the model with random weights on the current device.
    """

    name: str
    shapes: tuple[torch.Size, ...]
    input_shape: tuple[int, ...]
    build: Callable[[], nn.Module]

    @property
    def numel(self) -> int:
        return sum(shape.numel() for shape in self.shapes)


def find(name: str) -> Model:
    """Look up a model in torchvision, then in timm, without downloads.

    Raises:
        ValueError: if neither is installed, or neither has the model.
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
            f"model={name!r} needs torchvision or timm, and neither is installed: "
            f"pip install torchvision, or give --parameters instead."
        )
    close = difflib.get_close_matches(name, dict.fromkeys(known), n=4)
    hint = f"Did you mean {' or '.join(close)}?" if close else "See torchvision.models.list_models()."
    raise ValueError(f"model={name!r} is not a classifier of torchvision or timm. {hint} Or give --parameters instead.")


Source = tuple[Iterable[str], Callable[[str], nn.Module], Callable[[nn.Module], tuple[int, ...]]]


def _torchvision() -> Source:
    try:
        from torchvision import models
    except ImportError:
        return (), _not_installed, _input_shape
    return models.list_models(module=models), lambda name: models.get_model(name, weights=None), _input_shape


def _timm() -> Source:
    try:
        import timm
    except ImportError:
        return (), _not_installed, _input_shape
    return timm.list_models(), lambda name: timm.create_model(name, pretrained=False), _input_shape


def _not_installed(name: str) -> nn.Module:
    raise AssertionError(name)


def _input_shape(network: nn.Module) -> tuple[int, ...]:
    """The input shape of a timm model; otherwise the usual ImageNet crop."""
    config: Any = getattr(network, "default_cfg", None) or {}
    return tuple(config.get("input_size", (3, 224, 224)))
