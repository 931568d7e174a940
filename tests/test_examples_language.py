"""`examples/language_model.py` on two nodes, with each of its YAML files, with Muon, and resumed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_sparse.data.tokens import prepare

pytest.importorskip("pytorch_lightning", reason="the example is written for pytorch_lightning")
pytest.importorskip("jsonargparse", reason="LightningCLI needs it")

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--model.layers=2", "--model.width=32", "--data.context=16", "--data.batch_size=4", "--trainer.max_steps=6"]
CPU = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.logger=false"]
# Runs the command line of the example on each rank of two nodes, and saves the result.
RANK = """
import os, sys, torch
folder, result, *words = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ["LIGHTNING_SPARSE_NODE"] = f"node {2 * rank // world}"
os.chdir(folder)
from language_model import LanguageCLI, LanguageModel, TokenDataModule
from torch.distributed.tensor import DTensor
options = {"seed_everything_default": 42, "save_config_kwargs": {"overwrite": True}}
cli = LanguageCLI(LanguageModel, TokenDataModule, args=words, **options)
whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in cli.model.parameters()]
flat = torch.cat([each.detach().flatten() for each in whole])
torch.save({"weights": flat, "bits": float(cli.trainer.callback_metrics["val_bits"])}, f"{result}-{rank}.pt")
"""
Ends = list[dict[str, torch.Tensor]]


def fit(folder: Path, config: str, *more: str, ranks: int) -> Ends:
    """Return the weights and the validation bits of each rank."""
    (folder / "rank.py").write_text(RANK)
    name = f"{config}-{len(list(folder.iterdir()))}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(folder / "rank.py"), str(folder), name, "fit"]
    command += [f"--config={ROOT / 'examples' / 'language' / config}.yaml", "--data.train=tokens.bin"]
    command += [f"--trainer.devices={ranks}"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [*command, *SMALL, *CPU, "--trainer.val_check_interval=3", *more]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(ranks)]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    prepare([Path(__file__), *(ROOT / "examples").glob("*.py")], tmp_path / "tokens.bin")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("config", "ranks"), [("ddp", 2), ("local", 2), ("fsdp muon", 4)])
def test_example_learns_and_ranks_end_with_equal_weights(config: str, ranks: int, tokens: Path) -> None:
    name, *muon = config.split()
    more = ["--model.optimizer=muon", "--trainer.gradient_clip_val=null"] if muon else []
    ends = fit(tokens, name, "--trainer.max_steps=30", *more, ranks=ranks)
    for end in ends:
        assert end["bits"] < 8, "an untrained model has 8 bits"
        assert torch.equal(end["weights"], ends[0]["weights"])


@pytest.mark.slow
def test_example_resumes_bit_identically(tokens: Path) -> None:
    """The checkpoint is saved during an epoch of a mixture of text, which is tokenized, and a mapped file."""
    (tokens / "texts").mkdir()
    for each in (ROOT / "examples").glob("*.py"):
        (tokens / "texts" / f"{each.stem}.txt").write_text(each.read_text())
    often = [f"--trainer.callbacks.init_args.{option}" for option in ("every_n_train_steps=3", "save_top_k=-1")]
    options = [*often, '--data.train={"texts": 2, "tokens.bin": 1}', "--data.cache_dir=cache"]
    ends = fit(tokens, "fsdp", *options, ranks=2)
    path = next((tokens / "checkpoints").glob("*step=3*.ckpt"))
    again = fit(tokens, "fsdp", *options, f"--ckpt_path={path}", ranks=2)
    assert all(torch.equal(one["weights"], other["weights"]) for one, other in zip(ends, again, strict=True))
