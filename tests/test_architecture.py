"""The rules of the architecture, held by walking the source.

Imports run one way: a folder that starts to import upwards is no longer usable alone, and nobody notices by reading one
file. What this file checks is written as data below; each check is tried on a broken example too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_sparse

PACKAGE = "lightning_sparse"
ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400

# Part of the package -> the parts that it may import, itself aside. A dotted entry is one module of a part.
MAY_IMPORT: dict[str, set[str]] = {
    "_autoload": set(),
    "__init__": {"_autoload", "flavours"},  # flavours: for type checkers, and when a name is used
    "messages": set(),
    "topology": set(),
    "kernels": set(),
    "strategy": {"kernels", "topology", "messages"},
    "pto": {"topology", "messages", "strategy.communicator"},
    "data": {"topology", "messages"},
    "flavours": {"strategy", "data", "pto"},
    "bench": {"strategy", "data", "pto", "kernels", "topology"},
    "lab": set(),
    "cli": {"bench", "data", "lab", "flavours"},
}
# What is heavy or optional -> the files that may import it, by the beginning of their path in the package.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "pytorch_lightning": ("flavours/", "cli/"),
    "lightning": ("flavours/", "cli/"),
    "lightning_fabric": ("flavours/",),
    "lightning_utilities": (),
    "nvidia.dali": ("data/pipeline_dali.py",),
}


def imports(source: str, package: str) -> Iterator[str]:
    """Absolute names of the modules that `source`, a module inside `package`, imports anywhere, also inside functions.

    ``from a import b`` gives ``a.b``: whether b is a module or a name, a rule about a prefix holds for both.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def violations(path: str, source: str) -> list[str]:
    """What is wrong with the file at `path` (relative to the package), one line each."""
    parts = path.removesuffix(".py").split("/")
    package = ".".join([PACKAGE, *parts[:-1]])
    part = parts[0]
    found = []
    if part not in MAY_IMPORT:
        return [f"{path}: {part} has no entry in MAY_IMPORT; say what it may import"]
    for name in sorted(set(imports(source, package))):
        inside = name.removeprefix(PACKAGE + ".")
        if is_under(name, PACKAGE) and inside.split(".")[0] in MAY_IMPORT:
            allowed = {part, *MAY_IMPORT[part]}
            if not any(is_under(inside, prefix) for prefix in allowed):
                found.append(
                    f"{path} imports {name}; {part} may import {', '.join(sorted(MAY_IMPORT[part])) or 'nothing'}"
                )
        for heavy, places in ONLY_IN.items():
            if is_under(name, heavy) and not path.startswith(places):
                found.append(f"{path} imports {name}, which only {', '.join(places) or 'nobody'} may")
    return found + too_long(path, source)


def too_long(path: str, source: str) -> list[str]:
    lines = source.count("\n")
    return [f"{path} has {lines} lines, over {MAX_LINES}: it holds two ideas"] if lines > MAX_LINES else []


def package_files() -> list[str]:
    folder = ROOT / PACKAGE
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))


@pytest.mark.parametrize("path", package_files())
def test_file_keeps_the_rules(path: str) -> None:
    assert violations(path, (ROOT / PACKAGE / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples"])
def test_no_file_beside_the_package_is_too_long(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert [said for path in files for said in too_long(str(path), path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        ("kernels/ops.py", "from lightning_sparse.strategy import HierConfig", "kernels may import nothing"),
        ("kernels/ops.py", "from ..strategy.config import HierConfig", "lightning_sparse.gradients.config"),
        ("kernels/ops.py", "from .. import topology", "lightning_sparse.topology"),
        ("strategy/hook.py", "def f():\n    import lightning_sparse.pto", "lightning_sparse.pto"),
        ("pto.py", "from .strategy.hook import hier_hook", "strategy.communicator"),
        ("data/peers.py", "from ..kernels import mstopk", "data may import messages, topology"),
        ("lab.py", "from .strategy import HierConfig", "lab may import nothing"),
        ("strategy/mstopk_hier.py", "import pytorch_lightning as pl", "which only flavours/"),
        ("strategy/mstopk_hier.py", "from lightning.pytorch import Trainer", "which only flavours/"),
        ("data/datamodule.py", "import nvidia.dali.fn", "which only data/pipeline_dali.py"),
        ("data/datamodule.py", "from nvidia import dali", "which only data/pipeline_dali.py"),
        ("novelty.py", "", "has no entry in MAY_IMPORT"),
        ("lab.py", "\n" * (MAX_LINES + 1), "two ideas"),
    ],
)
def test_a_broken_rule_is_found(path: str, source: str, said: str) -> None:
    assert said in "\n".join(violations(path, source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "strategy/hook.py",
            "from ..kernels import compress\nfrom .communicator import HierCommunicator\nimport torch",
        ),
        ("strategy/__init__.py", "from .hook import hier_hook"),
        ("pto.py", "from .strategy.communicator import HierCommunicator\nfrom . import topology"),
        ("flavours/lightning.py", "from lightning.pytorch import Trainer\nfrom ..strategy import mstopk_hier"),
        ("cli.py", "from lightning_sparse import __version__"),
        ("data/pipeline_dali.py", "from nvidia.dali import fn"),
    ],
)
def test_what_is_allowed_is_not_found(path: str, source: str) -> None:
    assert violations(path, source) == []


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
    assert {name for name in loaded if is_under(name, PACKAGE)} == {PACKAGE, f"{PACKAGE}._autoload"}
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names == {PACKAGE}


@pytest.mark.parametrize("part", ["topology", "kernels", "strategy", "data", "pto", "bench", "lab"])
def test_parts_import_no_lightning_and_no_cuda(part: str) -> None:
    code = f"""
import sys
import {PACKAGE}.{part}
print(*sys.modules)
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    loaded = set(done.stdout.split())
    assert not loaded & {"pytorch_lightning", "lightning", "lightning.pytorch", "nvidia.dali"}
