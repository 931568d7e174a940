"""A signal stops all ranks, or saves and requeues, after the same step, wherever in a batch it reaches a rank."""

import importlib
import logging
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fsdp.runs import whole
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.helpers.streams import signaled_in_write
from tests.strategy.trainers import lightning_of, ours, trainer
from tests.updates.test_trainer import adamw_module

PACKAGE = "pytorch_lightning"
MORE = 7  # steps after a stop
MANY: dict[str, Any] = {"nodes": 2, "devices": 2, "timeout": 150, "init": False}
ACCUMULATED, EPOCHS_OF_ONE_BATCH = {"accumulate_grad_batches": 2}, {"limit_train_batches": 1}


def by_step() -> Any:
    """Return a module whose batches depend on the step alone, so that a resumed run gets them, too."""
    torch.manual_seed(0)
    module = adamw_module(PACKAGE)

    def training_step(batch: Any, batch_idx: int) -> Any:
        seed = 100 * module.trainer.global_step + 10 * (batch_idx % 2) + module.global_rank
        time.sleep(0.002 * (module.global_rank % 3))  # ranks are in different places of a batch
        return module.net(torch.randn(4, 13, generator=torch.Generator().manual_seed(seed))).square().mean()

    module.training_step = training_step
    return module


def fit(kind: str, path: str | None = None, **options: Any) -> tuple[int, bool, Tensor]:
    """Return the number of steps, whether SIGTERM ended the fit, and the weights."""
    sparse: dict[str, Any] = {"density": 0.1}
    strategy = {
        "hier": lambda: ours(PACKAGE).MSTopKHierStrategy(**sparse, exchange="sparse", warmup_epochs=0),
        "local": lambda: ours(PACKAGE).MSTopKLocalStrategy(**sparse, sync_every=3),
        "fsdp": lambda: ours(PACKAGE).MSTopKFSDPStrategy(**sparse),
    }[kind]()
    t, module = trainer(PACKAGE, strategy, **options), by_step()
    try:
        t.fit(module, ckpt_path=path)
        stopped = False
    except SystemExit as error:
        stopped = type(error).__name__ == "SIGTERMException"
    return t.global_step, stopped, whole(module).clone()


def signals(number: int, ranks: list[int], after: tuple[int, ...] = (3,)) -> Any:
    """Return a callback that signals these ranks, each time at a random time after a batch."""

    class Signals(lightning_of(PACKAGE).Callback):  # type: ignore[misc, name-defined]
        batches = 0

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.batches += 1
            if self.batches in after and trainer.global_rank in ranks:
                after_s = random.Random().uniform(0, 0.1)
                threading.Timer(after_s, os.kill, (os.getpid(), number)).start()

    return Signals()


def stopped(kind: str, ranks: list[int], folder: str, options: dict[str, Any]) -> tuple[int, bool, bool]:
    """Return the steps before the stop, whether SIGTERM ended the fit, and whether the run resumes bit-identically."""
    callbacks = importlib.import_module(f"{lightning_of(PACKAGE).__name__}.callbacks")
    saver = {"callbacks": [signals(signal.SIGTERM, ranks), callbacks.OnExceptionCheckpoint(folder)]}
    steps, ended, _ = fit(kind, max_steps=100_000, enable_checkpointing=True, **saver, **options)
    _, _, expected = fit(kind, max_steps=steps + MORE, **options)
    _, _, resumed = fit(kind, f"{folder}/on_exception.ckpt", max_steps=steps + MORE, **options)
    return steps, ended, torch.equal(resumed, expected)


@pytest.mark.parametrize(
    ("kind", "ranks", "options"),
    [
        ("hier", [0, 1, 2, 3], {}),
        ("hier", [2, 3], EPOCHS_OF_ONE_BATCH),
        ("local", [0], ACCUMULATED),
        ("local", [0, 1, 2, 3], EPOCHS_OF_ONE_BATCH),
        ("fsdp", [3], {}),
    ],
)
def test_sigterm_stops_all_ranks_after_the_same_step_and_the_run_resumes(
    kind: str, ranks: list[int], options: dict[str, Any], tmp_path: Path
) -> None:
    found = run_ranks(stopped, kind, ranks, str(tmp_path), options, **MANY)
    assert len({steps for steps, _, _ in found}) == 1
    assert all(ended for _, ended, _ in found)
    assert all(resumes for _, _, resumes in found)


