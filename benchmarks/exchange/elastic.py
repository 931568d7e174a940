"""Costs of elastic nodes, in loss and in seconds.

    sudo python -m benchmarks.exchange.elastic OUT [--gbps 0.1] [--seeds 0] [--devices 2]

With two devices, each node shards the model with FSDP2. Three nodes, which are namespaces on one machine, train the
task of convergence/text.py, with the batches, learning rates and steps of its rows. The same rows run on fixed nodes,
too. torchft's lighthouse is a fourth host. Nodes are killed by SIGKILL; a node that leaves sends its pending updates
first. After each step, nodes print the name and the digest of their global weights, and weights with equal names must
have equal digests.

The seconds lost to an event are the excess of a continuing node's steps over its usual steps, until the next event.
Steps of fixed and of elastic nodes are timed interleaved, with a pause of ``--timed-pause`` seconds. Writes
OUT/elastic.json, .md and .svg.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.convergence import text, time_to_loss
from benchmarks.exchange.elastic_node import KEPT_EVERY, NODES, Node, learner_of, set_rate, whole_state
from benchmarks.plots import GRAY, color, figure
from benchmarks.processes import on_clusters, slowest
from benchmarks.record import Rows, parser_of, surroundings, write
from lightning_sparse.cli import format_table
from lightning_sparse.fsdp import mesh_of
from lightning_sparse.lab import exit_on_signals
from lightning_sparse.lab.network import INTERFACE, Network, node_address
from lightning_sparse.lab.processes import RUN_VARIABLE, RunName, kill_processes, pdeathsig_prefix
from lightning_sparse.topology import Topology
from lightning_sparse.updates import LocalUpdates, UpdatesConfig

FIXED = ("dense", "updates 1%", time_to_loss.ALONE)
PORT = 29510
EVERY_SECONDS = 30.0
WARM = 50  # steps that are not timed


# -- nodes that join and leave -----------------------------------------------------------------------------------------


class World:
    """Three nodes and a lighthouse in namespaces.

    Attributes:
        events: events of nodes: time, event, node.
    """

    def __init__(self, network: Network, folder: Path, seed: int, steps: int, pause: float, devices: int = 1) -> None:
        self._network, self.folder, self.steps, self._devices = network, folder, steps, devices
        self._work: dict[str, Any] = {"seed": seed, "steps": steps, "pause": pause}
        self.events: list[tuple[float, str, int]] = []
        self._nodes: dict[int, list[subprocess.Popen[bytes]]] = {}
        self._ports = itertools.count(29400)
        host = network.addresses["lighthouse"]
        self._lighthouse = f"http://{host}:{PORT}"
        light = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--min_replicas", "1"]
        light += ["--join_timeout_ms", "10000", "--bind", f"{host}:{PORT}"]
        self._spawn("lighthouse", light, folder / "lighthouse.txt")

    def start(self, place: int) -> None:
        """Start or restart a node."""
        self.events.append((time.time(), "start", place))
        self._nodes[place] = []
        port = next(self._ports)
        for device in range(self._devices):
            where: dict[str, Any] = {"place": place, "device": device, "devices": self._devices, "port": port}
            work = Node(lighthouse=self._lighthouse, folder=str(self.folder), **where, **self._work)
            command = [sys.executable, "-m", "benchmarks.exchange.elastic_node", work.to_json()]
            self._nodes[place].append(self._spawn(f"node{place}", command, self.folder / f"{place}.txt"))

    def kill(self, place: int, by: signal.Signals = signal.SIGKILL) -> None:
        """Kill a node, or let it leave by SIGTERM."""
        self.events.append((time.time(), "kill", place))
        node = self._nodes.pop(place)
        for device in node:
            device.send_signal(by)
        for device in node:
            device.wait()

    def wait(self, *, step: float = math.inf, seconds: float = math.inf) -> bool:
        """Wait until a node has made a number of steps, or for some seconds. Return False once all nodes have ended.

        Raises:
            RuntimeError: if a node has failed.
        """
        until = time.monotonic() + seconds
        while any(self._runs(place) for place in self._nodes):
            if self.step() >= step or time.monotonic() > until:
                return True
            time.sleep(0.2)
        return False

    def _runs(self, place: int) -> bool:
        codes = [device.poll() for device in self._nodes[place]]
        if any(code not in (None, 0) for code in codes):
            said = (self.folder / f"{place}.txt").read_text()[-3000:]
            raise RuntimeError(f"node {place} ended with {codes}:\n{said}")
        return None in codes

    def lines(self, place: int) -> Rows:
        """Return all lines that a node has printed, over all its starts."""
        said = (self.folder / f"{place}.txt").read_text().splitlines()
        return [json.loads(line) for line in said if line.startswith("{") and line.endswith("}")]

    @property
    def training(self) -> list[int]:
        """Return the training nodes, by their last lines."""
        return [place for place in self._nodes if any(line.get("nodes", 0) > 1 for line in self.lines(place)[-1:])]

    def step(self) -> int:
        """Return the current step of the nodes."""
        return max((line.get("step", 0) for place in self._nodes for line in self.lines(place)[-1:]), default=0)

    def _spawn(self, host: str, command: list[str], output: Path) -> subprocess.Popen[bytes]:
        env = {**os.environ, RUN_VARIABLE: str(self._network.run), "GLOO_SOCKET_IFNAME": INTERFACE}
        env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [*pdeathsig_prefix(), *self._network.enter_node(host), *command]
        with output.open("ab") as file:
            return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


@contextmanager
def world(gbps: float, seed: int, steps: int, pause: float, devices: int = 1) -> Iterator[World]:
    """Yield a world, and remove it at the end."""
    hosts = [f"node{place}" for place in range(NODES)] + ["lighthouse"]
    network = Network(RunName.new(), [(host, node_address(place), gbps) for place, host in enumerate(hosts)])
    with tempfile.TemporaryDirectory() as folder:
        text.save_corpus(text.read_library(), Path(folder))
        try:
            yield World(network, Path(folder), seed, steps, pause, devices)
        finally:
            kill_processes(str(network.run))
            network.close()


# -- events ------------------------------------------------------------------------------------------------------------


def no_fault(nodes: World) -> None:
    """Do nothing."""


def one_is_away(nodes: World, by: signal.Signals) -> None:
    """Kill a node after a third of the steps, and restart it later."""
    nodes.wait(step=nodes.steps / 3)
    nodes.kill(NODES - 1, by)
    nodes.wait(step=nodes.steps * 7 / 12)
    nodes.start(NODES - 1)


def killed_at_random(nodes: World) -> None:
    """Kill and restart a node every 30 s, up to the last tenth of the steps.

    Later, it could rejoin after the others have ended, and train alone.
    """
    generator = random.Random(0)
    nodes.wait(step=1)
    while nodes.wait(seconds=EVERY_SECONDS) and nodes.step() < 0.9 * nodes.steps:
        for place in generator.sample(nodes.training, k=min(1, len(nodes.training))):
            nodes.kill(place)
            nodes.start(place)


SCENARIOS: dict[str, Callable[[World], None]] = {
    "elastic": no_fault,
    "elastic, one node killed at 200, back at 350": partial(one_is_away, by=signal.SIGKILL),
    "elastic, one node leaves at 200, back at 350": partial(one_is_away, by=signal.SIGTERM),
    "elastic, a node killed every 30 s": killed_at_random,
}


def measure(name: str, gbps: float, seed: int, steps: int, pause: float, devices: int) -> dict[str, Any]:
    """Run elastic nodes once."""
    with world(gbps, seed, steps, pause, devices) as nodes:
        for place in range(NODES):
            nodes.start(place)
        SCENARIOS[name](nodes)
        nodes.wait()
        said = {place: nodes.lines(place) for place in range(NODES)}
        history = validated(nodes.folder, seed, steps)
    return {
        "way": name,
        "gbps": gbps,
        "seed": seed,
        "pause": pause,
        "devices": devices,
        "history": history,
        "events": [{"time": at, "what": what, "node": place} for at, what, place in nodes.events[NODES:]],
        **compared(said),
        **lost(said, nodes.events[NODES:]),
    }


def validated(folder: Path, seed: int, steps: int) -> Rows:
    """Return the validation losses of the saved weights."""
    learner, history = learner_of(torch.load(folder / "corpus.pt", weights_only=False), seed, steps), Rows()
    for step in [*range(KEPT_EVERY, steps, KEPT_EVERY), steps]:
        learner.model.load_state_dict(torch.load(folder / f"{step}.pt"))
        history.append({"step": step, text.BITS.key: bits(learner)})
    return history


def compared(said: dict[int, Rows]) -> dict[str, Any]:
    """Return the rounds that several nodes report, the rounds in which their weights differ, and the lost rounds."""
    digests: dict[str, dict[int, str]] = {}
    for place, lines in said.items():
        for line in lines:
            if "token" in line:
                digests.setdefault(line["token"], {})[place] = line["digest"]
    several = [set(each.values()) for each in digests.values() if len(each) > 1]
    return {
        "rounds": len(digests),
        "compared": len(several),
        "different": sum(len(each) > 1 for each in several),
        "rounds_lost": {place: lines[-1]["rounds_lost"] for place, lines in said.items()},
    }


def lost(said: dict[int, Rows], events: list[tuple[float, str, int]]) -> dict[str, Any]:
    """Return the usual seconds per step, and the seconds lost to each event by the continuing node that lost most."""
    times = {place: [line["time"] for line in lines if "step" in line] for place, lines in said.items()}
    usual = median(after - before for each in times.values() for before, after in itertools.pairwise(each))
    at_once = {after[0] for before, after in itertools.pairwise(events) if after[0] - before[0] < 1}
    events = [each for each in events if each[0] not in at_once]  # a restart right after an exit is one event with it
    over = min((line["time"] for lines in said.values() for line in lines if "ends" in line), default=math.inf)
    losses = []
    for (begin, what, place), (end, _, _) in itertools.pairwise([*events, (over, "", -1)]):
        went_on = [times[each] for each in times if each != place]
        excess = [
            sum(max(0.0, b - a - usual) for a, b in itertools.pairwise(each) if begin <= b < end and b - a > 2 * usual)
            for each in went_on
        ]
        losses.append({"what": what, "node": place, "seconds": max(excess)})
    return {"step s": usual, "lost": losses}


# -- fixed and elastic nodes -------------------------------------------------------------------------------------------


def fixed_learner(topology: Topology, steps: int) -> text.TextLearner:
    mesh = mesh_of(topology) if topology.num_devices > 1 else None
    corpus = text.corpus_of(text.read_library())
    return learner_of(corpus, 0, steps, topology.rank, topology.num_devices, mesh)


def fixed_losses(topology: Topology, device: torch.device, _: float | None, steps: int, alone: bool) -> Rows:
    """Return the validation loss of fixed nodes that shard the model, or of one node alone. A collective."""
    learner = fixed_learner(topology, steps)
    updates = None if alone else LocalUpdates(learner.model, learner.optimizer, UpdatesConfig(density=0.01), topology)
    for step in range(steps):
        set_rate(learner, step, steps)
        learner.optimizer.zero_grad()
        learner.loss(learner.model, step).backward()  # type: ignore[no-untyped-call]
        learner.optimizer.step()
        if updates is not None:
            updates.step()
    if updates is not None:
        updates.finish()
        updates.close()
    state = whole_state(learner.model)
    whole = learner_of(learner.corpus, 0, steps)
    whole.model.load_state_dict(state)
    return [{"history": [{"step": steps, text.BITS.key: bits(whole)}]}]


def bits(learner: text.TextLearner) -> float:
    """Return the validation loss of a whole model, in bits per character."""
    x_NL, y_NL = learner.corpus.val_windows(text.CONTEXT)
    with torch.no_grad():
        return F.cross_entropy(learner.model(x_NL).flatten(0, 1), y_NL.flatten()).item() / math.log(2)


def fixed_steps(topology: Topology, device: torch.device, _: float | None, steps: int, pause: float) -> Rows:
    """Return the median seconds of a step of the slowest fixed node. A collective."""
    learner = fixed_learner(topology, steps)
    updates = LocalUpdates(learner.model, learner.optimizer, UpdatesConfig(density=0.01), topology)
    seconds = []
    for step in range(steps):
        time.sleep(pause)
        begin = time.perf_counter()
        learner.optimizer.zero_grad()
        learner.loss(learner.model, step).backward()  # type: ignore[no-untyped-call]
        learner.optimizer.step()
        updates.step()
        seconds.append(time.perf_counter() - begin)
    updates.finish()
    updates.close()
    return [{"step s": slowest(median(seconds[WARM:]), device).item()}]


def elastic_steps(gbps: float, steps: int, pause: float, devices: int) -> float:
    """Return the median seconds of a step of elastic nodes."""
    with world(gbps, 0, steps, pause, devices) as nodes:
        for place in range(NODES):
            nodes.start(place)
        nodes.wait()
        lines = [[line for line in nodes.lines(place) if line.get("nodes") == NODES] for place in range(NODES)]
    return max(median([float(line["seconds"]) for line in each[WARM:] if "seconds" in line]) for each in lines)


def step_times(gbps: float, steps: int, repeats: int, pause: float, devices: int) -> Rows:
    """Return step times of fixed and elastic nodes, interleaved, with the pause."""
    rows = Rows()
    ways = ("mstopk_local", "mstopk_elastic") if devices == 1 else ("mstopk_fsdp", "mstopk_elastic_fsdp")
    for repeat in range(repeats):
        fixed = on_clusters(fixed_steps, steps, pause, clusters=[f"{NODES}x{devices}"], gbps=[gbps])
        assert fixed is not None
        found = zip(ways, (fixed[0]["step s"], elastic_steps(gbps, steps, pause, devices)), strict=True)
        place = {"gbps": gbps, "repeat": repeat, "pause": pause}
        rows += [{"way": way, **place, "step s": pause + each} for way, each in found]
    return rows


# -- the report --------------------------------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> str:
    """Return the tables of losses and step times."""
    lines = []
    for row in record["rows"]:
        kills = [each["seconds"] for each in row.get("lost", ()) if each["what"] == "kill"]
        backs = [each["seconds"] for each in row.get("lost", ()) if each["what"] == "start"]
        lines.append(
            (
                row["way"],
                row["seed"],
                f"{row['history'][-1][text.BITS.key]:.3f}",
                len(kills),
                shown(kills),
                shown(backs),
                max(row.get("rounds_lost", {0: "-"}).values()),
                f"{row['different']} of {row['compared']}" if "compared" in row else "-",
            )
        )
    head = ("method", "seed", text.BITS.label, "kills", "s lost per kill", "s lost per return")
    losses = format_table((*head, "rounds lost", "differing rounds"), lines)
    several: dict[tuple[str, float], list[float]] = {}
    for row in record["times"]:
        several.setdefault((row["way"], row["gbps"]), []).append(1e3 * row["step s"])
    times = [(*of, shown(each)) for of, each in several.items()]
    return f"{losses}\n\n{format_table(('method', 'Gbit/s', 'ms per step'), times)}"


def shown(seconds: list[float]) -> str:
    """Format median and range."""
    if not seconds:
        return "-"
    return f"{median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})" if seconds[1:] else f"{seconds[0]:.1f}"


def plot(record: dict[str, Any], file: Path) -> None:
    """Draw the loss over steps, for the first seed."""
    with figure(file) as (axes,):
        for index, row in enumerate(each for each in record["rows"] if each["seed"] == record["rows"][0]["seed"]):
            alone = row["way"] == time_to_loss.ALONE
            style = {"color": GRAY, "linestyle": "--"} if alone else {"color": color(index)}
            line = [(each["step"], each[text.BITS.key]) for each in row["history"]]
            axes.plot(*zip(*line, strict=True), marker=".", label=row["way"], **style)
        axes.set(xlabel="steps", ylabel=text.BITS.label)
        axes.set_ylim(top=4)
        axes.grid(visible=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--gbps", type=float, nargs="+", default=[0.1, 1.0], metavar="R", help="link rates; losses use the first"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pause", type=float, default=0.25, help="seconds between two steps of elastic nodes")
    parser.add_argument("--repeats", type=int, default=3, help="number of step-time measurements")
    parser.add_argument("--timed-pause", type=float, default=0.0, help="seconds between two timed steps")
    parser.add_argument("--timed-steps", type=int, default=300)
    parser.add_argument("--devices", type=int, default=1, help="devices per node, which shard the model")
    parser.add_argument("--ways", nargs="+", default=list(SCENARIOS), help="events of the elastic nodes")
    options = parser.parse_args()
    record: dict[str, Any] = {**surroundings("torchft"), "rows": [], "times": []}
    gbps, epochs = options.gbps[0], options.steps // text.TextSettings.steps_per_epoch
    if options.devices == 1:
        fixed = on_clusters(time_to_loss.measure, None, FIXED, epochs, (), clusters=[f"{NODES}x1"], gbps=[gbps])
        record["rows"] += [{**row, "seed": 0} for row in fixed or ()]
    for way, alone in {"mstopk_fsdp": False, time_to_loss.ALONE: True}.items() if options.devices > 1 else ():
        clusters = [f"{NODES}x{options.devices}"]
        found = on_clusters(fixed_losses, options.steps, alone, clusters=clusters, gbps=[gbps])
        record["rows"] += [{"way": way, **row, "seed": 0} for row in found or ()]
        write(options.out / "elastic.json", record, table(record))
    with exit_on_signals():
        for seed, way in itertools.product(options.seeds, options.ways):
            record["rows"].append(measure(way, gbps, seed, options.steps, options.pause, options.devices))
            write(options.out / "elastic.json", record, table(record), plot)
        for rate in options.gbps:
            timed = (options.timed_steps, options.repeats, options.timed_pause, options.devices)
            record["times"] += step_times(rate, *timed)
            write(options.out / "elastic.json", record, table(record), plot)


if __name__ == "__main__":
    main()
