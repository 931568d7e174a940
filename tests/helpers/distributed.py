"""Run a function on real Gloo ranks of this machine, and report how it failed if it does.

``run_ranks(fn, nodes=2, devices=2)`` starts one process per rank with the environment that torchrun would set. The
ranks join a default Gloo group over loopback and call the module-level function ``fn``. The results come back in rank
order. All ranks share this machine; the ranks of a "node" differ only in GROUP_RANK, NODE_RANK and LOCAL_RANK.

A distributed test fails in one of three ways, which `RanksFailed` separates:

========  =======================================================  ==========================================
raised    ``fn`` raised                                            the traceback of that rank
killed    a signal ended the process, or it exited with no result  the signal or the exit code
hung      still running at the deadline                            the Python stack of each of its threads
========  =======================================================  ==========================================

If one rank raises or dies, the others usually wait for it in a collective. They get `GRACE_S` seconds to fail by
themselves. Then they are stopped, and count as *stopped*, not as hung, because the first failure is the cause.

Processes fork from a server that has imported torch and Lightning but has run nothing, so four ranks start in a
fraction of a second. ``start_method="spawn"`` starts a fresh interpreter for tests of imports. The rendezvous has no
race: this process holds the TCP store on a port that the kernel chose, and the ranks connect as clients, as
torchrun's workers do.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it unannounced
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

T = TypeVar("T")
RunRanks = Callable[..., list[Any]]  # `KeptRanks.run`, as the fixture `ranks` gives it
# Imports that would take each rank seconds. Both Lightning packages are loaded, so tests of a single package, such as
# tests/test_autoload.py, start their own interpreters.
PRELOAD = [
    "tests.helpers.entry_points_once",  # before Lightning imports the function
    "torch._dynamo",  # imported by DDP's constructor
    "torch._dynamo.backends.debugging",  # imported by the first compilation
    "s3fs",  # if installed, imported by Lightning to save a checkpoint
    "torchmetrics",
    "pytest",
    "lightning_sparse.flavours.pytorch_lightning",
    "lightning_sparse.flavours.lightning",
    "tests.helpers.distributed",
]
GRACE_S = 5.0
STACK_S = 1.0
OUTPUT_TAIL = 4000


class RanksFailed(Exception):
    """At least one rank failed. `raised`, `killed` and `hung` map ranks to descriptions; `stopped` lists ranks."""

    def __init__(
        self, raised: dict[int, str], killed: dict[int, str], hung: dict[int, str], stopped: list[int]
    ) -> None:
        self.raised, self.killed, self.hung, self.stopped = raised, killed, hung, stopped
        parts = [f"rank {rank} raised:\n{text}" for rank, text in raised.items()]
        parts += [f"rank {rank} was killed: {text}" for rank, text in killed.items()]
        parts += [f"rank {rank} hung, its stack:\n{text}" for rank, text in hung.items()]
        if stopped:
            parts.append(f"ranks {stopped} were still running and were stopped after that failure")
        super().__init__("\n".join(parts))


@dataclass
class _Rank:
    """The parent's view of one process."""

    rank: int
    process: BaseProcess
    connection: Connection
    folder: Path
    reply: tuple[str, Any] | None = None  # ("returned", value) or ("raised", traceback)

    @property
    def running(self) -> bool:
        return self.process.exitcode is None

    def give(self, task: tuple[Callable[..., Any], tuple[Any, ...]] | None) -> None:
        """Send a function and its arguments, or None to let the process exit."""
        with suppress(BrokenPipeError):  # it has exited; its exit code says why
            self.connection.send_bytes(pickle.dumps(task))

    def tail(self) -> str:
        text = (self.folder / f"output{self.rank}").read_text(errors="replace")[-OUTPUT_TAIL:]
        return f"\nits output ended:\n{text}" if text.strip() else ""


@dataclass
class _Outcome:
    raised: dict[int, str] = field(default_factory=dict)
    killed: dict[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.raised or self.killed)


def run_ranks(
    fn: Callable[..., T],
    *args: Any,
    nodes: int = 2,
    devices: int = 2,
    timeout: float = 200,
    env: Mapping[str, str | None] | None = None,
    placement: Sequence[Sequence[int]] | None = None,
    init: bool = True,
    start_method: Literal["forkserver", "spawn"] = "forkserver",
    grace_s: float = GRACE_S,
) -> list[T]:
    """Call ``fn(*args)`` in every rank and return the results, by rank.

    Args:
        fn: A module-level function, because it is pickled by name.
        env: Additional environment of all ranks. None removes a variable.
        placement: Global ranks of each node in device order, instead of `nodes` x `devices` contiguous ranks.
        init: Whether to join the default Gloo group before the call. A Trainer joins by itself.
        grace_s: Seconds for the other ranks to end by themselves after one has failed.
    """
    places = _places(nodes, devices, placement)
    with _started(places, env or {}, init, timeout, start_method) as ranks:
        for each in ranks:
            each.give((fn, args))
            each.give(None)
        return _watch(ranks, timeout, _has_left, grace_s)


