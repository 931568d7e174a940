"""Limit of open files: a process at its limit can neither accept nor open connections."""

import os
import resource

from lightning_sparse.data.config import DataError

RESERVE = 64  # for the files of everything else


def allow_connections(count: int) -> None:
    """Raise the limit of open files of this process, and of those that it starts, so that `count` more can be opened.

    Raises:
        DataError: if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count + RESERVE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise DataError(
            f"this process needs {needed:,} open files for {count:,} connections to other nodes, but may have {hard:,} "
            "(`ulimit -Hn`). Raise the limit, or set shuffle='local', which needs no connections."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
