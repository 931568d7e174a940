"""Builds the kernels, and never lets their failure fail an install.

    with torch, a C++ compiler and nvcc   CPU and CUDA kernels, whether or not a GPU is present
    with torch and a C++ compiler         CPU kernels
    otherwise                             none: the operators run in plain torch

What was built, and why not more, goes into lightning_sparse/kernels/build_report.txt, because pip hides the output of
builds; `lightning_sparse.kernels.kernel_report()` repeats it. LIGHTNING_SPARSE_BUILD=required turns a fallback into an
error and =cuda one without CUDA, too; =cpu leaves CUDA out, =none builds nothing.

The extension is on torch's stable ABI and has no Python.h: one binary serves every torch from 2.10 on and every Python,
with or without CUDA. Hence CppExtension also for the .cu files (CUDAExtension would link libtorch_cuda, which a CPU
torch lacks), the static CUDA runtime, and torch's libtorch, which pulls in libtorch_cuda where there is one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
KERNELS = Path("lightning_sparse/kernels")
CSRC = KERNELS / "csrc"
REPORT = KERNELS / "build_report.txt"
MODE = os.environ.get("LIGHTNING_SPARSE_BUILD", "")
MODES = ("", "required", "cuda", "cpu", "none")
if MODE not in MODES:
    raise SystemExit(f"LIGHTNING_SPARSE_BUILD={MODE!r} is not known: leave it out, or give one of {MODES[1:]}.")
REQUIRED = MODE in ("required", "cuda")
ARCHITECTURES = "8.0;9.0+PTX"

DEFINES = ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
CXX = [*DEFINES, "-O3", "-std=c++20", "-ffp-contract=off", "-fvisibility=hidden", "-g0"]
NVCC = [*DEFINES, "-O3", "-std=c++20", "--fmad=false", "-Xcompiler", "-fvisibility=hidden", "--threads", "2"]


def find_cuda() -> tuple[Path | None, str]:
    """Where CUDA lies, or why it is not used."""
    if MODE == "cpu":
        return None, "LIGHTNING_SPARSE_BUILD=cpu"
    nvcc = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin/nvcc").exists():
        nvcc = str(Path(home) / "bin/nvcc")
    if nvcc is None:
        return None, "no nvcc on PATH and none in CUDA_HOME"
    # nvcc on PATH may be a wrapper script; a dry run prints the directory of the real one.
    dry = subprocess.run([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(.*)$", dry.stderr, re.MULTILINE)
    return (Path(top.group(1)).resolve() if top else Path(nvcc).resolve().parent.parent), ""


CUDA, NO_CUDA = find_cuda()
if CUDA is not None:
    os.environ["CUDA_HOME"] = str(CUDA)  # read by torch.utils.cpp_extension when it is imported
os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ARCHITECTURES)  # without it, and without a GPU, torch raises IndexError
os.environ.setdefault("MAX_JOBS", "2")

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    torch, cpp_extension, NO_TORCH = None, None, str(error)  # type: ignore[assignment]

if torch is not None and CUDA is not None:
    release = re.search(r"release (\d+)", subprocess.check_output([CUDA / "bin/nvcc", "--version"], text=True))
    if torch.version.cuda is None:
        CUDA, NO_CUDA = None, "this torch has no CUDA"
    elif release is None or release.group(1) != torch.version.cuda.split(".")[0]:
        CUDA, NO_CUDA = None, f"nvcc is of CUDA {release and release.group(1)}, torch of {torch.version.cuda}"


def extension(with_cuda: bool) -> Extension:
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / CSRC).glob("*.cpp"))
    headers = sorted(str(path.relative_to(ROOT)) for path in (ROOT / CSRC).glob("*.*h"))
    flags: dict[str, list[str]] = {"cxx": list(CXX), "nvcc": list(NVCC)}
    link = ["-Wl,--no-as-needed", "-ltorch"]
    if with_cuda:
        sources += sorted(str(path.relative_to(ROOT)) for path in (ROOT / CSRC).glob("*.cu"))
        flags["cxx"].append("-DLS_WITH_CUDA")
        link += [f"-L{CUDA}/lib64", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    return cpp_extension.CppExtension(  # type: ignore[no-untyped-call]
        "lightning_sparse.kernels._C",
        sources,
        depends=headers,
        extra_compile_args=flags,
        extra_link_args=link,
        py_limited_api=True,
    )


def report(text: str, build_lib: str | None = None) -> None:
    print(f"lightning_sparse kernels: {text}")
    targets = [ROOT / REPORT]
    if build_lib and (Path(build_lib) / KERNELS).is_dir():
        targets.append(Path(build_lib) / REPORT)
    for target in targets:
        target.write_text(text + "\n")


def no_compiler() -> str:
    """What is missing, of which torch says only that something could not be compiled; empty when it is there."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    found = shutil.which(compiler) is not None
    return "" if found else f"no C++ compiler: {compiler} is not on PATH (apt-get install g++, or set CXX)"


