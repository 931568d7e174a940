"""Modules that use other libraries in the way that the documentation of each library shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.callbacks import LambdaCallback
from torch import Tensor, nn

from tests.updates.test_foreign_optimizers import Toy
from tests.works_with.runs import Classifier, Task


class Text(Task):
    """A model of transformers."""

    def __init__(self, alike: bool) -> None:
        super().__init__(alike)
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=23, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        self.model = GPT2LMHeadModel(config)

    def batch(self) -> Any:
        start = torch.randint(23, (8, 1))
        ids = (start + 3 * torch.arange(12)) % 23
        return {"input_ids": ids, "labels": ids}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return self.model(**batch).loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        from transformers import get_linear_schedule_with_warmup

        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=2 * steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def export(self, folder: Path) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        self.model.save_pretrained(folder / "gpt2")
        return {f"model.{name}": value for name, value in load_file(folder / "gpt2" / "model.safetensors").items()}


class Adapters(Text):
    """LoRA adapters of peft on a model of transformers. Checkpoints contain only the adapters."""

    def __init__(self, alike: bool) -> None:
        Task.__init__(self, alike)
        from peft import LoraConfig, TaskType, get_peft_model
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=23, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=12, num_labels=3,
        )  # fmt: skip
        adapters = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_alpha=16, target_modules=["query", "value"])
        self.model: Any = get_peft_model(BertForSequenceClassification(config), adapters)
        self.strict_loading = False

    def batch(self) -> Any:
        ids = torch.randint(23, (16, 12))
        return {"input_ids": ids, "labels": ids[:, 0] // 8}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        checkpoint["state_dict"] = {n: value for n, value in checkpoint["state_dict"].items() if n in trained}

    def export(self, folder: Path) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        self.model.save_pretrained(folder / "lora")
        saved = load_file(folder / "lora" / "adapter_model.safetensors")
        names = {n.replace(".default", "").replace(".modules_to_save", ""): n for n in self.state_dict()}
        return {names[f"model.{name}"]: value for name, value in saved.items()}


class Images(Classifier):
    """A model, a schedule and an average of timm."""

    def __init__(self, alike: bool) -> None:
        super().__init__(alike)
        import timm
        from timm.utils import ModelEmaV3

        self.model = timm.create_model("test_resnet", num_classes=3)
        self.ema = ModelEmaV3(self.model, decay=0.9).requires_grad_(False)

    def batch(self) -> Any:
        x, y = torch.randn(8, 3, 32, 32), torch.randint(3, (8,))
        return x + 2 * nn.functional.one_hot(y, 3)[:, :, None, None], y

    def configure_callbacks(self) -> Any:
        return LambdaCallback(on_train_batch_end=lambda trainer, *_: self.ema.update(self.model, trainer.global_step))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_ema", nn.functional.cross_entropy(self.ema(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        from timm.optim import create_optimizer_v2
        from timm.scheduler import CosineLRScheduler

        optimizer = create_optimizer_v2(self.model, opt="adamw", lr=5e-3, weight_decay=0.01)
        return [optimizer], [{"scheduler": CosineLRScheduler(optimizer, t_initial=10), "interval": "epoch"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch)


class Metrics(Classifier):
    """Metrics of torchmetrics: logged by Lightning, and computed and reset by hand."""

    def __init__(self, alike: bool) -> None:
        super().__init__(alike)
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

        self.model = Toy()
        self.train_accuracy = MulticlassAccuracy(4)
        self.all = MetricCollection({"accuracy": MulticlassAccuracy(4, average="micro"), "f1": MulticlassF1Score(4)})
        self.val_all = self.all.clone(prefix="val_")
        self.all.persistent(True)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        logits = self(batch[0])
        self.train_accuracy(logits, batch[1])
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.all.update(logits, batch[1])
        return nn.functional.cross_entropy(logits, batch[1])

    def on_train_epoch_end(self) -> None:
        self.log_dict({f"epoch_{name}": value for name, value in self.all.compute().items()})
        self.all.reset()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.val_all.update(self(batch[0]), batch[1])
        self.log_dict(self.val_all)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Masks(Task):
    """A Unet of segmentation-models-pytorch, with its Dice loss and its IoU statistics."""

    def __init__(self, alike: bool) -> None:
        super().__init__(alike)
        import segmentation_models_pytorch as smp

        self.model = smp.Unet("tu-test_resnet", encoder_weights=None, decoder_channels=(24, 16, 8, 8, 4), classes=1)
        self.loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
        self.outputs: list[Any] = []

    def batch(self) -> Any:
        x = torch.randn(4, 3, 64, 64) + torch.randn(4, 3, 8, 8).repeat_interleave(8, 2).repeat_interleave(8, 3)
        return x, (x[:, :1] > 0).float()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.loss_fn(self.model(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        import segmentation_models_pytorch as smp

        found = self.model(batch[0]).sigmoid() > 0.5
        self.outputs.append(smp.metrics.get_stats(found.long(), batch[1].long(), mode="binary"))

    def on_validation_epoch_end(self) -> None:
        import segmentation_models_pytorch as smp

        tp, fp, fn, tn = (torch.cat(each) for each in zip(*self.outputs, strict=True))
        self.log("val", smp.metrics.iou_score(tp, fp, fn, tn, reduction="micro"), sync_dist=True)
        self.outputs.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByOptimizer(Classifier):
    """A small model for optimizers."""

    def __init__(self, alike: bool) -> None:
        super().__init__(alike)
        self.model = nn.Sequential(nn.Linear(16, 203), nn.Tanh(), nn.LayerNorm(203), nn.Linear(203, 4))


class ScheduleFree(ByOptimizer):
    """schedulefree: hooks switch the optimizer between its training mode and its evaluation mode."""

    def configure_optimizers(self) -> Any:
        from schedulefree import AdamWScheduleFree

        return AdamWScheduleFree(self.parameters(), lr=3e-2, warmup_steps=4)

    def on_train_start(self) -> None:
        self.optimizers().train()  # type: ignore[union-attr]

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self.optimizers().eval()  # type: ignore[union-attr]

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self.optimizers().train()  # type: ignore[union-attr]

    def on_train_end(self) -> None:
        self.optimizers().eval()  # type: ignore[union-attr]


class Lion(ByOptimizer):
    """lion-pytorch."""

    def configure_optimizers(self) -> Any:
        from lion_pytorch import Lion

        return Lion(self.parameters(), lr=3e-3, weight_decay=1e-2)


class Prodigy(ByOptimizer):
    """prodigyopt, with the schedule that its documentation recommends."""

    def configure_optimizers(self) -> Any:
        from prodigyopt import Prodigy

        optimizer = Prodigy(self.parameters(), lr=1.0, d_coef=0.5, weight_decay=0.01, safeguard_warmup=True)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)]


class Sam(ByOptimizer):
    """SAM of pytorch_optimizer, with manual optimization and a closure."""

    def __init__(self, alike: bool) -> None:
        super().__init__(alike)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        loss = closure()
        optimizer.step(closure)
        optimizer.zero_grad()
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        from pytorch_optimizer import SAM

        return SAM(self.parameters(), torch.optim.SGD, lr=0.02, momentum=0.9, rho=0.05)


class SamSteps(Sam):
    """SAM of pytorch_optimizer, with its two steps."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.first_step(zero_grad=True)
        self.manual_backward(self.loss(batch))
        optimizer.second_step(zero_grad=True)
        return {"loss": loss}


