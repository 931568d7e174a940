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


MODES = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("compat", "", "strict")]


@pytest.fixture(scope="module", params=MODES)
def editable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An interpreter for which a checkout is installed, and the checkout."""
    folder = tmp_path_factory.mktemp("editable")
    python = environment_without_us(folder / "environment")
    source = copy_of_checkout(folder / "source")
    settings = ["--config-settings", f"editable_mode={request.param}"] if request.param else []
    pip_install(*settings, "--editable", str(source), python=python)
    return python, source


def test_a_moved_checkout_leaves_torch_importable(editable: tuple[Path, Path], tmp_path: Path) -> None:
    python, source = editable
    source.rename(tmp_path / "moved")
    without = run(python, "import torch; print(torch.zeros(1).sum().item())", "-W", "error::UserWarning")
    (tmp_path / "moved").rename(source)
    assert without.returncode == 0, without.stderr
    assert without.stdout.strip() == "0.0"
    assert len(said(without)) == 1
    assert "its package cannot be imported (ModuleNotFoundError: No module named 'lightning_sparse')" in without.stderr

    back = run(python, KNOWN)
    assert back.stdout.strip() == "True"
    assert not said(back)


@pytest.mark.slow
@pytest.mark.parametrize("editable", ["compat"], indirect=True)
def test_a_package_that_raises_leaves_torch_importable(editable: tuple[Path, Path], tmp_path: Path) -> None:
    """A checkout in the middle of an update, say."""
    python, source = editable
    module = source / "lightning_sparse" / "_autoload.py"
    module.rename(tmp_path / "whole")
    module.write_text("<<<<<<< HEAD\n")
    done = run(python, "import torch")
    (tmp_path / "whole").replace(module)
    assert done.returncode == 0, done.stderr
    assert "cannot be imported (SyntaxError: " in done.stderr
