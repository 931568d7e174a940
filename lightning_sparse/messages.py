"""The logger of the package, and formats of log lines."""

import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from heapq import nsmallest
from typing import Any

log = logging.getLogger("lightning_sparse")
SHOWN = 3  # number of names in a log line
SLOW_AFTER = timedelta(seconds=10)
"""Time after which a rank logs what it is waiting for."""
CONNECT_SECONDS = 5.0
"""Time in which the ranks of a job usually connect."""


def ensure_log_handler() -> None:
    """Show log lines unless the program has set up logging itself, as Lightning does."""
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)


def log_ignored(where: str, names: Collection[str], kind: str) -> None:
    """Log the number and the first names of ignored files in the folder `where`, if there are any.

    Args:
        kind: kind of the files that are used, such as "images".
    """
    if names:
        ellipsis = ", ..." if len(names) > SHOWN else ""
        first = ", ".join(nsmallest(SHOWN, names))
        log.warning("%s: ignored %s file(s) that are not %s: %s%s", where, f"{len(names):,}", kind, first, ellipsis)


def human_bytes(number: float) -> str:
    """Format bytes with three digits.

    >>> human_bytes(784.0), human_bytes(154_000), human_bytes(1234.5678e6), human_bytes(1.2e12)
    ('784 B', '154 kB', '1.23 GB', '1.2 TB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} PB"


def listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


@contextmanager
def log_if_slow(what: str) -> Iterator[None]:
    """Log the current task if it takes longer than `SLOW_AFTER`."""
    seconds = SLOW_AFTER.total_seconds()
    line = "%s has taken %.0f s so far: this rank works on it, or waits for others"
    with log_later(seconds, log.warning, line, what, seconds):
        yield


@contextmanager
def log_if_nodes_missing(nodes: int, environment: Any) -> Iterator[None]:
    """Log that this node waits for others, if the ranks do not connect within `CONNECT_SECONDS`."""
    if nodes == 1 or environment is None or environment.local_rank() != 0:
        yield
        return
    some = "1" if nodes == 2 else f"up to {nodes - 1}"
    where = f"{environment.main_address}:{environment.main_port}"
    with log_later(CONNECT_SECONDS, log.info, "waiting for %s of %d nodes at %s", some, nodes, where):
        yield


@contextmanager
def log_later(seconds: float, function: Callable[..., None], *args: Any) -> Iterator[None]:
    """Call ``function(*args)`` after so many seconds, unless the context ends before."""
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_OTHER = {"pytorch_lightning": ("lightning", "lightning.pytorch"), "lightning": ("pytorch_lightning",) * 2}


def class_repr(cls: type, options: Mapping[str, Any]) -> str:
    # Lightning prints the repr in its error about an object of the other package. So the repr names the right class if
    # the other package is imported.
    other, root = _OTHER.get(cls.__module__.rpartition(".")[2], ("", ""))
    hint = f", not for {other}: there use lightning_sparse.flavours.{other}.{cls.__name__}"
    arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"<{cls.__module__}.{cls.__name__}({arguments}){hint if root in sys.modules else ''}>"


class LogOnce:
    """Logs each line once. Rank 0 logs, and other ranks only lines about themselves."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._logged: set[str] = set()

    def __call__(self, line: str, level: int = logging.INFO, *, every_rank: bool = False) -> None:
        if (every_rank or self._rank == 0) and line not in self._logged:
            self._logged.add(line)
            log.log(level, line)
