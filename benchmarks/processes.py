"""The processes of a measurement: ranks of a launcher or of an emulated cluster, and calls in a new process.

Ranks of an emulated cluster run ``python -m benchmarks.processes`` and read their task from the folder `FOLDER`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.record import Rows
from lightning_sparse.cli.doctor import is_launched, join_ranks, leave_ranks
from lightning_sparse.lab import Cluster, LabConfig, exit_on_signals, unavailable_reason

FOLDER = "BENCHMARK_RANKS"
TensorSpec = Callable[..., Any]
"""Called as ``work(topology, device, gbps, *arguments)`` on each rank; what rank 0 returns can be written as JSON."""


# -- ranks -------------------------------------------------------------------------------------------------------------


def on_clusters(
    work: TensorSpec,
    *arguments: Any,
    clusters: Sequence[str],
    gbps: Sequence[float | None] = (None,),
    storage: tuple[Path, float] | None = None,
    rtt_ms: float = 0.0,
    cpu: bool = True,
) -> Rows | None:
    """Return the rows of `work` for emulated clusters of these sizes and rates, measured one after the other.

    Each row contains its cluster and rate. Under torchrun or srun, return the rows of its ranks, on rank 0 only. A rate
    is None if it is unknown: on a cluster that is not emulated, and over loopback, which replaces links that cannot be
    shaped. `storage` is a folder that emulated nodes see only over the network, and the rate of its link. `rtt_ms` is
    the round-trip time between nodes. Ranks of emulated clusters use GPUs only with ``cpu=False``.
    """
    if is_launched():
        topology, device = join_ranks()
        found = work(topology, device, None, *arguments)
        leave_ranks()
        place: dict[str, Any] = {"cluster": f"{topology.num_nodes}x{topology.num_devices}", "gbps": None}
        return None if topology.rank else [{**place, **row} for row in found]
    reason, rows = unavailable_reason(), Rows()
    if reason is not None and any(gbps):
        print(f"note: cannot limit link rates ({reason}); using loopback", file=sys.stderr)
    for cluster in clusters:
        for rate in gbps:
            known = None if reason else rate
            place = {"cluster": cluster, "gbps": known, **({"rtt_ms": rtt_ms} if rtt_ms and known else {})}
            rows += [{**place, **row} for row in _emulated(work, arguments, cluster, known, storage, rtt_ms, cpu)]
    return rows


def _emulated(
    work: TensorSpec,
    arguments: tuple[Any, ...],
    cluster: str,
    gbps: float | None,
    storage: tuple[Path, float] | None,
    rtt_ms: float,
    cpu: bool,
) -> Rows:
    """Return the result of rank 0 of a cluster; without a rate over loopback."""
    nodes, devices = map(int, cluster.split("x"))
    config = LabConfig(nodes=nodes, devices=devices, gbps=gbps or 1.0, network=gbps is not None, cpu=cpu)
    if gbps is not None:
        config = replace(config, rtt_ms=rtt_ms)
    if storage is not None:
        config = replace(config, storage=storage[0], storage_gbps=storage[1])
    main = sys.modules["__main__"].__spec__
    module = main.name if work.__module__ == "__main__" and main else work.__module__
    with tempfile.TemporaryDirectory() as name, exit_on_signals(), Cluster(config) as lab, _answered(lab, Path(name)):
        Path(name, "work").write_bytes(pickle.dumps((module, work.__name__, gbps, arguments)))
        env = {FOLDER: name, "OMP_NUM_THREADS": "1"}
        ran = lab.run([sys.executable, "-m", "benchmarks.processes"], env=env, output=sys.stderr)
        if ran.exit_code != 0:
            raise SystemExit("the ranks failed; their output is above")
        rows: Rows = json.loads(Path(name, "rows.json").read_text())
    return rows


def main() -> None:
    """Run one rank of an emulated cluster."""
    folder = Path(os.environ[FOLDER])
    module, name, gbps, arguments = pickle.loads((folder / "work").read_bytes())
    torch.set_num_threads(1)
    topology, device = join_ranks()
    rows = getattr(import_module(module), name)(topology, device, gbps, *arguments)
    if topology.rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    leave_ranks()


def set_rate(gbps: float) -> None:
    """Let the lab change the rate of all links; without effect outside a lab. A collective."""
    dist.barrier()
    if FOLDER in os.environ and dist.get_rank() == 0:
        _ask(f"rate {gbps}")
    dist.barrier()


def storage_sent() -> int:
    """Return the bytes that the lab's storage node has sent, counted by the kernel, on rank 0 only."""
    return int(_ask("storage"))


def _ask(question: str) -> str:
    """Return the answer of the process that holds the lab."""
    asked, answer = (Path(os.environ[FOLDER], name) for name in ("asked", "answer"))
    asked.with_suffix(".new").write_text(question)
    asked.with_suffix(".new").rename(asked)
    while not answer.exists():
        time.sleep(0.005)
    said = answer.read_text()
    answer.unlink()
    return said


@contextmanager
def _answered(lab: Cluster, folder: Path) -> Iterator[None]:
    """Answer the requests of rank 0."""
    asked, over = folder / "asked", threading.Event()

    def serve() -> None:
        while not over.wait(0.005):
            if asked.exists():
                what, _, rate = asked.read_text().partition(" ")
                asked.unlink()
                said = ""
                if what == "rate":
                    lab.reshape(float(rate))
                else:
                    said = str(lab.traffic()["storage"].sent)
                (folder / "said").write_text(said)
                (folder / "said").rename(folder / "answer")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def received_bytes() -> int:
    """Return the bytes that this node received on eth0, counted by the kernel; 0 outside a lab."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            return int(line.split(":")[1].split()[0])
    return 0


def slowest(seconds: float | Sequence[float], device: torch.device) -> torch.Tensor:
    """Return the times of the slowest rank. A collective."""
    taken = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken


# -- rows in a process of their own ------------------------------------------------------------------------------------


def alone(what: str, work: Callable[..., Any], *arguments: object) -> Any:
    """Return ``work(*arguments)`` from a new process.

    Raises:
        RuntimeError: if the process ends without a result; the message names `what` and the exit status.
    """
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        future = executor.submit(work, *arguments)
        own = set(multiprocessing.active_children()) - others
        try:
            return future.result()
        except BrokenProcessPool as error:
            executor.shutdown()  # its thread waits for the process, and until then the exit status is not known
            raise RuntimeError(f"the process of {what} {' and '.join(map(_end, own))}") from error


def _end(process: BaseProcess) -> str:
    code = process.exitcode
    if code is None or code >= 0:
        return f"(pid {process.pid}) ended with status {code}. Its output above has the reason."
    end = f"(pid {process.pid}) was ended by {signal.Signals(-code).name}."
    if code == -signal.SIGKILL:
        end += (
            " The kernel kills processes if memory is short (see `dmesg | grep -i kill`). Free memory, or measure less."
        )
    return end


if __name__ == "__main__":
    main()
