"""The rules of the architecture, held by walking the source.

Imports run one way: a folder that starts to import upwards is no longer usable alone, and nobody notices by reading one
file. What this file checks is written as data below; each check is tried on a broken example too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lightning_sparse

PACKAGE = "lightning_sparse"
ROOT = Path(__file__).resolve().parents[1]
MAX_LINES_OF_A_FUNCTION = 40
# Functions whose signature and docstring are their length: what users see, and command lines.
LONG_FUNCTIONS = {"data/datamodule.py": {"__init__"}}

# Part of the package -> the parts that it may import, itself aside. A dotted entry is one module of a part.
MAY_IMPORT: dict[str, set[str]] = {
    "_autoload": set(),
    "__init__": {"_autoload", "flavours"},  # flavours: for type checkers, and when a name is used
    "messages": set(),
    "internals": set(),
    "waits": {"internals", "messages"},
    "agree": set(),
    "sharding": set(),
    "topology": {"agree", "internals", "messages", "waits"},
    "kernels": set(),
    "exchange": {"kernels", "agree", "sharding", "topology", "messages", "internals", "waits"},
    "engine": {"exchange", "sharding", "topology", "messages"},
    "gradients": {"engine", "exchange", "kernels", "agree", "sharding", "topology", "messages"},
    "pto": {"exchange", "agree", "sharding", "topology", "messages", "internals"},
    "fsdp": {"engine", "gradients.config", "gradients.optimizers", "exchange", "sharding", "topology", "messages"},
    "updates": {"engine", "pto", "exchange", "kernels", "agree", "sharding", "topology", "messages"},
    "strategy": {
        "engine",
        "gradients",
        "updates",
        "fsdp",
        "exchange",
        "pto",
        "agree",
        "sharding",
        "topology",
        "messages",
        "internals",
    },
    "data": {"topology", "messages"},
    "flavours": {"strategy", "data", "pto"},
    "lab": set(),
    "cli": {"data", "lab", "flavours", "gradients", "updates", "exchange", "kernels", "topology"},
}
PARTS = ["topology", "kernels", "exchange", "gradients", "strategy", "data", "pto", "lab"]
# The same inside data/: the parts of the data half -> the parts of it that they may import.
MAY_IMPORT_IN_DATA: dict[str, set[str]] = {
    "__init__": set(),
    "config": set(),
    "sample": set(),
    "decode": set(),
    "rng": set(),
    "folders": {"config"},
    "sources": {"config", "sample", "decode", "folders"},
    "peers": {"config", "sample"},
    "cache": {"config", "sample", "decode", "rng", "folders", "sources", "peers"},  # reads peers as it reads any tier
    "pipeline": {"config", "sample", "decode", "rng"},  # reads from whatever has `get`; a test's fake store, too
    "encoders": set(),
    "id_files": {"encoders"},
    "text": {"id_files", "sources"},
    "shards": {"config", "encoders", "folders", "id_files", "sources", "text"},
    "shard_workers": {"config", "shards", "sources"},
    "corpus": {"config", "id_files", "shards", "text"},
    "windows": {"corpus", "rng"},
    "tokens": {"config", "corpus", "datamodule", "id_files", "peers", "pipeline", "shard_workers", "shards", "windows"},
    "session": {"config", "sample", "rng", "folders", "sources", "cache", "peers", "pipeline"},
    "datamodule": {"config", "cache", "sources", "pipeline", "session"},
}
RULES = {PACKAGE: MAY_IMPORT, f"{PACKAGE}.data": MAY_IMPORT_IN_DATA}
# What is heavy or optional -> the files that may import it, by the beginning of their path in the package.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "pytorch_lightning": ("flavours/", "cli/"),
    "lightning": ("flavours/", "cli/"),
    "lightning_fabric": ("flavours/",),
    "lightning_utilities": (),
    "torch.nn.parallel": ("gradients/", "strategy/", "pto/"),
    "torch.optim": (
        "internals.py",
        "sharding.py",
        "engine.py",
        "fsdp.py",
        "gradients/",
        "updates/",
        "strategy/",
        "pto/",
    ),
    "nvidia.dali": ("data/pipeline/dali.py",),
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
    module = ".".join([PACKAGE, *path.removesuffix(".py").split("/")])
    names = sorted(set(imports(source, module.rpartition(".")[0])))
    found = []
    for root, rules in RULES.items():
        if is_under(module, root):
            found += wrong_imports(path, names, root, module.removeprefix(f"{root}.").split(".")[0], rules)
    for name in names:
        for heavy, places in ONLY_IN.items():
            if is_under(name, heavy) and not path.startswith(places):
                found.append(f"{path} imports {name}, which only {', '.join(places) or 'nobody'} may")
    return found + long_functions(path, source)


def wrong_imports(path: str, names: list[str], root: str, part: str, rules: dict[str, set[str]]) -> list[str]:
    """What `part` of `root` imports of the other parts against the rules."""
    if part not in rules:
        return [f"{path}: {part} has no entry in the rules of {root}; say what it may import"]
    found = []
    for name in names:
        inside = name.removeprefix(f"{root}.")
        known = is_under(name, root) and inside.split(".")[0] in rules
        if known and not any(is_under(inside, prefix) for prefix in {part, *rules[part]}):
            found.append(f"{path} imports {name}; {part} may import {', '.join(sorted(rules[part])) or 'nothing'}")
    return found


class _WithoutTypeChecking(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" else node


def import_graph(files: dict[str, str], package: str = PACKAGE) -> dict[str, set[str]]:
    """Module -> the modules of `files` (path in the package -> source) that it imports when it runs, also in functions.

    ``from package import name`` is an import of ``package.name`` if that is a module, else of the package.
    """
    modules = {".".join([package, *path.removesuffix(".py").split("/")]): source for path, source in files.items()}
    graph: dict[str, set[str]] = {}
    for module, source in modules.items():
        graph[module] = set()
        running = ast.unparse(_WithoutTypeChecking().visit(ast.parse(source)))
        for name in imports(running, module.rpartition(".")[0]):
            parents = [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)]
            found = (each for parent in parents for each in (parent, f"{parent}.__init__") if each in modules)
            graph[module] |= {next(found, module)} - {module}
    return graph


def import_cycle(files: dict[str, str], package: str = PACKAGE) -> list[str]:
    """The modules of a circle of imports, the first one again at the end; empty if there is none."""
    try:
        TopologicalSorter(import_graph(files, package)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def long_functions(path: str, source: str) -> list[str]:
    """Those of a file in the package, without the exceptions."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name not in LONG_FUNCTIONS.get(path, ()):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > MAX_LINES_OF_A_FUNCTION:
                found.append(f"{path}: {node.name} has {lines} lines, over {MAX_LINES_OF_A_FUNCTION}")
    return found


