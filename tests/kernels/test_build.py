"""The native code compiles, and builds report missing compilers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "lightning_sparse/kernels/csrc"
KERNEL_FILES = sorted([*CSRC.glob("*.cu"), *CSRC.glob("*_cpu.cpp"), *CSRC.glob("*.*h")])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("source", sorted(CSRC.glob("*.cu")), ids=lambda path: path.name)
def test_cuda_compiles_without_spills(source: Path, architecture: str, tmp_path: Path) -> None:
    flags = ["-O3", "-std=c++20", "--fmad=false", "-Xptxas", "-v", "-Werror", "all-warnings"]
    command = ["nvcc", "-cubin", f"-arch={architecture}", *flags, "-o", str(tmp_path / "out"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert spills, "ptxas printed nothing about spills"
    assert set(spills) == {("0", "0")}, done.stderr


def test_kernels_include_no_torch_header() -> None:
    for path in KERNEL_FILES:
        assert not re.search(r"#include\s*[<\"](torch|ATen|c10)/", path.read_text()), path


def test_binding_defines_no_schema() -> None:
    text = (CSRC / "binding.cpp").read_text()
    assert ".def(" not in text
    assert "STABLE_TORCH_LIBRARY(" not in text


def test_build_flags_are_portable_and_keep_rounding() -> None:
    text = (ROOT / "setup.py").read_text()
    assert "march=native" not in text
    assert "-ffp-contract=off" in text
    assert "--fmad=false" in text


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the files that a build reads."""
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "README.md").touch()
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "build_report.txt")
    shutil.copytree(ROOT / "lightning_sparse", tmp_path / "lightning_sparse", ignore=ignore)
    return tmp_path


def build(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    return subprocess.run(
        command, cwd=checkout, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def report_of(checkout: Path) -> str:
    return (checkout / "lightning_sparse/kernels/build_report.txt").read_text()


@pytest.mark.slow
def test_cuda_build_without_cuda_is_an_error(checkout: Path) -> None:
    done = build(checkout, LIGHTNING_SPARSE_BUILD="cuda", PATH="/usr/sbin", CUDA_HOME="")
    assert done.returncode != 0
    assert "LIGHTNING_SPARSE_BUILD=cuda, but CUDA is unavailable: no nvcc on PATH" in done.stderr


def test_unknown_kind_of_build_is_refused(checkout: Path) -> None:
    done = build(checkout, LIGHTNING_SPARSE_BUILD="cud")
    assert done.returncode != 0
    assert "LIGHTNING_SPARSE_BUILD='cud' must be one of ('required'" in done.stderr


def test_build_of_nothing_removes_an_old_library_and_warns(checkout: Path) -> None:
    stale = checkout / "lightning_sparse/kernels/_C.abi3.so"
    stale.touch()
    done = build(checkout, LIGHTNING_SPARSE_BUILD="none")
    assert done.returncode == 0, done.stderr
    assert "WARNING: lightning_sparse has no compiled kernels" in done.stderr
    assert "--no-build-isolation" in done.stderr
    assert "LIGHTNING_SPARSE_BUILD=none" in report_of(checkout)
    assert not stale.exists(), "the library of an older build"


def test_missing_compiler_falls_back_to_torch_with_the_reason(checkout: Path) -> None:
    broken = {"CXX": "/nonexistent/c++", "CC": "/nonexistent/cc", "LIGHTNING_SPARSE_BUILD": ""}
    done = build(checkout, **broken)
    assert done.returncode == 0, done.stderr
    assert report_of(checkout).startswith("nothing built: no C++ compiler: /nonexistent/c++ is not on PATH")
    program = "from lightning_sparse.kernels import kernel_report as r; assert r().cpu == 'plain torch'; print(r())"
    told = subprocess.run([sys.executable, "-c", program], cwd=checkout, capture_output=True, text=True, check=False)
    assert "nothing built" in told.stdout, told.stderr


@pytest.mark.slow
def test_required_build_without_compiler_is_an_error(checkout: Path) -> None:
    done = build(checkout, CXX="/nonexistent/c++", CC="/nonexistent/cc", LIGHTNING_SPARSE_BUILD="required")
    assert done.returncode != 0
    assert "LIGHTNING_SPARSE_BUILD=required, but no C++ compiler: /nonexistent/c++ is not on PATH" in done.stderr


def without_library(folder: Path, build_report: str) -> str:
    """Return the report of kernels in a copy of the package that has no compiled library."""
    shutil.copytree(ROOT / "lightning_sparse", folder / "lightning_sparse", ignore=shutil.ignore_patterns("*.so"))
    (folder / "lightning_sparse/kernels/build_report.txt").write_text(build_report)
    program = (
        "from lightning_sparse.kernels import kernel_report; r = kernel_report(); print(*r.reasons, r.fix, sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    ("build_report", "said"),
    [
        (
            "nothing built: torch was not importable while building",
            "nothing was compiled: nothing built: torch was not",
        ),
        ("CPU and CUDA kernels built", "Python imports this source folder, not the installed package"),
    ],
)
def test_missing_library_is_reported_with_cause_and_fix(tmp_path: Path, build_report: str, said: str) -> None:
    reason, fix = without_library(tmp_path, build_report).split("|")
    assert said in reason
    assert "pip install --no-build-isolation" in fix
