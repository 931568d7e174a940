"""M models of one shape, trained at once, with the parameters of all workers in one tensor.

`Models` holds M x N numbers, one row per worker, and the parameters of `CharacterTransformer` as views [M, ...]. So
forward and backward use batched products, an elementwise optimizer steps one tensor, and a row is the data that a
worker would exchange.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.convergence.text import CharacterTransformer
from benchmarks.gpu.models import Block


class Place(NamedTuple):
    """The place of a parameter in a row: elements [begin, end), of ``shape``."""

    begin: int
    end: int
    shape: torch.Size


class Models:
    """M copies of a model.

    Args:
        model: initial model of all workers.
        num: M.
        device: device of the training.

    Attributes:
        flat_MN: parameters, in the order of ``model.parameters()``.
        grad_MN: gradients.
        places: place of each parameter in a row, by name.
    """

    def __init__(self, model: CharacterTransformer, num: int, device: torch.device) -> None:
        self.num, self.layers = num, len(model.blocks)
        self.heads = next(block.heads for block in model.blocks if isinstance(block, Block))
        row_N = nn.utils.parameters_to_vector(model.parameters()).detach().to(device)
        self.flat_MN = row_N.repeat(num, 1)
        self.grad_MN = torch.zeros_like(self.flat_MN)
        self.places: dict[str, Place] = {}
        self._parameters: dict[str, Tensor] = {}
        begin = 0
        for name, parameter in model.named_parameters():
            place = Place(begin, begin + parameter.numel(), parameter.shape)
            begin = place.end
            self.places[name] = place
            self._parameters[name] = self.view(self.flat_MN, place).requires_grad_()

    @staticmethod
    def view(rows_MN: Tensor, place: Place) -> Tensor:
        """Return a parameter in all rows, [M, *shape]."""
        return rows_MN[:, place.begin : place.end].view(len(rows_MN), *place.shape)

    @property
    def numel(self) -> int:
        """N, number of parameters of one model."""
        return self.flat_MN.shape[1]

    def backward(self, x_MBL: Tensor, y_MBL: Tensor) -> Tensor:
        """Set the gradients of each model's mean loss, and return the mean over models, in nats.

        On a GPU, matrix products are in bfloat16, and parameters and gradients in fp32.
        """
        device = self.flat_MN.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            losses_M = self.losses(self._parameters, x_MBL, y_MBL)
        gradients = torch.autograd.grad(losses_M.sum(), list(self._parameters.values()))
        torch._foreach_copy_([self.view(self.grad_MN, place) for place in self.places.values()], list(gradients))
        return losses_M.detach().mean()

    @torch.no_grad()
    def bits(self, row_N: Tensor, x_BL: Tensor, y_BL: Tensor) -> float:
        """Return the bits per character of the model with these parameters."""
        parameters = {name: self.view(row_N[None], place) for name, place in self.places.items()}
        parts = zip(torch.split(x_BL, 256), torch.split(y_BL, 256), strict=True)
        nats = math.fsum(len(x) * self.losses(parameters, x[None], y[None]).item() for x, y in parts)
        return nats / len(x_BL) / math.log(2)

    def losses(self, parameters: dict[str, Tensor], x_MBL: Tensor, y_MBL: Tensor) -> Tensor:
        """Return the mean cross-entropy of each model, [M]."""
        models, batch, length = x_MBL.shape
        logits_MTS = self._forward(parameters, x_MBL)
        nats_T = F.cross_entropy(logits_MTS.flatten(0, 1), y_MBL.flatten(), reduction="none")
        return nats_T.view(models, batch * length).mean(1)

    def _forward(self, parameters: dict[str, Tensor], x_MBL: Tensor) -> Tensor:
        """Map [M, B, L] characters to [M, B * L, symbols] logits, as `CharacterTransformer.forward` does."""
        models, batch, length = x_MBL.shape

        def linear(name: str, x_MTI: Tensor) -> Tensor:
            weight_MOI, bias_MO = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
            return torch.baddbmm(bias_MO[:, None], x_MTI, weight_MOI.transpose(1, 2))

        def norm(name: str, x_MTD: Tensor) -> Tensor:
            weight_MD, bias_MD = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
            return F.layer_norm(x_MTD, x_MTD.shape[-1:]) * weight_MD[:, None] + bias_MD[:, None]

        def attention(name: str, x_MTD: Tensor) -> Tensor:
            qkv = linear(f"{name}.qkv", x_MTD).view(models * batch, length, 3, self.heads, -1)
            query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
            seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            return linear(f"{name}.out", seen.transpose(1, 2).reshape(x_MTD.shape))

        symbol_MSD = parameters["symbol.weight"]
        offset_M = torch.arange(models, device=x_MBL.device) * symbol_MSD.shape[1]
        x_MTD = F.embedding(x_MBL.flatten(1) + offset_M[:, None], symbol_MSD.reshape(-1, symbol_MSD.shape[-1]))
        x_MTD = x_MTD + parameters["position.weight"][:, :length].repeat(1, batch, 1)
        for layer in range(self.layers):
            block = f"blocks.{layer}"
            x_MTD = x_MTD + attention(block, norm(f"{block}.norms.0", x_MTD))
            wide = F.gelu(linear(f"{block}.mlp.0", norm(f"{block}.norms.1", x_MTD)))
            x_MTD = x_MTD + linear(f"{block}.mlp.2", wide)
        return linear("head", norm("norm", x_MTD))


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al. 2024) on the matrices of the blocks, of all models at once, and AdamW on the rest.

    One learning rate serves both: updates of matrices have the root mean square of AdamW's (Liu et al. 2025), as in
    torch.optim.Muon with ``adjust_lr_fn="match_rms_adamw"``.
    """

    MOMENTUM, STEPS, TERMS = 0.95, 5, (3.4445, -4.7750, 2.0315)

    def __init__(self, models: Models, lr: float, weight_decay: float) -> None:
        super().__init__([models.flat_MN], lr, weight_decay=weight_decay, fused=True)
        self._models, self._momentum_MN = models, torch.zeros_like(models.flat_MN)
        self._places = [p for name, p in models.places.items() if name.startswith("blocks") and len(p.shape) == 2]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        models, lr = self._models, self.param_groups[0]["lr"]
        updates = []
        for place in self._places:
            gradient, momentum = models.view(models.grad_MN, place), models.view(self._momentum_MN, place)
            momentum.mul_(self.MOMENTUM).add_(gradient)
            updates.append(self._orthogonal(gradient.add(momentum, alpha=self.MOMENTUM)))
            gradient.zero_()
        super().step()  # for matrices, only the weight decay
        for place, update in zip(self._places, updates, strict=True):
            models.view(models.flat_MN, place).sub_(update, alpha=0.2 * lr * max(place.shape) ** 0.5)

    def _orthogonal(self, x: Tensor) -> Tensor:
        """Return matrices with singular values near 1, by the Newton-Schulz iteration."""
        a, b, c = self.TERMS
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        if is_tall := x.shape[-2] > x.shape[-1]:
            x = x.mT
        for _ in range(self.STEPS):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.mT if is_tall else x