class Lookahead(ByOptimizer):
    """Lookahead of pytorch_optimizer around AdamW."""

    def configure_optimizers(self) -> Any:
        from pytorch_optimizer import Lookahead

        return Lookahead(torch.optim.AdamW(self.parameters(), lr=1e-2), k=5, alpha=0.5)


class Average(ByOptimizer):
    """ema-pytorch: the average is a submodule, and its loss is logged in validation."""

    def __init__(self, alike: bool) -> None:
        super().__init__(alike)
        from ema_pytorch import EMA

        self.ema = EMA(self.model, beta=0.9, update_after_step=2, update_every=1)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.ema.update()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_ema", nn.functional.cross_entropy(self.ema(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)


LIBRARIES: dict[str, tuple[str, Callable[[bool], Task]]] = {
    "transformers": ("transformers", Text),
    "peft": ("peft", Adapters),
    "timm": ("timm", Images),
    "torchmetrics": ("torchmetrics", Metrics),
    "segmentation-models-pytorch": ("segmentation_models_pytorch", Masks),
    "schedulefree": ("schedulefree", ScheduleFree),
    "lion-pytorch": ("lion_pytorch", Lion),
    "prodigyopt": ("prodigyopt", Prodigy),
    "pytorch_optimizer, SAM": ("pytorch_optimizer", Sam),
    "pytorch_optimizer, SAM's steps": ("pytorch_optimizer", SamSteps),
    "pytorch_optimizer, Lookahead": ("pytorch_optimizer", Lookahead),
    "ema-pytorch": ("ema_pytorch", Average),
}
