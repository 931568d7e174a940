"""Installations of the project: from a copy without kernels, or as metadata that points to this checkout."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def copy_of_checkout(source: Path) -> Path:
    """Copy all files that an installation reads to the folder `source`.

    The copy has another version. setuptools names an editable package's finder module after the version, and this
    environment may already contain an editable installation of the project.
    """
    ignored = shutil.ignore_patterns("csrc", "*.so", "__pycache__")
    shutil.copytree(ROOT / "lightning_sparse", source / "lightning_sparse", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "lightning_sparse_autoload.py", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "README.md").touch()
    package = source / "lightning_sparse" / "_version.py"
    package.write_text(re.sub(r'^__version__ = ".*"$', '__version__ = "0+copy"', package.read_text(), flags=re.M))
    return source


def with_metadata(folder: Path) -> Path:
    """Write the metadata of an installation of this checkout into `folder`, and link the checkout there."""
    for name in ("lightning_sparse", "lightning_sparse_autoload.py"):
        (folder / name).symlink_to(ROOT / name)
    metadata = folder / "lightning_sparse-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-sparse\nVersion: 0\n")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (points,) = re.findall(r"^\[project\.entry-points\.(.*)\]\n(.+)$", text, re.MULTILINE)
    (metadata / "entry_points.txt").write_text("[{}]\n{}\n".format(*(each.replace('"', "") for each in points)))
    return folder


def pip_install(*words: str, python: Path | None = None) -> None:
    """Install offline and without dependencies. Skips the test if pip is missing.

    Args:
        words: Options and requirements.
        python: The interpreter to install for. Default: this interpreter.
    """
    if importlib.util.find_spec("pip") is None:
        pytest.skip("needs pip in this environment, to install the project into a folder")
    target = [] if python is None else ["--python", str(python)]
    # packages of other environments on the path stay installed
    how = ["--quiet", "--ignore-installed", "--no-deps", "--no-compile", "--no-build-isolation", "--no-index", *words]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", *target, "install"]
    environment = {**os.environ, "LIGHTNING_SPARSE_BUILD": "none", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([*pip, *how], env=environment, check=True, timeout=120)


def environment_without_us(folder: Path) -> Path:
    """Create a virtual environment with this environment's non-editable packages. Return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    # folders named in a .pth file are searched for packages, but not for .pth files, such as editable installs
    seen = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "packages.pth").write_text("\n".join(seen))
    return folder / "bin" / "python"
