"""The rules of the architecture. The layers are a contract of import-linter, in pyproject.toml."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_sparse

PACKAGE = "lightning_sparse"
ROOT = Path(__file__).resolve().parents[1]
PARTS = ["topology", "kernels", "exchange", "gradients", "strategy", "data", "pto", "lab"]
# What import-linter cannot tell apart, because it knows other packages by their first name alone -> the files of the
# package that may import it, by the beginning of their path.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "nvidia.dali": ("data/pipeline/dali.py",),
    "torch.nn.parallel": ("gradients/", "strategy/", "pto/"),
    "torch.optim": (
        "checkpoint/", "elastic/", "engine.py", "fsdp.py", "gradients/", "internals.py", "optimizers.py", "pto/",
        "sharding.py", "strategy/", "updates/",
    ),
}  # fmt: skip


def is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def imports(source: str) -> set[str]:
    """Absolute imports anywhere in a file, also inside functions; `from a import b` is one of `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def misplaced(path: str, source: str) -> list[str]:
    """Imports that no file at `path` in the package may have."""
    return [
        f"{path} imports {name}"
        for name in sorted(imports(source))
        for heavy, places in ONLY_IN.items()
        if is_under(name, heavy) and not path.startswith(places)
    ]


def lint_imports(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command as run; run()"
    command = [sys.executable, "-c", code, "--no-cache", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_imports_of_package_go_down() -> None:
    pytest.importorskip("importlinter")
    done = lint_imports()
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("type_checking", [False, True])
def test_import_that_goes_up_is_found(tmp_path: Path, type_checking: bool) -> None:
    """The contract as it is, over a package with one import too many."""
    pytest.importorskip("importlinter")
    for path in [*(ROOT / PACKAGE).rglob("*.py"), ROOT / "pyproject.toml"]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    upward = "from lightning_sparse.updates import LocalUpdates"
    engine = tmp_path / PACKAGE / "engine.py"
    more = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {upward}\n" if type_checking else f"{upward}\n"
    engine.write_text(engine.read_text() + more)
    done = lint_imports("--contract", "layers", cwd=tmp_path)
    assert done.returncode == 1
    assert "lightning_sparse.engine is not allowed to import lightning_sparse.updates" in done.stdout


def test_heavy_modules_are_imported_only_where_listed() -> None:
    files = {path.relative_to(ROOT / PACKAGE).as_posix(): path for path in (ROOT / PACKAGE).rglob("*.py")}
    assert [line for path, file in files.items() for line in misplaced(path, file.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("exchange/engine.py", "from torch.nn.parallel import DistributedDataParallel"),
        ("exchange/paths.py", "def f():\n    import torch.optim"),
        ("data/datamodule.py", "import nvidia.dali.fn"),
        ("data/datamodule.py", "from nvidia import dali"),
    ],
)
def test_misplaced_import_is_found(path: str, source: str) -> None:
    assert misplaced(path, source)


@pytest.mark.parametrize("flavour", ["pytorch_lightning", "lightning"])
def test_both_flavours_offer_every_public_name(flavour: str) -> None:
    """Defined there, not imported: a class that is pickled for a spawned process is looked up in its own module."""
    tree = ast.parse((ROOT / PACKAGE / "flavours" / f"{flavour}.py").read_text(encoding="utf-8"))
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert classes == set(lightning_sparse.__all__) - {"__version__"}


def test_importing_the_package_is_light() -> None:
    """No torch, no Lightning, no array library, nothing of our own but the two files that make names known."""
    code = f"import sys; before = set(sys.modules); import {PACKAGE}; print(*(set(sys.modules) - before))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    assert {name for name in loaded if is_under(name, PACKAGE)} == {
        PACKAGE,
        f"{PACKAGE}._autoload",
        f"{PACKAGE}._version",
    }
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names == {PACKAGE}


def test_parts_import_no_lightning_and_no_cuda() -> None:
    """One process imports all of them, one after the other, and names the first that brings too much."""
    code = f"""
import sys
from importlib import import_module
import torch
for part in {PARTS}:
    import_module("{PACKAGE}." + part)
    assert not {{"pytorch_lightning", "lightning", "lightning.pytorch", "nvidia.dali"}} & set(sys.modules), part
    assert not torch.cuda.is_initialized(), part
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
