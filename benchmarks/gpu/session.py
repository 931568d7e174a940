"""All measurements for the first minutes on a GPU, in one command and less than nine minutes.

    make gpu-session PYTHON=python3 OUT=results      # or: python3 -m benchmarks.gpu.session results
    python -m benchmarks.gpu.session /tmp/try --cpu  # on a CPU, with small sizes

It needs torch, a compiler and nvcc, and downloads nothing. Each part is a process with a time limit, and a failed part
does not stop the others. For each claim, it prints held, not held or not run, with the number.

| part | content |
|---|---|
| build | the kernels, for this GPU |
| tests | tests marked `gpu` |
| kernels | selection and compression, and the device's own sum, copy and topk |
| resnet50, gpt | steps on two nodes of one device, without and with an exchange, on an ideal and a slow link |
| sync | steps in which a wait of the host for the device is an error |
| trace | one backward pass of ResNet-50 and one step of the GPT with updates, as lanes over time |

Two parts do not run by default, because they take longer. A part that is stopped reports its finished runs. The next
call continues it, also on another machine: copy runs.jsonl into the folder of the results.

    make gpu-session PYTHON=python3 OUT=results ARGS="--parts build loss --minutes 8"

| part | content |
|---|---|
| loss | losses of eight methods with 20 M parameters and four simulated nodes, three learning rates each |
| loss_124M | the same with 124 M parameters |

There is one GPU, so the other node is a copy of this one (cluster.py), without NCCL and network. The claims are about a
GPU; on a CPU, the verdicts say only that all parts run. Writes session.json and session.md (hardware, date, versions,
commit, command), log.txt and two traces for chrome://tracing or Perfetto.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.loss import CLAIMS as LOSS_CLAIMS

ROOT = Path(__file__).resolve().parents[2]
PARTS_OF = "benchmarks.gpu.parts"
"""The module that runs a part."""
MINUTES = 8.5
LONG = ("loss", "loss_124M")
NOT_RUN = "not run"
RESULT = "RESULT "
"""What a part's line of results begins with; libraries may print after it, when the process ends."""


@dataclass(frozen=True)
class Part:
    """One part.

    Args:
        seconds: time limit.
        claims: claims that it checks, by name.
    """

    seconds: float
    claims: dict[str, str]


_STEP = {
    "lanes": "the sparse exchange in lanes adds at most 10 % to a step",
    "updates": "exchanging updates adds at most 10 % to a step",
    "beside": "lanes are no slower than one stream, with a link that takes half a step",
    "hides": "lanes hide half of that link's time or more",
    "hides_updates": "updates hide four fifths of it or more",
}
PARTS = {
    "build": Part(150, {"compiled": "the kernels compile and load"}),
    "tests": Part(100, {"pass": "the tests marked gpu pass"}),
    "kernels": Part(
        60,
        {
            "select": "selecting 1 % takes at most 3 times reading the tensor",
            "compress": "compressing it takes at most 2.5 times copying it",
            "small": "compressing a shard of a 25 MB bucket on 8 devices takes at most 100 us",
            "topk": "selecting is faster than torch.topk",
        },
    ),
    "resnet50": Part(70, _STEP),
    "gpt": Part(70, _STEP),
    "sync": Part(
        45,
        {
            "sparse": "nothing waits for the device: sparse",
            "sparse_of_8": "nothing waits for the device: sparse, nodes of 8 devices",
            "dense16": "nothing waits for the device: dense16",
            "excluded": "nothing waits for the device: exclude='vectors'",
            "unused": "nothing waits for the device: find_unused_parameters",
            "updates": "nothing waits for the device: updates",
        },
    ),
    "trace": Part(
        75,
        {
            "backward": "while the link carries gradients another lane works, 70 % of the time or more",
            "updates": "while it carries updates another lane works, 70 % of the time or more",
        },
    ),
    "loss": Part(290, {name: f"20M: {claim}" for name, claim in LOSS_CLAIMS.items()}),
    "loss_124M": Part(290, {name: f"124M: {claim}" for name, claim in LOSS_CLAIMS.items()}),
}


@dataclass
class Outcome:
    """The result of a part."""

    seconds: float
    ended: str
    claims: dict[str, tuple[str, str]]
    data: Any = field(default=None, repr=False)


def run(name: str, part: Part, folder: Path, cpu: bool, seconds: float) -> Outcome:
    """Run a part in its own process; end it with its children at the limit."""
    words = [sys.executable, "-m", PARTS_OF, name, str(folder), *(["--cpu"] if cpu else [])]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    begin = time.monotonic()
    process = subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=seconds)
        ended = "whole" if process.returncode == 0 else f"failed with {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        ended = f"stopped after {seconds:.0f} s"
    with (folder / "log.txt").open("a") as log:
        log.write(f"\n===== {name}: {ended}\n{said}")
    taken = time.monotonic() - begin
    lines = said.strip().splitlines() or [""]
    found = [line.removeprefix(RESULT) for line in lines if line.startswith(RESULT)]
    if not found:
        return Outcome(taken, ended, {each: (NOT_RUN, f"{ended}: {lines[-1][:200]}") for each in part.claims})
    result = json.loads(found[-1])
    claims = {each: tuple(result["claims"].get(each, (NOT_RUN, ""))) for each in part.claims}
    return Outcome(taken, ended, claims, result["data"])


def session(folder: Path, names: list[str], cpu: bool, minutes: float, about: dict[str, str]) -> None:
    """Run all parts one after the other, and write each when it ends. Parts that do not fit the time are not run."""
    until = time.monotonic() + 60 * minutes
    outcomes: dict[str, Outcome] = {}
    for name in names:
        part = PARTS[name]
        left = until - time.monotonic()
        if left < 5:
            outcomes[name] = Outcome(0.0, "no time left", dict.fromkeys(part.claims, (NOT_RUN, "no time left")))
        else:
            limit = part.seconds * (3 if cpu else 1)  # other processes may use the CPU, too
            outcomes[name] = run(name, part, folder, cpu, min(limit, left))
        for key, (said, number) in outcomes[name].claims.items():
            print(f"{said:8}  {name:8}  {part.claims[key]}: {number}", flush=True)
        write(folder, outcomes, about)


def write(folder: Path, outcomes: dict[str, Outcome], about: dict[str, str]) -> None:
    """Write session.json and session.md."""
    record = {**about, "parts": {name: asdict(outcome) for name, outcome in outcomes.items()}}
    (folder / "session.json").write_text(json.dumps(record, indent=1) + "\n")
    lines = ["# A session on one device", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += ["| part | claim | verdict | number |", "|---|---|---|---|"]
    for name, outcome in outcomes.items():
        for key, (said, number) in outcome.claims.items():
            lines.append(f"| {name} | {PARTS[name].claims[key]} | {said} | {number.replace('|', '/')} |")
    lines += ["", "| part | seconds | ended |", "|---|---|---|"]
    lines += [f"| {name} | {outcome.seconds:.0f} | {outcome.ended} |" for name, outcome in outcomes.items()]
    (folder / "session.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where results go")
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, with small sizes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[name for name in PARTS if name not in LONG])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts together")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "log.txt").unlink(missing_ok=True)
    from benchmarks.record import surroundings

    session(options.folder, options.parts, options.cpu, options.minutes, surroundings())
    print(f"\nwrote {options.folder / 'session.md'}")


if __name__ == "__main__":
    main()
