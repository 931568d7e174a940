"""Lightning knows the strategy names without an import of this package.

The first tests use the finder with a stand-in for Lightning. The others use real installations with an entry point.
Each test needs its own interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import lightning_sparse
from lightning_sparse._autoload import CLASSES
from tests.helpers.installed import copy_of_checkout, environment_without_us, pip_install, with_metadata

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pytorch_lightning", "lightning.pytorch")
STRATEGIES = [f"{name}{suffix}" for name, (*_, suffixes) in CLASSES.items() for suffix in suffixes]

REGISTRY = """
class Registry(dict):
    def register(self, name, strategy, description="", **init_params):
        if name in self:
            raise ValueError(f"{name} is already present")
        self[name] = {"strategy": strategy, "description": description, "init_params": init_params}

    def get(self, name):
        return self[name]["strategy"](**self[name]["init_params"])

StrategyRegistry = Registry()
"""

OURS = '{name for name in sys.modules if name.partition(".")[0] == "lightning_sparse"}'

STUB_PACKAGE = """
import sys, types
stub = types.ModuleType("lightning_sparse.flavours.pytorch_lightning")
stub.MSTopKHierStrategy = lambda **arguments: arguments
sys.modules["lightning_sparse.flavours"] = types.ModuleType("lightning_sparse.flavours")
sys.modules[stub.__name__] = stub
"""


def run_python(code: str, *path: Path, cwd: Path, timeout: float = 120, **environment: str) -> str:
    """Return the output of `code`, which runs with `path` first on sys.path."""
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environment = {**kept, "PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONSAFEPATH": "1", **environment}
    script = cwd / "script.py"
    script.write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=cwd, env=environment, timeout=timeout, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- the finder, with a stand-in for Lightning


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """Return a folder with importable packages that have the names of the two Lightning packages."""
    for package in PACKAGES:
        folder = tmp_path / "stand_in" / package.replace(".", "/")
        (folder / "strategies").mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / "__init__.py").touch()
        (folder / "strategies" / "__init__.py").write_text(REGISTRY)
    return tmp_path / "stand_in"


def test_names_are_registered_before_and_after_lightning_and_on_a_reload(stand_in: Path, tmp_path: Path) -> None:
    code = f"""
        import importlib, sys
        import pytorch_lightning.strategies as strategies
        from lightning_sparse._autoload import autoload
        autoload(); autoload()
        assert len([f for f in sys.meta_path if type(f).__module__ == "lightning_sparse._autoload"]) == 1
        first = strategies.StrategyRegistry
        importlib.reload(strategies)
        from lightning.pytorch.strategies import StrategyRegistry
        assert list(StrategyRegistry) == {STRATEGIES}
        assert strategies.StrategyRegistry is not first
        assert list(strategies.StrategyRegistry) == {STRATEGIES}
    """
    run_python(code, stand_in, ROOT, cwd=tmp_path)


def test_strategy_is_imported_only_when_used(stand_in: Path, tmp_path: Path) -> None:
    code = f"""
        import lightning_sparse, sys
        from pytorch_lightning.strategies import StrategyRegistry
        assert {OURS} == {{"lightning_sparse", "lightning_sparse._autoload", "lightning_sparse._version"}}
        {textwrap.indent(STUB_PACKAGE, " " * 8).strip()}
        assert StrategyRegistry.get("mstopk_hier") == dict(start_method="popen")
        assert StrategyRegistry.get("mstopk_hier_spawn") == dict(start_method="spawn")
        assert StrategyRegistry.get("mstopk_hier_notebook") == dict(start_method="fork")
        unused = StrategyRegistry.get("mstopk_hier_find_unused_parameters_true")
        assert unused == dict(start_method="popen", find_unused_parameters=True)
    """
    run_python(code, stand_in, ROOT, cwd=tmp_path)


def test_existing_names_stay_and_errors_of_lightning_reach_the_user(stand_in: Path, tmp_path: Path) -> None:
    strategies = stand_in / "pytorch_lightning/strategies/__init__.py"
    strategies.write_text(REGISTRY + "\nStrategyRegistry.register('mstopk_hier', 'theirs')")
    (stand_in / "lightning/pytorch/strategies/__init__.py").write_text("raise RuntimeError('theirs')")
    code = """
        import lightning_sparse
        from pytorch_lightning.strategies import StrategyRegistry
        assert StrategyRegistry["mstopk_hier"]["strategy"] == "theirs"
        assert "mstopk_hier_spawn" in StrategyRegistry
        try:
            import lightning.pytorch.strategies
        except RuntimeError as error:
            assert str(error) == "theirs"
        else:
            raise SystemExit("no error")
    """
    run_python(code, stand_in, ROOT, cwd=tmp_path)


# --- the lazy public names


def test_public_names_come_from_the_installed_lightning_package(stand_in: Path, tmp_path: Path) -> None:
    code = """
        import importlib.util, sys, lightning_sparse
        assert lightning_sparse._module_of("x") == "lightning_sparse.flavours.pytorch_lightning"
        find, absent = importlib.util.find_spec, {"pytorch_lightning"}
        importlib.util.find_spec = lambda name: None if name in absent else find(name)
        assert lightning_sparse._module_of("x") == "lightning_sparse.flavours.lightning"
        assert not {"lightning", "pytorch_lightning"} & set(sys.modules)
        absent.add("lightning")
        try:
            lightning_sparse.MSTopKHierStrategy
        except ImportError as error:
            assert "pip install pytorch-lightning" in str(error)
        else:
            raise SystemExit("no error")
        importlib.util.find_spec = find
        import pytorch_lightning, lightning.pytorch
        try:
            lightning_sparse.MSTopKHierStrategy
        except ImportError as error:
            for package in ("pytorch_lightning", "lightning"):
                assert f"lightning_sparse.flavours.{package} import MSTopKHierStrategy" in str(error)
        else:
            raise SystemExit("no error")
    """
    run_python(code, stand_in, ROOT, cwd=tmp_path)


def test_module_lists_its_public_names() -> None:
    assert set(lightning_sparse.__all__) <= set(dir(lightning_sparse))
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = lightning_sparse.nonsense


# --- an installed distribution, with torch and Lightning


@pytest.fixture(scope="module")
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for PYTHONPATH in which the project is installed."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "metadata":
        return with_metadata(folder)
    source, target = copy_of_checkout(folder / "source"), folder / "target"
    how = ["--editable"] if request.param == "editable" else []
    pip_install("--target", str(target), *how, str(source))
    # An editable install is a .pth file, which Python reads only in site directories. Make `target` a site directory,
    # also for child processes, and put it first in the path in case the project is already installed.
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(
        f"import site, sys\nlists = [(found, [*found]) for found in (sys.path, sys.meta_path)]\n"
        f"site.addsitedir({str(target)!r})\n"
        "for found, before in lists:\n    found[:] = [item for item in found if item not in before] + before\n"
    )
    return folder / "site"


@pytest.mark.slow
@pytest.mark.parametrize("installed", ["wheel", "editable"], indirect=True)
def test_names_are_registered_for_both_lightning_packages_in_a_spawned_child(installed: Path, tmp_path: Path) -> None:
    code = f"""
        import multiprocessing
        import sys

        def check():
            import lightning.pytorch, pytorch_lightning
            for package in (pytorch_lightning, lightning.pytorch):
                assert set({STRATEGIES}) <= set(package.strategies.StrategyRegistry), package
            assert {OURS} == {{"lightning_sparse", "lightning_sparse._autoload", "lightning_sparse._version"}}

        if __name__ == "__main__":
            import torch
            import lightning_sparse, pathlib
            assert {str(installed.parent)!r} in lightning_sparse.__file__, lightning_sparse.__file__
            child = multiprocessing.get_context("spawn").Process(target=check)
            child.start()
            child.join()
            sys.exit(child.exitcode)
    """
    run_python(code, installed, cwd=tmp_path, timeout=280)


@pytest.mark.parametrize(
    ("installed", "package"),
    [
        ("metadata", PACKAGES[0]),
        pytest.param("wheel", PACKAGES[1], marks=pytest.mark.slow),
        pytest.param("editable", PACKAGES[1], marks=pytest.mark.slow),
    ],
    indirect=["installed"],
)
def test_trainer_accepts_the_strategy_name(installed: Path, tmp_path: Path, package: str) -> None:
    """If both Lightning packages are imported, the public names are ambiguous."""
    fabric = {"pytorch_lightning": "lightning_fabric", "lightning.pytorch": "lightning.fabric"}[package]
    code = f"""
        import sys
        from {package} import Trainer, strategies
        assert {OURS} == {{"lightning_sparse", "lightning_sparse._autoload", "lightning_sparse._version"}}
        trainer = Trainer(strategy="mstopk_hier_find_unused_parameters_true", accelerator="cpu", logger=False)
        from lightning_sparse import CommStatsCallback, MSTopKHierStrategy
        assert type(trainer.strategy) is MSTopKHierStrategy, trainer.strategy
        assert isinstance(trainer.strategy, strategies.DDPStrategy)
        assert trainer.strategy._ddp_kwargs["find_unused_parameters"] is True
        assert Trainer(strategy="MSTopK_hier_spawn", accelerator="cpu", logger=False).strategy._start_method == "spawn"
        assert MSTopKHierStrategy.__module__ == CommStatsCallback.__module__
        assert MSTopKHierStrategy.__module__ == "lightning_sparse.flavours.{package.partition(".")[0]}"
        from {fabric} import Fabric
        own = type(Fabric(strategy="mstopk_hier", accelerator="cpu").strategy)
        assert own.__module__ == "lightning_sparse.flavours.{fabric.rpartition(".")[2]}", own
    """
    run_python(code, installed, cwd=tmp_path, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("installed", ["metadata"], indirect=True)
def test_import_registers_names_without_the_entry_point(installed: Path, tmp_path: Path) -> None:
    code = """
        import pytorch_lightning
        registry = pytorch_lightning.strategies.StrategyRegistry
        assert "mstopk_hier" not in registry
        import lightning_sparse
        assert "mstopk_hier" in registry
    """
    run_python(code, installed, cwd=tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.mark.slow
@pytest.mark.parametrize("installed", ["metadata"], indirect=True)
def test_failing_autoload_leaves_torch_importable(installed: Path, tmp_path: Path) -> None:
    code = """
        import sys, types
        sys.meta_path = tuple(sys.meta_path)
        fake = types.ModuleType("pytorch_lightning.strategies")
        fake.StrategyRegistry = object()
        sys.modules[fake.__name__] = fake
        import torch
        assert "lightning_sparse" in sys.modules
        torch.zeros(1)
    """
    run_python(code, installed, cwd=tmp_path)


# -- metadata without its package --------------------------------------------------------------------------------------


def run_installed(python: Path, code: str, *options: str) -> tuple[str, list[str]]:
    """Return the output and our log lines of `code`, which finds the package only as an installation."""
    kept = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    environment = {**kept, "PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [str(python), *options, "-c", code], env=environment, cwd="/", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), [line for line in done.stderr.splitlines() if "lightning-sparse" in line]


MODES = [pytest.param(mode, marks=pytest.mark.slow) for mode in ("compat", "", "strict")]


@pytest.fixture(scope="module", params=MODES)
def editable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return an interpreter with an editable install, and its checkout."""
    folder = tmp_path_factory.mktemp("editable")
    python = environment_without_us(folder / "environment")
    source = copy_of_checkout(folder / "source")
    settings = ["--config-settings", f"editable_mode={request.param}"] if request.param else []
    pip_install(*settings, "--editable", str(source), python=python)
    return python, source


def test_moved_checkout_leaves_torch_importable(editable: tuple[Path, Path], tmp_path: Path) -> None:
    python, source = editable
    source.rename(tmp_path / "moved")
    code = "import torch; print(torch.zeros(1).sum().item())"
    output, logged = run_installed(python, code, "-W", "error::UserWarning")
    (tmp_path / "moved").rename(source)
    assert output == "0.0"
    (line,) = logged
    assert "(ModuleNotFoundError: No module named 'lightning_sparse')" in line
    again = run_installed(python, "import sys, torch; print('lightning_sparse._autoload' in sys.modules)")
    assert again == ("True", [])


@pytest.mark.slow
@pytest.mark.parametrize("editable", ["compat"], indirect=True)
def test_package_with_a_syntax_error_leaves_torch_importable(editable: tuple[Path, Path], tmp_path: Path) -> None:
    python, source = editable
    module = source / "lightning_sparse" / "_autoload.py"
    module.rename(tmp_path / "whole")
    module.write_text("<<<<<<< HEAD\n")
    _, (line,) = run_installed(python, "import torch")
    (tmp_path / "whole").replace(module)
    assert "cannot be imported (SyntaxError: " in line
