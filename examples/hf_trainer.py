"""Exchange updates between nodes in the Trainer of Hugging Face transformers, with a callback of three methods.

lightning-sparse lab --no-net --nodes 2 --devices 2 -- examples/hf_trainer.py      # needs transformers and accelerate
"""

import sys
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from lightning_sparse.topology import discover
from lightning_sparse.updates import LocalUpdates, UpdatesConfig


class ExchangeUpdates(TrainerCallback):  # type: ignore[misc]
    """DDP averages inside each node, and nodes exchange the largest of their updates.

    Args:
        trainer: The Trainer that gets this callback.
        **options: Options of UpdatesConfig, such as ``density``.
    """

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        self.trainer, self.config = trainer, UpdatesConfig(**options)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        topology, ddp = discover(), self.trainer.model_wrapped
        if topology.kind == "hierarchical":
            ddp.register_comm_hook(topology.intra, allreduce_hook)
        optimizer = self.trainer.optimizer.optimizer  # accelerate wraps it
        self.updates = LocalUpdates(ddp.module, optimizer, self.config, topology)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.updates.step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.updates.finish()


def main() -> None:
    torch.manual_seed(0)
    counting = [{"input_ids": (row := (torch.arange(32) + i) % 50), "labels": row} for i in range(256)]
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)
    )
    output = sys.argv[1] if len(sys.argv) > 1 else "runs/hf"
    arguments = TrainingArguments(
        output, per_device_train_batch_size=8, num_train_epochs=4, learning_rate=3e-3, use_cpu=True,
        save_strategy="no", report_to=[], logging_steps=8, ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=counting)
    trainer.add_callback(ExchangeUpdates(trainer, density=0.05))
    trainer.train()
    print(f"rank {arguments.process_index}: weights {sum(p.double().sum() for p in model.parameters()):.12f}")


if __name__ == "__main__":
    main()
