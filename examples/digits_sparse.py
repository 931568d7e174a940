"""Train a small ResNet on handwritten digits and exchange 1% of the gradients; `diff` it with digits_ddp.py."""

import pytorch_lightning as pl
from digits_common import Digits, Recorder, SmallResNet, arguments, cluster
from pytorch_lightning.callbacks import TQDMProgressBar

from lightning_sparse import MSTopKHierStrategy


def main() -> None:
    args = arguments(__doc__)
    pl.seed_everything(1, verbose=False)
    args.data.parent.mkdir(parents=True, exist_ok=True)
    trainer = pl.Trainer(
        **cluster(),
        strategy=MSTopKHierStrategy(density=0.01, exchange="sparse", warmup_epochs=1),
        max_epochs=args.epochs,
        limit_train_batches=args.share,
        callbacks=[TQDMProgressBar(), Recorder(args.result)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(SmallResNet(args.learning_rate), Digits(args.data, args.batch_size))
    if trainer.is_global_zero:
        print(f"validation accuracy: {float(trainer.callback_metrics['val_accuracy']):.3f}")


if __name__ == "__main__":
    main()
