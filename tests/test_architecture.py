"""The rules of the architecture. Imports count wherever they stand: also for type checkers, and inside functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_sparse

PACKAGE = "lightning_sparse"
ROOT = Path(__file__).resolve().parents[1]
PARTS = ["topology", "kernels", "exchange", "gradients", "strategy", "data", "pto", "lab"]
# A module imports only from the lines below its own. Parts of one line do not import each other.
LAYERS = [
    {"cli"},
    {"flavours", "lab"},
    {"strategy", "data"},
    {"elastic"},
    {"fsdp"},
    {"updates", "gradients"},
    {"pto", "checkpoint.restore"},
    {"checkpoint.side_files", "checkpoint.folder", "checkpoint.interrupted"},
    {"checkpoint.verdict", "engine"},
    {"checkpoint.state"},
    {"exchange", "optimizers"},
    {"kernels", "topology", "sharding"},
    {"agree", "options", "waits"},
    {"internals", "messages"},
]
WITHOUT_LAYER = {"_autoload", "_version", "checkpoint"}
DATA_LAYERS = [
    {"tokens"},
    {"datamodule"},
    {"session", "windows"},
    {"cache"},
    {"peers", "pipeline", "shards"},
    {"id_files"},
    {"text"},
    {"sources"},
    {"folders", "decode"},
    {"config", "rng", "child"},
]
# Importer -> modules that it never imports, not even indirectly.
TRAINING = (
    "checkpoint", "elastic", "engine", "exchange", "fsdp", "gradients", "kernels", "pto", "sharding", "strategy",
    "updates",
)  # fmt: skip
FORBIDDEN = {
    "data": TRAINING,
    "lab": (*TRAINING, "agree", "data", "internals", "messages", "optimizers", "options", "topology", "waits"),
    "gradients": ("pto",),
    "kernels": ("agree", "internals", "messages", "options", "waits"),
}
LIGHTNING = {"pytorch_lightning", "lightning", "lightning_fabric", "lightning_utilities"}
# grimp knows other packages by their first name alone. Module -> the only files that import it, by their first letters.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "nvidia.dali": ("data/pipeline/dali.py",),
    "torch.nn.parallel": ("gradients/", "strategy/", "pto/"),
    "torch.optim": (
        "checkpoint/", "elastic/", "engine.py", "fsdp.py", "gradients/", "internals.py", "optimizers.py", "pto/",
        "sharding.py", "strategy/", "updates/",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def graph() -> Any:
    """The imports of the package, which a test leaves as they are."""
    grimp = pytest.importorskip("grimp")
    return grimp.build_graph(PACKAGE, include_external_packages=True, cache_dir=None)


def upward_imports(graph: Any, layers: list[set[str]], container: str) -> set[str]:
    """Imports against the order of the layers."""
    found = graph.find_illegal_dependencies_for_layers(layers=layers, containers={container})
    return {f"{dependency.importer} imports {dependency.imported}" for dependency in found}


def imports_in_circles(graph: Any) -> set[tuple[str, str]]:
    """Imports that are part of a circle, also of modules in the same layer."""
    imported = {(upper, lower) for upper in graph.modules for lower in graph.find_modules_directly_imported_by(upper)}
    return {(upper, lower) for upper, lower in imported if graph.chain_exists(importer=lower, imported=upper)}


def children(graph: Any, container: str) -> set[str]:
    return {module.removeprefix(f"{container}.") for module in graph.find_children(container)}


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


def test_imports_go_down(graph: Any) -> None:
    assert children(graph, PACKAGE) == {part.split(".")[0] for layer in LAYERS for part in layer} | WITHOUT_LAYER
    assert upward_imports(graph, LAYERS, PACKAGE) == set()


def test_imports_go_down_in_data(graph: Any) -> None:
    assert children(graph, f"{PACKAGE}.data") == set().union(*DATA_LAYERS)
    assert upward_imports(graph, DATA_LAYERS, f"{PACKAGE}.data") == set()


def test_import_that_goes_up_is_found(graph: Any) -> None:
    graph.add_import(importer=f"{PACKAGE}.engine", imported=f"{PACKAGE}.updates.local")
    found = upward_imports(graph, LAYERS, PACKAGE)
    graph.remove_import(importer=f"{PACKAGE}.engine", imported=f"{PACKAGE}.updates.local")
    assert f"{PACKAGE}.engine imports {PACKAGE}.updates" in found


def test_imports_for_type_checkers_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "circle").mkdir()
    (tmp_path / "circle" / "__init__.py").touch()
    (tmp_path / "circle" / "upper.py").write_text("from circle.lower import f")
    (tmp_path / "circle" / "lower.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from circle.upper import C\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    small = pytest.importorskip("grimp").build_graph("circle", cache_dir=None)
    assert upward_imports(small, [{"upper"}, {"lower"}], "circle") == {"circle.lower imports circle.upper"}
    assert imports_in_circles(small) == {("circle.lower", "circle.upper"), ("circle.upper", "circle.lower")}


@pytest.mark.parametrize("package", [PACKAGE, "benchmarks"])
def test_no_module_imports_itself_through_others(package: str) -> None:
    assert imports_in_circles(pytest.importorskip("grimp").build_graph(package, cache_dir=None)) == set()


@pytest.mark.parametrize(
    ("importer", "imported"),
    [(upper, lower) for upper, lowers in FORBIDDEN.items() for lower in lowers],
)
def test_part_is_usable_without_others(graph: Any, importer: str, imported: str) -> None:
    names = f"{PACKAGE}.{importer}", f"{PACKAGE}.{imported}"
    assert graph.find_shortest_chains(*names, as_packages=True) == set()


def test_only_flavours_import_lightning(graph: Any) -> None:
    importers = {
        module.split(".")[1]
        for name in LIGHTNING & graph.modules
        for module in graph.find_modules_that_directly_import(name)
    }
    assert importers == {"flavours"}


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


@pytest.mark.parametrize("module", ["data.shards", "data.sources.storage_reader", "lab.cluster", "cli"])
def test_child_processes_and_commands_start_without_torch(module: str) -> None:
    code = f"import sys, lightning_sparse.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


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
