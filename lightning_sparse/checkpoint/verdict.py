"""Decisions of all ranks without a collective, through the store of the process group.

A save may come from an exception on one rank. A collective of the save would then be paired with a collective of a
training step on the other ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # re-exported, unannounced

from lightning_sparse.internals import default_store, default_timeout
from lightning_sparse.messages import SLOW_AFTER, listed, log

Reports = Sequence[str | None]
"""By rank; None for a rank that did not report in time."""
_NONE = "\0"  # an empty text, which the store cannot hold


def decide(
    key: str, report: str, judge: Callable[[Reports], str], timeout: timedelta | None = None, task: str = ""
) -> tuple[str, Reports]:
    """Publish a report, wait for the reports of all ranks, and judge them. Every rank calls it.

    Args:
        key: unique to this decision, equal on all ranks.
        timeout: time limit for reports. Default: the timeout of the process group.
        task: task of the ranks that have not reported, for the log.

    Returns:
        The verdict, equal on all ranks, and the reports that this rank saw.

    Raises:
        RuntimeError: if the store is gone.
    """
    store, rank = default_store(), dist.get_rank()
    keys, verdict_key = [f"{key}/{other}" for other in range(dist.get_world_size())], f"{key}/verdict"
    store.set(keys[rank], report or _NONE)
    timeout = timeout or default_timeout
    if not _wait(store, keys, verdict_key, min(timeout, SLOW_AFTER)) and timeout > SLOW_AFTER:
        if task:
            missing = [other for other, other_key in enumerate(keys) if not store.check([other_key])]
            log.warning("waiting for rank(s) %s to %s", listed(missing), task)
        _wait(store, keys, verdict_key, timeout - SLOW_AFTER)
    reports = [store.get(key).decode().removeprefix(_NONE) if store.check([key]) else None for key in keys]
    # Ranks that stop waiting at different times may see different reports. So the first rank that judges decides for
    # all.
    verdict = store.compare_set(verdict_key, "", judge(reports) or _NONE).decode()
    return verdict.removeprefix(_NONE), reports


def forget(key: str) -> None:
    """Remove this rank's report and the verdict from the store, once no rank waits for them."""
    store = default_store()
    store.delete_key(f"{key}/{dist.get_rank()}")
    store.delete_key(f"{key}/verdict")


def _wait(store: Store, keys: list[str], verdict_key: str, timeout: timedelta) -> bool:
    # Returns False at the timeout. After a failure, ranks come here one after the other. A rank that comes after the
    # verdict must not wait again.
    until = time.monotonic() + timeout.total_seconds()
    while not store.check([verdict_key]):
        left = until - time.monotonic()
        if left <= 0:
            return False
        with contextlib.suppress(RuntimeError):  # timeout
            store.wait(keys, timedelta(seconds=min(left, 1.0)))
            return True
    return True
