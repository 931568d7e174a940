"""The two models of the GPU session, in plain torch, because the machine may lack torchvision and a package index.

The blocks of the GPT also serve convergence/text.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Task:
    """A training task.

    Args:
        build: makes the model on the CPU.
        loss: returns the loss of the model on a batch.
        batch: makes a batch on a given device.
        optimizer: makes the optimizer of parameters.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor]
    batch: Callable[[torch.device], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((before, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        layers: list[nn.Module] = []
        for i, o, kernel, step in sizes:
            layers += [nn.Conv2d(i, o, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if before != 4 * width or stride != 1:
            conv = nn.Conv2d(before, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet50(width: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> nn.Module:
    """Return ResNet-50: with the defaults 25,557,032 parameters in the shapes of torchvision's."""
    stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks, before = [], width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            blocks.append(Bottleneck(before, width << stage, 2 if stage and not block else 1))
            before = 4 * (width << stage)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


class Block(nn.Module):
    """Causal attention, then a perceptron, each on a normalized copy and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + self.mlp(self.norms[1](x))
        return y


class GPT(nn.Module):
    """A GPT: with the defaults 124,439,808 parameters in the shapes of GPT-2's smallest."""

    def __init__(
        self, width: int = 768, heads: int = 12, depth: int = 12, tokens: int = 50257, context: int = 1024
    ) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return functional.linear(self.norm(self.blocks(x)), self.embedding.weight)


def _classify(model: nn.Module, images: Tensor) -> Tensor:
    logits = model(images)
    return functional.cross_entropy(logits.float(), torch.arange(len(images), device=images.device) % logits.shape[1])


def _predict(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


BATCHES = 16
"""Number of different batches. With one batch for all steps, AdamW soon changes all entries by the same amount."""


def batches_of(task: Task, device: torch.device, count: int = BATCHES) -> list[Tensor]:
    """Return the batches that all methods of a comparison use in turn, on the device."""
    return [task.batch(device) for _ in range(count)]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5)


def _images(count: int, size: int) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.randn(count, 3, size, size, device=device)


def _tokens(count: int, length: int, most: int) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.randint(most, (count, length), device=device)


FULL = {
    "resnet50": Task(resnet50, _classify, _images(128, 224), _sgd),
    "gpt": Task(GPT, _predict, _tokens(8, 1024, 50257), _adamw),
}
SMALL = {  # for a run on a CPU
    "resnet50": Task(lambda: resnet50(8, (1, 1, 1, 1), 10), _classify, _images(8, 32), _sgd),
    "gpt": Task(lambda: GPT(64, 2, 2, 512, 64), _predict, _tokens(4, 64, 512), _adamw),
}
