"""All measurements for the first minutes on a GPU, in one command and less than nine minutes.

    make gpu-session PYTHON=python3 OUT=results      # or: python3 -m benchmarks.gpu.session results
    python -m benchmarks.gpu.session /tmp/try --cpu  # on a CPU, with small sizes
    python -m benchmarks.gpu.session results --parts gpt trace

It needs torch, a compiler and nvcc, and downloads nothing. Each part runs in its own process with a time limit. After a
failed part, the session continues. For each claim, it prints held, not held or not run, with the number.

| part | content |
|---|---|
| build | the kernels, for this GPU |
| tests | tests marked `gpu` |
| kernels | selection and compression, compared with sum, copy and topk of torch |
| resnet50, gpt | steps on two nodes of one device, without and with an exchange and a slow link; second passes |
| sync | steps in which a wait of the host for the device is an error |
| trace | steps of ResNet-50 with gradients and of the GPT with updates, as lanes over time |

Other parts run only if you name them. `loss` continues after its last finished run:

    make gpu-session PYTHON=python3 OUT=results ARGS="--parts build parity nccl"
    make gpu-session PYTHON=python3 OUT=results ARGS="--parts build loss"

| part | content |
|---|---|
| parity | losses and final weights of each method on real ranks over NCCL, compared with DDP and the CPU |
| nccl | steps of DDP, its hooks, averaging and this package on real ranks, over links of 10 and 1 Gbit/s |
| loss, loss_124M | losses of eight methods with 20 or 124 M parameters and four simulated nodes |

The parts of the first table simulate the second node as a copy of the first node (cluster.py), without NCCL and
network. The claims are about a GPU. On a CPU, the verdicts only show that all parts run. The session writes
session.json and session.md (hardware, date, versions, commit, command), log.txt, and two traces for chrome://tracing or
Perfetto. It writes each result immediately, so an interrupted session keeps all results.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Timer
from typing import Any

from benchmarks.gpu.claims import NOT_RUN, Part
from benchmarks.gpu.parts import PARTS, RESULT
from benchmarks.record import surroundings

ROOT = Path(__file__).resolve().parents[2]
PARTS_OF = "benchmarks.gpu.parts"
"""The module that runs a part."""
MINUTES = 8.5


@dataclass
class Outcome:
    """The result of a part."""

    seconds: float
    ended: str
    claims: dict[str, tuple[str, str]]
    data: Any = field(default=None, repr=False)


def run(name: str, part: Part, folder: Path, cpu: bool, seconds: float) -> Iterator[Outcome]:
    """Run a part in its own process, and yield the outcome after each of its results and at its end.

    At the time limit, or if the session ends, the process ends with its children.
    """
    words = [sys.executable, "-m", PARTS_OF, name, str(folder), *(["--cpu"] if cpu else [])]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    begin = time.monotonic()
    process = subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    limit = Timer(seconds, _kill, [process])
    limit.start()
    result: dict[str, Any] = {"claims": {}, "data": None}
    last = ""
    with process, (folder / "log.txt").open("a") as log:
        log.write(f"\n===== {name}\n")
        try:
            for line in process.stdout or ():
                if line.startswith(RESULT) and line.endswith("\n"):
                    result = json.loads(line.removeprefix(RESULT))
                    yield _outcome(part, result, time.monotonic() - begin, "running")
                else:
                    last = line.strip() or last
                    log.write(line)
                    log.flush()
            process.wait()
        except BaseException:  # such as Ctrl-C
            _kill(process)
            raise
        finally:
            limit.cancel()
    taken = time.monotonic() - begin
    ended = "whole" if process.returncode == 0 else f"failed with {process.returncode}"
    if process.returncode == -signal.SIGKILL and taken >= seconds:
        ended = f"stopped after {seconds:.0f} s"
    yield _outcome(part, result, taken, ended, last)


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _outcome(part: Part, result: dict[str, Any], seconds: float, ended: str, last: str = "") -> Outcome:
    """Return an outcome. A claim without a result gets the verdict "not run"."""
    why = "" if ended == "whole" else f"{ended}: {last[:200]}"
    claims = {each: tuple(result["claims"].get(each, (NOT_RUN, why))) for each in part.claims}
    return Outcome(seconds, ended, claims, result["data"])


def session(folder: Path, names: Sequence[str], cpu: bool, minutes: float, about: dict[str, str]) -> None:
    """Run the parts one after the other, and write each result immediately. Skip parts once less than 5 s are left."""
    until = time.monotonic() + 60 * minutes
    outcomes: dict[str, Outcome] = {}
    for name in names:
        part = PARTS[name]
        left = until - time.monotonic()
        if left < 5:
            outcomes[name] = Outcome(0.0, "no time left", dict.fromkeys(part.claims, (NOT_RUN, "no time left")))
            write(folder, outcomes, about)
        else:
            limit = part.seconds * (3 if cpu else 1)  # other processes may use the CPU, too
            for outcome in run(name, part, folder, cpu, min(limit, left)):
                outcomes[name] = outcome
                write(folder, outcomes, about)
        for key, (verdict, number) in outcomes[name].claims.items():
            print(f"{verdict:8}  {name:8}  {part.claims[key]}: {number}", flush=True)


def write(folder: Path, outcomes: dict[str, Outcome], about: dict[str, str]) -> None:
    """Write session.json and session.md."""
    record = {**about, "parts": {name: asdict(outcome) for name, outcome in outcomes.items()}}
    _replace(folder / "session.json", json.dumps(record, indent=1) + "\n")
    lines = ["# A session on one device", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += ["| part | claim | verdict | number |", "|---|---|---|---|"]
    for name, outcome in outcomes.items():
        for key, (verdict, number) in outcome.claims.items():
            lines.append(f"| {name} | {PARTS[name].claims[key]} | {verdict} | {number.replace('|', '/')} |")
    lines += ["", "| part | seconds | ended |", "|---|---|---|"]
    lines += [f"| {name} | {outcome.seconds:.0f} | {outcome.ended} |" for name, outcome in outcomes.items()]
    _replace(folder / "session.md", "\n".join(lines) + "\n")


def _replace(file: Path, text: str) -> None:
    """Write a file so that an interruption leaves the old or the new text."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(text)
    new.replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="folder for results")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, with small sizes")
    default = [name for name, part in PARTS.items() if part.by_default]
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=default)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time limit for all parts together")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "log.txt").unlink(missing_ok=True)
    session(options.folder, options.parts, options.cpu, options.minutes, surroundings())
    print(f"\nwrote {options.folder / 'session.md'}")


if __name__ == "__main__":
    main()
