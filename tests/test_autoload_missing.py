"""`import torch` succeeds where our metadata is left and the package is gone: torch loads our entry point in it."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.installed import copy_of_checkout, environment_without_us, pip_install

# What it does then, tests/test_autoload.py holds: Lightning takes three times as long to import as torch.
KNOWN = "import sys, torch; print('lightning_sparse._autoload' in sys.modules)"


def run(python: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """In a folder of its own, with nothing of this process's environment that could find the package."""
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environment = {**kept, "PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [str(python), *options, "-c", code], env=environment, cwd="/", capture_output=True, text=True, timeout=120
    )


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "lightning-sparse" in line]


@pytest.mark.parametrize("mode", ["compat", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("", "strict"))])
def test_a_moved_checkout_leaves_torch_importable(mode: str, tmp_path: Path) -> None:
    python = environment_without_us(tmp_path / "environment")
    source = copy_of_checkout(tmp_path / "source")
    settings = ["--config-settings", f"editable_mode={mode}"] if mode else []
    pip_install(*settings, "--editable", str(source), python=python)
    assert run(python, KNOWN).stdout.strip() == "True"

    source.rename(tmp_path / "moved")
    without = run(python, "import torch; print(torch.zeros(1).sum().item())", "-W", "error::UserWarning")
    assert without.returncode == 0, without.stderr
    assert without.stdout.strip() == "0.0"
    assert len(said(without)) == 1
    assert "its package cannot be imported (ModuleNotFoundError: No module named 'lightning_sparse')" in without.stderr

    (tmp_path / "moved").rename(source)
    back = run(python, KNOWN)
    assert back.stdout.strip() == "True"
    assert not said(back)


def test_a_package_that_raises_leaves_torch_importable(tmp_path: Path) -> None:
    """A checkout in the middle of an update, say."""
    python = environment_without_us(tmp_path / "environment")
    source = copy_of_checkout(tmp_path / "source")
    (source / "lightning_sparse" / "_autoload.py").write_text("<<<<<<< HEAD\n")
    pip_install("--config-settings", "editable_mode=compat", "--editable", str(source), python=python)
    done = run(python, "import torch")
    assert done.returncode == 0, done.stderr
    assert "cannot be imported (SyntaxError: " in done.stderr
