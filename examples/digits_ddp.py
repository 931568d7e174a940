"""Train a small ResNet on handwritten digits with DDP; to see the changes, `diff` it with digits_sparse.py."""

import pytorch_lightning as pl
from digits_common import Digits, Recorder, SmallResNet, arguments, cluster
from pytorch_lightning.callbacks import TQDMProgressBar


def main() -> None:
    args = arguments(__doc__)
    pl.seed_everything(1, verbose=False)
    args.data.parent.mkdir(parents=True, exist_ok=True)
    trainer = pl.Trainer(
        **cluster(),
        strategy="ddp",
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