def remove_stale(folder: Path) -> None:
    for library in folder.glob("_C*.so"):
        library.unlink()


Base: Any = build_ext if cpp_extension is None else cpp_extension.BuildExtension


class Build(Base):  # type: ignore[misc]  # known when it is run
    """Tries with CUDA, then without, then gives up; says so in the report."""

    def build_extensions(self) -> None:
        remove_stale(ROOT / KERNELS)
        try:
            super().build_extensions()
            done = "CPU and CUDA kernels built" if CUDA else f"CPU kernels built; no CUDA kernels: {NO_CUDA}"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            if REQUIRED:
                raise RuntimeError(f"LIGHTNING_SPARSE_BUILD={MODE}, but {no_compiler() or error}") from error
            done = self.build_less(error)
        report(done, None if self.inplace else self.build_lib)

    def build_less(self, error: BaseException) -> str:
        """The CUDA build, or the only build, failed: again without the .cu, or not at all."""
        reason = f"{type(error).__name__}: {error}".strip()
        if missing := no_compiler():
            return self.build_nothing(missing)
        if CUDA is not None:
            self.extensions[:] = [self.without_cuda(self.extensions[0])]
            try:
                super().build_extensions()
            except BaseException as again:
                reason = f"{type(again).__name__}: {again}".strip()
            else:
                return f"CPU kernels built; no CUDA kernels: the CUDA build failed ({reason})"
        return self.build_nothing(reason)

    def build_nothing(self, reason: str) -> str:
        self.extensions[0].optional = True
        self.extensions[0]._needs_stub = False
        return f"nothing built: {reason}"

    @staticmethod
    def without_cuda(built: Extension) -> Extension:
        plain = extension(with_cuda=False)
        plain._full_name = getattr(built, "_full_name", built.name)
        plain._file_name = getattr(built, "_file_name", None)
        plain._links_to_dynamic = False
        plain._needs_stub = False
        return plain


def main() -> None:
    if cpp_extension is None or MODE == "none":
        reason = (
            "LIGHTNING_SPARSE_BUILD=none" if MODE == "none" else f"torch was not importable while building ({NO_TORCH})"
        )
        if REQUIRED:
            raise RuntimeError(f"LIGHTNING_SPARSE_BUILD={MODE}, but {reason}: install with --no-build-isolation")
        remove_stale(ROOT / KERNELS)
        report(f"nothing built: {reason}")
        setup()
        return
    if MODE == "cuda" and CUDA is None:
        raise RuntimeError(f"LIGHTNING_SPARSE_BUILD=cuda, but there are no CUDA kernels: {NO_CUDA}")
    setup(
        ext_modules=[extension(with_cuda=CUDA is not None)],
        cmdclass={"build_ext": Build.with_options(use_ninja=True)},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )


main()