def stopped_at_the_end() -> tuple[int, bool]:
    class Signals(lightning_of(PACKAGE).Callback):  # type: ignore[misc, name-defined]
        def on_train_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_rank == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    steps, ended, _ = fit("hier", max_steps=7, callbacks=[Signals()])
    return steps, ended


def test_sigterm_to_one_rank_after_the_last_step_ends_the_program_on_all_ranks() -> None:
    assert run_ranks(stopped_at_the_end, **MANY) == [(7, True)] * 4


def stopped_in_a_write(ranks: list[int], folder: str) -> tuple[bool, str]:
    """Return whether SIGTERM ended the fit, and the output."""
    rank = int(os.environ["RANK"])
    with open(f"{folder}/{rank}.txt", "w+", buffering=1, encoding="utf-8") as file:
        sys.stderr = signaled_in_write(signal.SIGTERM, "step 5", file.fileno()) if rank in ranks else file
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)

        class Prints(lightning_of(PACKAGE).Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                print(f"step {trainer.global_step}", file=sys.stderr)

        _, ended, _ = fit("hier", max_steps=100_000, callbacks=[Prints()])
        sys.stderr = sys.__stderr__
        logging.basicConfig(force=True)
        file.seek(0)
        return ended, file.read()


def test_sigterm_in_the_write_of_a_log_line_stops_all_ranks(tmp_path: Path) -> None:
    found = run_ranks(stopped_in_a_write, [1, 2], str(tmp_path), **MANY)
    assert all(ended for ended, _ in found)
    assert any("received SIGTERM: all ranks stop after the same step" in output for _, output in found)


def one_dies() -> None:
    class Signals(lightning_of(PACKAGE).Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                os.kill(os.getpid(), signal.SIGKILL if trainer.global_rank == 3 else signal.SIGTERM)

    fit("hier", max_steps=100_000, callbacks=[Signals()])


@pytest.mark.slow
def test_ranks_end_with_an_error_if_a_rank_dies_before_it_answers_a_signal() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(one_dies, grace_s=60.0, **MANY)
    assert failed.value.killed.keys() == {3}
    assert failed.value.raised.keys() == {0, 1, 2}


def requeued(folder: str) -> tuple[int, bool]:
    """Return the steps of the run, and whether a run from the last requeued checkpoint ends with equal weights."""
    import lightning_fabric.plugins.environments as environments
    from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector as Connector

    find_path = Connector.hpc_save_path

    def find_path_late(folder: str) -> str:
        time.sleep(0.2 * rank)  # rank 0 may have saved already
        return find_path(folder)

    Connector.hpc_save_path = staticmethod(find_path_late)  # type: ignore[assignment]
    rank, devices = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    slurm = {"JOB_ID": "7", "JOB_NAME": "train", "NTASKS": os.environ["WORLD_SIZE"], "PROCID": str(rank)}
    slurm |= {"NTASKS_PER_NODE": str(devices), "LOCALID": str(rank % devices), "NODEID": str(rank // devices)}
    os.environ.update({f"SLURM_{name}": value for name, value in slurm.items()})
    os.environ["PATH"] = f"{folder}/bin:{os.environ['PATH']}"
    options = {"default_root_dir": folder, "max_steps": 400, "plugins": [environments.SLURMEnvironment()]}
    steps, _, expected = fit("hier", callbacks=[signals(signal.SIGUSR1, [3], after=(3, 200))], **options)
    _, _, resumed = fit("hier", "hpc", **options)
    return steps, torch.equal(resumed, expected)


def test_each_signal_of_slurm_saves_on_all_ranks_after_the_same_step_and_requeues_once(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    scontrol.chmod(0o755)
    assert run_ranks(requeued, str(tmp_path), **MANY) == [(400, True)] * 4
    assert (tmp_path / "requeued").read_text() == "requeue 7\n" * 2
    files = [f"hpc_ckpt_{number}.ckpt{end}" for number in (1, 2) for end in ("", ".residual")]
    assert sorted(path.name for path in tmp_path.glob("hpc_ckpt_*")) == files
    steps = [torch.load(tmp_path / name, weights_only=False)["global_step"] for name in files[::2]]
    assert 0 < steps[0] < steps[1] < 400
