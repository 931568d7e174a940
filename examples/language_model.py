"""Train a GPT on the tokens of any text. The YAML file sets the strategy.

    lightning-sparse tokens tokens.bin "$(python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')"/*.py
    python language_model.py fit --config language/ddp.yaml --data.train tokens.bin

``language/README.md`` has the commands for torchrun, SLURM, and larger models. To see the difference between DDP and
exchanging updates, run ``diff language/ddp.yaml language/local.yaml``.
"""

from __future__ import annotations

import math
import time
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sparse.flavours.pytorch_lightning import TokenDataModule

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Causal attention, then a perceptron. Each works on a normalized copy and is added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads={heads} must divide width={width}. Use heads=4 with width=128, for example.")
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        batch, length, width = x_BLD.shape
        q, k, v = self.qkv(self.norm1(x_BLD)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLD = x_BLD + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.down(F.gelu(self.up(self.norm2(x_BLD))))
        return x_BLD + added


class GPT(nn.Module):
    """Maps [B, L] tokens to [B, L, vocabulary] logits of the next tokens. The head is the transposed embedding."""

    def __init__(self, vocab_size: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab_size, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.token.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = 0.02 / math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.token(tokens_BL) + self.position.weight[: tokens_BL.shape[1]]
        for block in self.blocks:
            x_BLD = block(x_BLD)
        logits: Tensor = self.head(self.norm(x_BLD))
        return logits


class LanguageModel(pl.LightningModule):
    """
    Args:
        vocab_size, context: taken from the data.
        layers, heads, width: the size of the GPT.
        optimizer: ``"muon"`` uses torch's Muon for the matrices of the blocks, and AdamW for all other parameters.
        lr: the peak learning rate, after the fraction ``warmup`` of the steps. Then it falls as a cosine to lr / 10.
        lr_muon: the peak learning rate of Muon.
        weight_decay: the weight decay of matrices.
        bytes_per_token: average bytes of text per token, for bits per byte; 1 for byte tokens.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        optimizer: Literal["adamw", "muon"] = "adamw",
        lr: float = 3e-3,
        lr_muon: float = 0.02,
        warmup: float = 0.1,
        weight_decay: float = 0.1,
        bytes_per_token: float = 1.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = GPT(vocab_size, context, layers, heads, width)
        self.automatic_optimization = optimizer == "adamw"
        self._began: float | None = None

    def loss(self, batch: Batch) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(self.net(tokens).flatten(0, 1), following.flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        # without sync_dist, which would add a collective over the slow network to every step
        self.log("train_bits", self._bits(loss), prog_bar=True)
        if not self.automatic_optimization:
            self._step_all(loss)
        return loss

    def _step_all(self, loss: Tensor) -> None:
        """Step all optimizers, because the Trainer steps only one."""
        optimizers: Any = self.optimizers()
        schedules: Any = self.lr_schedulers()
        self.zero_grad()
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        every = 10  # batches
        if (batch_idx + 1) % every:
            return
        now, tokens = time.perf_counter(), every * batch[0].numel() * self.trainer.world_size
        if self._began is not None:
            self.log("tokens_per_s", tokens / (now - self._began), prog_bar=True)
        self._began = now

    def on_validation_start(self) -> None:
        self._began = None

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        targets = int((batch[1] >= 0).sum())  # the number of targets differs between packed windows
        self.log("val_bits", self._bits(self.loss(batch)), prog_bar=True, sync_dist=True, batch_size=targets)

    def _bits(self, nats: Tensor) -> Tensor:
        bits: Tensor = nats.detach() / math.log(2) / self.hparams["bytes_per_token"]
        return bits

    def configure_optimizers(self) -> Any:
        hp: Any = self.hparams
        parameters = dict(self.net.named_parameters())
        hidden = [name for name, p in parameters.items() if p.ndim == 2 and name.startswith("blocks.")]
        other = [p for name, p in parameters.items() if p.ndim == 2 and name not in hidden]
        vectors: dict[str, Any] = {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0}
        matrices = [parameters[name] for name in hidden]
        common: dict[str, Any] = {"lr": hp.lr, "betas": (0.9, 0.95), "weight_decay": hp.weight_decay}
        made: list[torch.optim.Optimizer]
        if hp.optimizer == "muon":
            muon = torch.optim.Muon(matrices, lr=hp.lr_muon, weight_decay=hp.weight_decay)
            made = [muon, torch.optim.AdamW([{"params": other}, vectors], **common)]
        else:
            made = [torch.optim.AdamW([{"params": [*other, *matrices]}, vectors], **common)]
        steps = int(self.trainer.estimated_stepping_batches)
        if self.trainer.max_steps > 0:
            steps = min(steps, self.trainer.max_steps // len(made))  # Trainer counts the steps of each optimizer

        def factor(step: int) -> float:
            rising = int(hp.warmup * steps)
            if step < rising:
                return (step + 1) / rising
            return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - rising) / max(1, steps - rising)))

        schedules = [torch.optim.lr_scheduler.LambdaLR(each, factor) for each in made]
        return made, [{"scheduler": each, "interval": "step"} for each in schedules]


class LanguageCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.context", "model.context")
        parser.link_arguments("data.vocab_size", "model.vocab_size", apply_on="instantiate")


if __name__ == "__main__":
    LanguageCLI(LanguageModel, TokenDataModule, seed_everything_default=42, save_config_kwargs={"overwrite": True})
