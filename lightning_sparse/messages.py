"""How the package speaks to its user: its logger, and what is said where the flavours of Lightning meet."""

import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from heapq import nsmallest
from typing import Any

import torch.distributed as dist

from lightning_sparse.internals import default_store

log = logging.getLogger("lightning_sparse")
SHOWN = 3  # names in a log line
SLOW_AFTER = timedelta(seconds=10)
"""After so long a rank says what it waits for."""
CONNECT_SECONDS = 5.0
"""Time in which the ranks of a job usually connect."""


def ensure_log_handler() -> None:
    """As Lightning does for its own: notices of one line are seen unless the program has set up logging itself."""
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)


def log_ignored(where: str, names: Collection[str], kind: str) -> None:
    """Log the number and the first names of ignored files, if there are any.

    Args:
        where: the folder of the files.
        kind: kind of the files that are not ignored, such as "images".
    """
    if names:
        more = ", ..." if len(names) > SHOWN else ""
        first = ", ".join(nsmallest(SHOWN, names))
        log.warning("%s: ignored %s file(s) that are not %s: %s%s", where, f"{len(names):,}", kind, first, more)


def human_bytes(number: float) -> str:
    """Format bytes with three digits.

    >>> human_bytes(784.0), human_bytes(154_000), human_bytes(1234.5678e6)
    ('784 B', '154 kB', '1.23 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5 or unit == "GB":
            return f"{number:.3g} {unit}"
        number /= 1000
    raise AssertionError


@contextmanager
def log_if_slow(what: str) -> Iterator[None]:
    """Log the current task if it takes longer than `SLOW_AFTER`. This rank may wait for another rank."""
    seconds = SLOW_AFTER.total_seconds()
    line = "%s has taken %.0f s so far: this rank works on it, or waits for others"
    with _later(seconds, log.warning, line, what, seconds):
        yield


@contextmanager
def log_if_nodes_missing(nodes: int, environment: Any) -> Iterator[None]:
    """Log where this node waits for others, if the ranks of a job do not connect within `CONNECT_SECONDS`.

    Args:
        nodes: number of nodes of the job.
        environment: Lightning's cluster environment, which knows the address of rank 0.
    """
    if nodes == 1 or environment is None or environment.local_rank() != 0:
        yield
        return
    some = "1" if nodes == 2 else f"up to {nodes - 1}"
    where = f"{environment.main_address}:{environment.main_port}"
    with _later(CONNECT_SECONDS, log.info, "waiting for %s of %d nodes at %s", some, nodes, where):
        yield


@contextmanager
def _later(seconds: float, function: Callable[..., None], *args: Any) -> Iterator[None]:
    """Call a function after some seconds, unless the block ends before."""
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_OTHER = {"pytorch_lightning": ("lightning", "lightning.pytorch"), "lightning": ("pytorch_lightning",) * 2}


def class_repr(cls: type, options: Mapping[str, Any]) -> str:
    """Return the text for an object of one of our classes.

    Lightning prints it in its error about an object of the other package. So it names the right class, if the other
    package is imported.
    """
    other, root = _OTHER.get(cls.__module__.rpartition(".")[2], ("", ""))
    way_out = f", not for {other}: there use lightning_sparse.flavours.{other}.{cls.__name__}"
    said = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"<{cls.__module__}.{cls.__name__}({said}){way_out if root in sys.modules else ''}>"


class LogOnce:
    """Logs each line once.

    Args:
        rank: of this process; lines are logged by rank 0, unless they concern one rank alone.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._logged: set[str] = set()

    def __call__(self, line: str, level: int = logging.INFO, *, every_rank: bool = False) -> None:
        """Log it, if this is the first time."""
        if (every_rank or self._rank == 0) and line not in self._logged:
            self._logged.add(line)
            log.log(level, line)


# -- ranks that wait for other ranks -----------------------------------------------------------------------------------
#
# Logs where a rank waits for other ranks, and where those ranks wait.
#
# Ranks that make different numbers of steps wait for each other in different collectives, until the timeout of their
# process group. So each rank that waits for a long time publishes its place in the store of the default group.

MOST_NAMED = 4
"""Ranks that one log line names at most."""


@contextmanager
def waiting(place: str) -> Iterator[None]:
    """Log where this rank and others wait: once the wait has taken `SLOW_AFTER`, and again after changes.

    Args:
        place: where this rank is, such as "in step 7".
    """
    over, published = threading.Event(), threading.Event()
    watch = threading.Thread(target=_watch, args=(over, published, place), name="lightning_sparse", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        if published.is_set():
            watch.join()
            with suppress(RuntimeError):  # the store has gone with its rank
                default_store().set(_key(dist.get_rank()), "")  # reading a deleted key would block


def _watch(over: threading.Event, published: threading.Event, place: str) -> None:
    said, passed = "", 0.0
    while not over.wait(SLOW_AFTER.total_seconds()) and dist.is_initialized():
        passed += SLOW_AFTER.total_seconds()
        published.set()
        others = _others(place)
        if others != said:
            rank = dist.get_rank()
            log.warning("rank %d has waited %.0f s for other ranks, %s. %s", rank, passed, place, others)
        said = others


def _others(place: str) -> str:
    """Publish where this rank waits, and return where other ranks wait."""
    try:
        found = _exchange_places(place)
    except RuntimeError as error:
        return f"The store that says where other ranks wait does not answer: {error}"
    if not found:
        return "No other rank has waited that long: a rank still computes, is stopped, or has left the training"
    named = ", ".join(f"rank {rank} {there}" for rank, there in list(found.items())[:MOST_NAMED])
    more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return (
        f"Also waiting: {named}{more}. If their step differs, a rank has skipped a step that others made: let "
        f"every rank make the same number of steps, even a rank without a gradient"
    )


def _exchange_places(place: str) -> dict[int, str]:
    rank, store = dist.get_rank(), default_store()
    store.set(_key(rank), place)
    others = [other for other in range(dist.get_world_size()) if other != rank and store.check([_key(other)])]
    found = {other: store.get(_key(other)).decode() for other in others}
    return {other: there for other, there in found.items() if there}


def _key(rank: int) -> str:
    return f"lightning_sparse/waits/{rank}"
