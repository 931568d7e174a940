"""Checkpoints after an exception: only if all ranks save, because collectives gather the checkpoint.

If only one rank met the exception, the others wait for it in a training step, and its collectives would be paired with
the collectives of that step. So the ranks first report in the store of the process group, and wait there 10 s at most.
"""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # re-exported, unannounced

from lightning_sparse.internals import default_store
from lightning_sparse.messages import PATIENCE

_NOTHING = "nothing"


def why_not_saved(steps: int, broken: str) -> str:
    """Wait for all ranks, and return why they cannot save; empty if they can. Every rank calls it.

    Args:
        steps: optimizer steps so far. Ranks that stopped in different steps cannot exchange anything.
        broken: why this rank cannot save; empty if it can.
    """
    try:
        store, rank = default_store(), dist.get_rank()
        key = f"lightning_sparse/interruption {store.add(f'lightning_sparse/interruptions/{rank}', 1)}"
        keys = [f"{key}/{other}" for other in range(dist.get_world_size())]
        store.set(keys[rank], f"{steps} {broken}")
        with suppress(RuntimeError):  # timeout
            store.wait(keys, PATIENCE)
        # The first rank decides for all, because ranks that stop waiting at different times may see different reports.
        cause = store.compare_set(f"{key}/cause", "", _cause(store, keys) or _NOTHING).decode()
    except RuntimeError as error:  # the process that has the store is gone
        return f"the store of the process group does not answer ({error})"
    return "" if cause == _NOTHING else cause


def _cause(store: Store, keys: list[str]) -> str:
    missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    if missing:
        return f"rank(s) {', '.join(missing)} did not reach the save within {PATIENCE.total_seconds():.0f} s"
    reports = [store.get(key).decode().partition(" ") for key in keys]
    if len({steps for steps, _, _ in reports}) > 1:
        return "ranks stopped in different steps"
    return next((f"on rank {rank} {broken}" for rank, (_, _, broken) in enumerate(reports) if broken), "")
