"""Rules for imports, including imports for type checkers and inside functions."""

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
# A module imports only from lower layers. Parts of one layer do not import each other.
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
    {"config", "rng", "child", "split_names"},
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
# grimp knows only the first part of other packages' names. Module -> prefixes of the only files that import it.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "nvidia.dali": ("data/pipeline/dali.py",),
    "torch.nn.parallel": ("gradients/", "strategy/", "pto/"),
    "torch.optim": (
        "checkpoint/", "elastic/", "engine.py", "fsdp.py", "gradients/", "internals.py", "optimizers.py", "pto/",
        "sharding.py", "strategy/", "updates/",
    ),
}  # fmt: skip


def test_wrong_imports_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grimp = pytest.importorskip("grimp")
    (tmp_path / "circle").mkdir()
    (tmp_path / "circle" / "__init__.py").touch()
    (tmp_path / "circle" / "upper.py").write_text("from circle.lower import f")
    lower = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from circle.upper import C\n"
    (tmp_path / "circle" / "lower.py").write_text(lower)
    monkeypatch.syspath_prepend(tmp_path)
    small = grimp.build_graph("circle", cache_dir=None)
    assert upward_imports(small, [{"upper"}, {"lower"}], "circle") == {"circle.lower imports circle.upper"}
    assert imports_in_circles(small) == {("circle.lower", "circle.upper"), ("circle.upper", "circle.lower")}
    assert imports("def f():\n    import torch.optim\nfrom nvidia import dali") == {"torch.optim", "nvidia.dali"}


@pytest.fixture(scope="module")
def graph() -> Any:
    """Return the imports of the package."""
    grimp = pytest.importorskip("grimp")
    return grimp.build_graph(PACKAGE, include_external_packages=True, cache_dir=None)


def upward_imports(graph: Any, layers: list[set[str]], container: str) -> set[str]:
    """Return imports against the order of the layers."""
    found = graph.find_illegal_dependencies_for_layers(layers=layers, containers={container})
    return {f"{dependency.importer} imports {dependency.imported}" for dependency in found}


def imports_in_circles(graph: Any) -> set[tuple[str, str]]:
    """Return imports that are part of a cycle, including cycles within a layer."""
    imported = {(upper, lower) for upper in graph.modules for lower in graph.find_modules_directly_imported_by(upper)}
    return {(upper, lower) for upper, lower in imported if graph.chain_exists(importer=lower, imported=upper)}


def children(graph: Any, container: str) -> set[str]:
    return {module.removeprefix(f"{container}.") for module in graph.find_children(container)}


def is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def imports(source: str) -> set[str]:
    """Return absolute imports anywhere in a file, also inside functions. `from a import b` counts as `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_follow_the_layers(graph: Any) -> None:
    assert children(graph, PACKAGE) == {part.split(".")[0] for layer in LAYERS for part in layer} | WITHOUT_LAYER
    assert upward_imports(graph, LAYERS, PACKAGE) == set()


def test_imports_in_data_follow_the_layers(graph: Any) -> None:
    assert children(graph, f"{PACKAGE}.data") == set().union(*DATA_LAYERS)
    assert upward_imports(graph, DATA_LAYERS, f"{PACKAGE}.data") == set()


@pytest.mark.parametrize("package", [PACKAGE, "benchmarks"])
def test_imports_form_no_cycle(package: str) -> None:
    assert imports_in_circles(pytest.importorskip("grimp").build_graph(package, cache_dir=None)) == set()


@pytest.mark.parametrize("importer", FORBIDDEN)
def test_part_imports_no_forbidden_part(graph: Any, importer: str) -> None:
    chains = [
        graph.find_shortest_chains(f"{PACKAGE}.{importer}", f"{PACKAGE}.{imported}", as_packages=True)
        for imported in FORBIDDEN[importer]
    ]
    assert set().union(*chains) == set()


def test_lightning_is_imported_only_in_flavours(graph: Any) -> None:
    importers = {
        module.split(".")[1]
        for name in LIGHTNING & graph.modules
        for module in graph.find_modules_that_directly_import(name)
    }
    assert importers == {"flavours"}


def test_heavy_modules_are_imported_only_where_listed() -> None:
    files = {path.relative_to(ROOT / PACKAGE).as_posix(): path for path in (ROOT / PACKAGE).rglob("*.py")}
    found = [
        f"{path} imports {name}"
        for path, file in files.items()
        for name in imports(file.read_text(encoding="utf-8"))
        for heavy, places in ONLY_IN.items()
        if is_under(name, heavy) and not path.startswith(places)
    ]
    assert found == []


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning"])
def test_both_lightning_packages_have_all_public_names(package: str) -> None:
    """Pickle looks for a class in its own module, so each Lightning package has its own classes."""
    tree = ast.parse((ROOT / PACKAGE / "flavours" / f"{package}.py").read_text(encoding="utf-8"))
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert classes == set(lightning_sparse.__all__) - {"__version__"}


def test_importing_the_package_is_light() -> None:
    """It loads no other package, and only the files of this package that register names."""
    code = f"import sys; before = set(sys.modules); import {PACKAGE}; print(*(set(sys.modules) - before))"
    loaded = python(code).split()
    ours = {PACKAGE, f"{PACKAGE}._autoload", f"{PACKAGE}._version"}
    assert {name for name in loaded if is_under(name, PACKAGE)} == ours
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names == {PACKAGE}


def test_child_processes_and_commands_start_without_torch() -> None:
    modules = ["data.cache.store", "data.shards", "data.sources.storage_reader", "lab.cluster", "cli"]
    python(f"import sys\n{imports_of(modules)}\nassert 'torch' not in sys.modules")


def test_parts_import_no_lightning_and_no_cuda() -> None:
    heavy = {"pytorch_lightning", "lightning", "lightning.pytorch", "nvidia.dali"}
    python(f"""
import sys
import torch
{imports_of(PARTS)}
assert not {heavy} & set(sys.modules)
assert not torch.cuda.is_initialized()
""")


def imports_of(modules: list[str]) -> str:
    return "\n".join(f"import {PACKAGE}.{module}" for module in modules)


def python(code: str) -> str:
    """Return the output of `code`."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