class KeptRanks:
    """Ranks that stay for the next call, so that a test module starts each cluster once.

    A function that changes defaults of torch, patches modules or reads the environment needs `run_ranks`, because the
    process keeps all state except groups. So does a function that makes a DTensor, because torch keeps its mesh without
    the groups. Ranks of a failed call are stopped.
    """

    def __init__(self) -> None:
        self._clusters: dict[str, tuple[ExitStack, list[_Rank]]] = {}

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        nodes: int = 2,
        devices: int = 2,
        timeout: float = 200,
        placement: Sequence[Sequence[int]] | None = None,
    ) -> list[T]:
        """Call ``fn(*args)`` in every rank, in the default Gloo group, as `run_ranks` does."""
        places = _places(nodes, devices, placement)
        if str(places) not in self._clusters:
            stack = ExitStack()
            ranks = stack.enter_context(_started(places, {}, True, timeout, "forkserver"))
            self._clusters[str(places)] = stack, ranks
        _, ranks = self._clusters[str(places)]
        try:
            for each in ranks:
                each.reply = None
                each.give((fn, args))
            return _watch(ranks, timeout, _has_answered)
        except BaseException:
            self._clusters.pop(str(places))[0].close()
            raise

    def close(self) -> None:
        """Stop all ranks."""
        for stack, _ in self._clusters.values():
            stack.close()
        self._clusters.clear()


def _places(nodes: int, devices: int, placement: Sequence[Sequence[int]] | None) -> list[list[int]]:
    places = [list(node) for node in placement] if placement else _contiguous(nodes, devices)
    world_size = sum(map(len, places))
    if sorted(rank for node in places for rank in node) != list(range(world_size)):
        raise ValueError(f"placement={places} must name each rank from 0 to {world_size - 1} once")
    return places


