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
    """What an installation reads, in the folder `source`.

    Its version is another: setuptools names the module that finds an editable package after it, and the project may be
    installed in this environment already.
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
    """Install from what is here alone. Skips the test where there is no pip.

    Args:
        words: options and what to install.
        python: the interpreter to install for; default: this one.
    """
    if importlib.util.find_spec("pip") is None:
        pytest.skip("needs pip in this environment, to install the project into a folder")
    target = [] if python is None else ["--python", str(python)]
    # what the environment sees of another one stays as it is
    how = ["--quiet", "--ignore-installed", "--no-deps", "--no-compile", "--no-build-isolation", "--no-index", *words]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", *target, "install"]
    environment = {**os.environ, "LIGHTNING_SPARSE_BUILD": "none", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([*pip, *how], env=environment, check=True, timeout=120)


def environment_without_us(folder: Path) -> Path:
    """A virtual environment that sees the packages of this one, but those that are editable; its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    # a folder named in a .pth file is searched for packages, but not for .pth files, such as those of editable installs
    seen = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "packages.pth").write_text("\n".join(seen))
    return folder / "bin" / "python"
