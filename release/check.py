"""Install each file of a release into an environment of its own and use it there: `python release/check.py dist`.

Nothing of this checkout is on the path: the commands run in an empty folder, and the tests are copied. Unless
``--fresh`` is given, dependencies are those of the running interpreter (torch alone is gigabytes).

============================  =====================================================
`lightning-sparse doctor`     the package, its entry points and kernels are found
tests/kernels                 what is compiled equals the plain torch reference
release/fit.py on two ranks   the strategy is known by name, and trains
============================  =====================================================
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from tests.helpers.installed import environment_without_us  # noqa: E402

LOOKS_AT_SOURCES = ("CSRC", "tests.kernels.emulation")
OF_THE_CHECKOUT = tuple(
    path.name
    for path in (ROOT / "tests" / "kernels").glob("test_*.py")
    if any(word in path.read_text() for word in LOOKS_AT_SOURCES)
)
KERNELS = "from lightning_sparse import __file__, kernels; print(__file__); print(kernels.kernel_report().cpu)"
COMPILED, PLAIN = "compiled", "plain torch"


def make_environment(folder: Path, fresh: bool) -> Path:
    """Its interpreter."""
    if not fresh:
        return environment_without_us(folder)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def install(python: Path, fresh: bool, torch: str, *words: object) -> None:
    """As a user does; without ``--fresh`` no dependencies, beside whatever the environment sees of this one."""
    pip = [python, "-m", "pip"] if fresh else [sys.executable, "-m", "pip", "--python", python]
    tools = [torch, "pytest", "pytest-timeout", "hypothesis", "pytorch-lightning"]
    more = tools if fresh else ["--no-deps", "--ignore-installed"]
    subprocess.run([str(word) for word in (*pip, "install", "--quiet", *words, *more)], check=True)


def check(python: Path, folder: Path, kernels: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"

    def run(*command: object) -> str:
        words = [str(word) for word in command]
        print("+", *words, flush=True)
        done = subprocess.run(
            words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=900, check=False
        )
        print("\n".join(done.stdout.splitlines()[-20:]), flush=True)
        if done.returncode:
            sys.exit(f"{words[0]} ended with exit code {done.returncode}")
        return done.stdout

    told = run(python, "-c", KERNELS).splitlines()
    if str(ROOT) in told[0] or told[1] != kernels:
        sys.exit(f"expected {kernels} kernels outside of {ROOT}, found {told}")
    run("lightning-sparse", "doctor")
    for name in ("kernels", "helpers"):
        shutil.copytree(ROOT / "tests" / name, folder / "tests" / name, ignore=lambda *_: OF_THE_CHECKOUT)
    for name in ("tests/__init__.py", "tests/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    run(python, "-m", "pytest", "-q", "-m", "not slow", "tests/kernels")
    run("lightning-sparse", "lab", "--no-net", "--nodes", 2, "--devices", 1, "--", HERE / "fit.py")


def main() -> None:
    parser = argparse.ArgumentParser(description="Install and test the files of a release.")
    parser.add_argument("dist", type=Path, nargs="?", default=Path("dist"))
    parser.add_argument("--fresh", action="store_true", help="download all dependencies, 6 GB per file")
    parser.add_argument(
        "--torch", default="torch", help="with --fresh: the torch to install, for example torch==2.11.0"
    )
    words = parser.parse_args()
    dist, fresh = words.dist.resolve(), words.fresh
    (pure,) = dist.glob("*-none-any.whl")
    (sdist,) = dist.glob("*.tar.gz")
    version = pure.name.split("-")[1]
    # pip chooses the wheel with kernels; from the sdist it builds in isolation, where no torch is, so nothing compiles
    links = ("--find-links", dist, *(() if fresh else ("--no-index",)))
    ways: dict[str, tuple[tuple[object, ...], str]] = {
        "by name": ((*links, f"lightning-sparse=={version}"), COMPILED),
        "the pure wheel": ((pure,), PLAIN),
        "the sdist": ((sdist,), PLAIN),
    }
    for name, (what, kernels) in ways.items():
        print(f"\n=== {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            python = make_environment(Path(folder) / "environment", fresh)
            install(python, fresh, words.torch, *what)
            (Path(folder) / "work").mkdir()
            check(python, Path(folder) / "work", kernels)


if __name__ == "__main__":
    main()