@contextmanager
def _started(
    places: list[list[int]],
    env: Mapping[str, str | None],
    init: bool,
    timeout: float,
    start_method: Literal["forkserver", "spawn"],
) -> Iterator[list[_Rank]]:
    """Start one process per rank, which waits for functions. Stop the processes at the end."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = _context(start_method)
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for node, members in enumerate(places):
                for device, rank in enumerate(members):
                    settings = {**_torchrun_environment(places, node, device, rank, store.port), **env}
                    here, there = context.Pipe()
                    payload = (settings, dict(os.environ), folder, init, timeout)
                    process = context.Process(target=_rank_main, args=(rank, there, payload), name=f"rank {rank}")
                    process.start()
                    there.close()
                    ranks.append(_Rank(rank, process, here, Path(folder)))
            ranks.sort(key=lambda each: each.rank)
            yield ranks
        finally:
            _stop(ranks)


def _context(start_method: Literal["forkserver", "spawn"]) -> ForkServerContext | SpawnContext:
    if start_method == "spawn":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _contiguous(nodes: int, devices: int) -> list[list[int]]:
    return [list(range(node * devices, (node + 1) * devices)) for node in range(nodes)]


def _torchrun_environment(
    places: list[list[int]], node: int, device: int, rank: int, port: int
) -> dict[str, str | None]:
    world_size, local_size = sum(map(len, places)), len(places[node])
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(device),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(node),
        "NODE_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(places)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_RUN_ID": "run_ranks",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 is a client too: the parent serves the store
        "OMP_NUM_THREADS": "1",
    }


# ---------------------------------------------------------------------------------------------- in the parent


def _watch(ranks: list[_Rank], timeout: float, done: Callable[[_Rank], bool], grace_s: float = GRACE_S) -> list[Any]:
    """Collect replies and exits until all ranks are done. Return their results or raise RanksFailed."""
    deadline = time.monotonic() + timeout
    failed = _Outcome()
    while pending := [each for each in ranks if not done(each)]:
        if time.monotonic() >= deadline:
            hung = {} if failed else {each.rank: _stack(each) for each in pending}
            stopped = [each.rank for each in pending] if failed else []
            raise RanksFailed(failed.raised, failed.killed, hung, stopped)
        waited: list[Any] = [each.connection for each in pending if each.reply is None]
        waited += [each.process.sentinel for each in pending]
        wait(waited, timeout=max(0.0, deadline - time.monotonic()))
        for each in pending:
            before = bool(failed)
            _collect(each, failed)
            if failed and not before:
                deadline = min(deadline, time.monotonic() + grace_s)
    if failed:
        raise RanksFailed(failed.raised, failed.killed, {}, [])
    return [each.reply[1] for each in ranks if each.reply]


def _has_left(each: _Rank) -> bool:
    return each.reply is not None and not each.running


def _has_answered(each: _Rank) -> bool:
    return each.reply is not None


def _collect(each: _Rank, failed: _Outcome) -> None:
    """Read the reply of a rank, then its exit code."""
    running = each.running  # read before the pipe, so that a reply sent just before the exit is not missed
    if each.reply is None and each.connection.poll():
        try:
            each.reply = pickle.loads(each.connection.recv_bytes())
        except (EOFError, ConnectionResetError):  # it has exited; the latter, if it left a task unread
            each.process.join(GRACE_S)
            running = each.running
        if each.reply and each.reply[0] == "raised":
            failed.raised[each.rank] = each.reply[1] + each.tail()
    if running or each.rank in failed.raised or each.rank in failed.killed:
        return
    code = each.process.exitcode or 0
    if code != 0 or each.reply is None:
        what = signal.Signals(-code).name if code < 0 else f"it exited with code {code}"
        when = "" if each.reply is None else " after it had returned"
        failed.killed[each.rank] = what + when + each.tail()
        each.reply = ("killed", None)


def _stack(each: _Rank) -> str:
    """Return the stacks of a rank that does not answer. Its faulthandler writes them to a file on SIGUSR1."""
    path = each.folder / f"stack{each.rank}"
    if each.process.pid is not None and path.exists():
        with suppress(ProcessLookupError):  # it has just exited
            os.kill(each.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_S
        while not path.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)
        returned = "(it has returned a result but does not exit)\n" if each.reply else ""
        return returned + path.read_text(errors="replace") + each.tail()
    return "it never started"


def _stop(ranks: list[_Rank]) -> None:
    for each in ranks:
        if each.running:
            each.process.kill()
    for each in ranks:
        each.process.join()
        each.process.close()
        each.connection.close()


# ---------------------------------------------------------------------------------------------- in a rank


def _rank_main(rank: int, connection: Connection, payload: tuple[Any, ...]) -> None:
    settings, environment, folder, init, timeout = payload
    stack = open(f"{folder}/stack{rank}", "w")  # noqa: SIM115 - open until the process ends
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    gc.freeze()  # otherwise each collection walks and copies the imports of the fork server, 0.25 s
    leave_with_parent()
    output = os.open(f"{folder}/output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()  # the fork server has the environment of the first test
    os.environ.update(environment)
    for key, value in settings.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
    torch.set_num_threads(1)
    try:
        if init:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
            dist.barrier()  # otherwise a rank could exit while the others still connect to it
        while task := pickle.loads(connection.recv_bytes()):
            fn, args = task
            reply = pickle.dumps(("returned", fn(*args)))  # plain pickle: tensors by value, not by shared memory
            _leave_groups()
            connection.send_bytes(reply)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        connection.send_bytes(pickle.dumps(("raised", traceback.format_exc())))
    connection.close()
    sys.stdout.flush()


@contextmanager
def groups_of_its_own() -> Iterator[None]:
    """Destroy the groups that the block creates. A collective.

    Each Gloo group has a thread that polls every 10 ms. Together, the groups of a hundred trainings use more CPU time
    than the next training.
    """
    before = set(dist.distributed_c10d._world.pg_map)
    yield
    if dist.is_initialized():
        dist.barrier()  # otherwise a rank could close a connection while another one still reads from it
        _leave_groups(before)
        # its specs have meshes with these groups, and equal the specs of later meshes
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        _gen_transform_infos.cache_clear()


def _leave_groups(kept: Collection[Any] = ()) -> None:
    """Destroy all groups but the default group and ``kept``. torch would keep their threads and connections."""
    if dist.is_initialized():
        for group in reversed([*dist.distributed_c10d._world.pg_map][1:]):
            if group not in kept:
                dist.destroy_process_group(group)


def leave_with_parent() -> None:
    """Exit with pytest. Otherwise the processes of a killed pytest would wait for each other forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
