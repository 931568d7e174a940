"""A model with precomputed gradients: a step consists of DDP and its hook only."""

# No "from __future__ import annotations": DDP checks the annotations of a hook.
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class _HandOut(torch.autograd.Function):
    """Backward returns slices of ``source``, starting at an offset, as the gradients."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, offset: int, *parameters: Tensor) -> Tensor:
        ctx.source, ctx.offset, ctx.shapes = source, offset, [p.shape for p in parameters]
        return source.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        begin, gradients = ctx.offset, []
        for shape in ctx.shapes:
            gradients.append(ctx.source[begin : begin + shape.numel()].view(shape))
            begin += shape.numel()
        return None, None, *gradients


class Gradients(nn.Module):
    """Parameters over a shared storage; forward(offset) is a scalar whose gradients are slices of ``source``."""

    def __init__(self, shapes: Sequence[torch.Size], storage: Tensor, source: Tensor) -> None:
        super().__init__()
        ends = torch.tensor([shape.numel() for shape in shapes]).cumsum(0).tolist()
        views = [storage[end - shape.numel() : end].view(shape) for end, shape in zip(ends, shapes, strict=True)]
        self.all = nn.ParameterList([nn.Parameter(view) for view in views])
        self.source = source

    def forward(self, offset: int) -> Tensor:
        loss: Tensor = _HandOut.apply(self.source, offset, *self.all)
        return loss
