"""Build the kernels. If the build fails, the installation still succeeds, with plain torch instead.

    with torch, a C++ compiler and nvcc   CPU and CUDA kernels; needs no GPU
    with torch and a C++ compiler         CPU kernels
    otherwise                             none: the operators run in plain torch

pip hides build output, so the result goes to lightning_sparse/kernels/build_report.txt, which
`lightning_sparse.kernels.kernel_report()` shows. LIGHTNING_SPARSE_BUILD=required makes any fallback an error, =cuda
also a build without CUDA; =cpu skips CUDA, =none builds nothing.

The extension uses torch's stable ABI and not Python.h, so one binary works with every Python and every torch since
2.10, with or without CUDA. Hence CppExtension also for the .cu files (CUDAExtension links libtorch_cuda, which a CPU
torch lacks), the static CUDA runtime, and libtorch, which loads libtorch_cuda if present.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
KERNELS = Path("lightning_sparse/kernels")
CSRC = KERNELS / "csrc"
REPORT = KERNELS / "build_report.txt"
MODE = os.environ.get("LIGHTNING_SPARSE_BUILD", "")
MODES = ("", "required", "cuda", "cpu", "none")
if MODE not in MODES:
    raise SystemExit(f"LIGHTNING_SPARSE_BUILD={MODE!r} must be one of {MODES[1:]}, or unset.")
REQUIRED = MODE in ("required", "cuda")
# Machine code for each generation since Turing that the compiler knows (8.0 runs on 8.6 and 8.9, 10.0 on 10.3), and the
# newest as PTX for what comes after it.
ARCHITECTURES = ("7.5", "8.0", "9.0", "10.0", "12.0")

HOW = "To compile them, install torch first, then run pip install --no-build-isolation, now and at each later time."

DEFINES = ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
CXX = [*DEFINES, "-O3", "-std=c++20", "-ffp-contract=off", "-fvisibility=hidden", "-g0"]
NVCC = [*DEFINES, "-O3", "-std=c++20", "--fmad=false", "-Xcompiler", "-fvisibility=hidden", "--threads", "2"]


def find_cuda() -> tuple[Path | None, str]:
    """The CUDA home, or None and the reason."""
    if MODE == "cpu":
        return None, "LIGHTNING_SPARSE_BUILD=cpu"
    nvcc = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME")
    if home and (Path(home) / "bin/nvcc").exists():
        nvcc = str(Path(home) / "bin/nvcc")
    if nvcc is None:
        return None, "no nvcc on PATH and none in CUDA_HOME"
    # nvcc on PATH can be a wrapper script; a dry run prints the real directory.
    dry = subprocess.run([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(.*)$", dry.stderr, re.MULTILINE)
    return (Path(top.group(1)).resolve() if top else Path(nvcc).resolve().parent.parent), ""


def architectures(home: Path) -> str:
    """Those of `ARCHITECTURES` that this nvcc compiles for: 10.0 and 12.0 since CUDA 12.8."""
    known = subprocess.check_output([home / "bin/nvcc", "--list-gpu-arch"], text=True).split()
    return ";".join(each for each in ARCHITECTURES if f"compute_{each.replace('.', '')}" in known) + "+PTX"


CUDA, NO_CUDA = find_cuda()
if CUDA is not None:
    os.environ["CUDA_HOME"] = str(CUDA)  # torch.utils.cpp_extension reads it on import
    # without it, torch raises IndexError if there is no GPU
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", architectures(CUDA))
os.environ.setdefault("MAX_JOBS", "2")

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    torch, cpp_extension, NO_TORCH = None, None, str(error)  # type: ignore[assignment]

if torch is not None and CUDA is not None:
    release = re.search(r"release (\d+)", subprocess.check_output([CUDA / "bin/nvcc", "--version"], text=True))
    if torch.version.cuda is None:
        CUDA, NO_CUDA = None, "torch was built without CUDA"
    elif release is None or release.group(1) != torch.version.cuda.split(".")[0]:
        CUDA, NO_CUDA = None, f"nvcc is from CUDA {release and release.group(1)}, torch from CUDA {torch.version.cuda}"


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
    """Write the report, and warn on stderr of kernels that are missing; pip shows it with -v, or if it fails."""
    print(f"lightning_sparse kernels: {text}")
    if text.startswith("nothing built"):
        print(f"WARNING: lightning_sparse has no compiled kernels, selection is slower: {text}. {HOW}", file=sys.stderr)
    (ROOT / REPORT).write_text(text + "\n")
    if build_lib and (Path(build_lib) / KERNELS).is_dir():
        (Path(build_lib) / REPORT).write_text(text + "\n")


def no_compiler() -> str:
    """Why there is no compiler, which torch's own error does not say; empty if there is one."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    found = shutil.which(compiler) is not None
    return "" if found else f"no C++ compiler: {compiler} is not on PATH (apt-get install g++, or set CXX)"


def remove_stale() -> None:
    for library in (ROOT / KERNELS).glob("_C*.so"):
        library.unlink()


Base: Any = build_ext if cpp_extension is None else cpp_extension.BuildExtension


class Build(Base):  # type: ignore[misc]
    """Build with CUDA, then without, then nothing; write the report."""

    def build_extensions(self) -> None:
        remove_stale()
        try:
            super().build_extensions()
            done = "CPU and CUDA kernels built" if CUDA else f"CPU kernels built; no CUDA kernels: {NO_CUDA}"
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if REQUIRED:
                raise RuntimeError(f"LIGHTNING_SPARSE_BUILD={MODE}, but {no_compiler() or error}") from error
            done = self.build_less(error)
        report(done, None if self.inplace else self.build_lib)

    def build_less(self, error: BaseException) -> str:
        """Fall back to a build without CUDA, or to none."""
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


class CopyAutoload(Command):  # type: ignore[misc]
    """In an editable install, copy the module of the entry point: `import torch` needs it when the checkout is gone."""

    user_options: ClassVar[list[tuple[str, str, str]]] = []
    editable_mode = False

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        if self.editable_mode:
            self.copy_file("lightning_sparse_autoload.py", self.get_finalized_command("install").install_lib)


def main() -> None:
    build.sub_commands.append(("copy_autoload", None))
    commands: dict[str, type[Command]] = {"copy_autoload": CopyAutoload}
    if cpp_extension is None or MODE == "none":
        reason = (
            "LIGHTNING_SPARSE_BUILD=none" if MODE == "none" else f"torch was not importable while building ({NO_TORCH})"
        )
        if REQUIRED:
            raise RuntimeError(f"LIGHTNING_SPARSE_BUILD={MODE}, but {reason}: install with --no-build-isolation")
        remove_stale()
        report(f"nothing built: {reason}")
        setup(cmdclass=commands)
        return
    if MODE == "cuda" and CUDA is None:
        raise RuntimeError(f"LIGHTNING_SPARSE_BUILD=cuda, but CUDA is unavailable: {NO_CUDA}")
    setup(
        ext_modules=[extension(with_cuda=CUDA is not None)],
        cmdclass={**commands, "build_ext": Build.with_options(use_ninja=True)},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )


main()