def package_files() -> list[str]:
    folder = ROOT / PACKAGE
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))


@pytest.mark.parametrize("path", package_files())
def test_file_keeps_the_rules(path: str) -> None:
    assert violations(path, (ROOT / PACKAGE / path).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        ("kernels/ops.py", "from lightning_sparse.strategy import HierConfig", "kernels may import nothing"),
        ("kernels/ops.py", "from ..gradients.config import HierConfig", "lightning_sparse.gradients.config"),
        ("kernels/ops.py", "from .. import topology", "lightning_sparse.topology"),
        ("gradients/hook.py", "def f():\n    import lightning_sparse.pto", "lightning_sparse.pto"),
        ("pto.py", "from .gradients.hook import hier_hook", "pto may import agree"),
        ("exchange/engine.py", "from lightning_sparse.gradients import HierState", "exchange may import agree"),
        ("exchange/engine.py", "from torch.nn.parallel import DistributedDataParallel", "which only"),
        ("exchange/paths.py", "import torch.optim", "which only"),
        ("data/config.py", "from ..kernels import mstopk", "data may import messages, topology"),
        ("data/peers/server.py", "from ..cache.store import SampleStore", "peers may import config, sample"),
        ("data/pipeline/batch.py", "from lightning_sparse.data.cache import store", "pipeline may import config"),
        ("data/sample.py", "from . import config", "sample may import nothing"),
        ("data/novelty.py", "", "no entry in the rules of lightning_sparse.data"),
        ("lab.py", "from .strategy import HierConfig", "lab may import nothing"),
        ("strategy/trainer.py", "import pytorch_lightning as pl", "which only flavours/"),
        ("strategy/trainer.py", "from lightning.pytorch import Trainer", "which only flavours/"),
        ("data/datamodule.py", "import nvidia.dali.fn", "which only data/pipeline/dali.py"),
        ("data/datamodule.py", "from nvidia import dali", "which only data/pipeline/dali.py"),
        ("novelty.py", "", "has no entry in the rules"),
        ("lab.py", "def f():\n" + "    1\n" * (MAX_LINES_OF_A_FUNCTION + 1), "has 42 lines, over 40"),
    ],
)
def test_a_broken_rule_is_found(path: str, source: str, said: str) -> None:
    assert said in "\n".join(violations(path, source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("gradients/hook.py", "from ..exchange import Shard\nfrom .state import HierState\nimport torch"),
        ("gradients/__init__.py", "from .hook import hier_hook"),
        ("pto.py", "from .exchange.communicator import HierCommunicator\nfrom . import topology"),
        ("flavours/lightning.py", "from lightning.pytorch import Trainer\nfrom ..strategy import trainer"),
        ("cli.py", "from lightning_sparse import __version__"),
        ("data/pipeline/dali.py", "from nvidia.dali import fn"),
        ("data/cache/store.py", "from lightning_sparse.data.peers.client import PeerClient"),
    ],
)
def test_what_is_allowed_is_not_found(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_no_module_imports_itself_through_others() -> None:
    files = {path: (ROOT / PACKAGE / path).read_text(encoding="utf-8") for path in package_files()}
    graph = import_graph(files)
    assert f"{PACKAGE}.data.session" in graph[f"{PACKAGE}.data.datamodule"]  # imports are found at all
    assert import_cycle(files) == []


def test_no_benchmark_imports_itself_through_others() -> None:
    folder = ROOT / "benchmarks"
    files = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    graph = import_graph(files, "benchmarks")
    assert "benchmarks.pictures" in graph["benchmarks.exchange.pto"]  # imports are found at all
    assert import_cycle(files, "benchmarks") == []


@pytest.mark.parametrize(
    ("one", "other", "circle"),
    [
        ("from lightning_sparse.data import b", "from lightning_sparse.data.a import f", True),
        ("from . import b", "def f():\n    from .a import g", True),
        ("from . import b", "import lightning_sparse.data.a", True),
        ("from . import b", "if TYPE_CHECKING:\n    from .a import C", False),
        ("from .b import f", "import numpy", False),
    ],
)
def test_a_circle_is_found(one: str, other: str, circle: bool) -> None:
    assert bool(import_cycle({"data/a.py": one, "data/b.py": other})) == circle


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
