"""Find models by name, without weights: parameter shapes and input shape."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

SIZES = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "vgg19": 143_667_240,
    "vit_b_16": 86_567_656,
    "convnext_tiny": 28_589_128,
    "efficientnet_b0": 5_288_548,
    "bert-base": 109_482_240,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
}
"""Parameters of models that need no other package."""


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
    for names, create in _sources():
        if name in names:
            build = partial(create, name)
            with torch.device("meta"):
                network = build()
            shapes = tuple(p.shape for p in network.parameters() if p.requires_grad)
            # timm models know their input shape; otherwise the usual ImageNet crop
            config: Any = getattr(network, "default_cfg", None) or {}
            return Model(name, shapes, tuple(config.get("input_size", (3, 224, 224))), build)
        known += names
    if not known:
        raise ValueError(
            f"model={name!r} needs torchvision or timm, and neither is installed: "
            f"pip install torchvision, give --parameters instead, or name one of {', '.join(SIZES)}."
        )
    close = difflib.get_close_matches(name, dict.fromkeys(known), n=4)
    hint = f"Did you mean {' or '.join(close)}?" if close else "See torchvision.models.list_models()."
    raise ValueError(f"model={name!r} is not a classifier of torchvision or timm. {hint} Or give --parameters instead.")


def _sources() -> Iterator[tuple[list[str], Callable[[str], nn.Module]]]:
    """(names, function that builds a model by name) of each installed package."""
    with suppress(ImportError):
        from torchvision import models

        yield models.list_models(module=models), partial(models.get_model, weights=None)
    with suppress(ImportError):
        import timm

        yield timm.list_models(), partial(timm.create_model, pretrained=False)
