"""Checkpoints after an exception: only if all ranks save, because collectives gather the checkpoint.

If only one rank met the exception, the others wait for it in a training step, and its collectives would be paired with
the collectives of that step. So the ranks first report in the store of the process group, and wait there 10 s at most.
"""

from __future__ import annotations

from lightning_sparse.internals import default_store
from lightning_sparse.messages import PATIENCE


def why_not_saved(key: str, rank: int, world_size: int, steps: int, broken: str) -> str:
    """Wait for all ranks, and return why they cannot save; empty if they can. Every rank calls it.

    Args:
        key: equal on all ranks, and different in each call.
        steps: optimizer steps so far. Ranks that stopped in different steps cannot exchange anything.
        broken: why this rank cannot save; empty if it can.
    """
    try:
        store = default_store()
        store.set(f"{key}/{rank}", f"{steps} {broken}")
        try:
            store.wait([f"{key}/{other}" for other in range(world_size)], PATIENCE)
        except RuntimeError:  # timeout
            store.set(f"{key}/left", str(rank))
        missing = [other for other in range(world_size) if not store.check([f"{key}/{other}"])]
        if missing:
            listed = ", ".join(map(str, missing))
            return f"rank(s) {listed} did not come to save within {PATIENCE.total_seconds():.0f} s"
        if store.check([f"{key}/left"]):
            return f"rank {store.get(f'{key}/left').decode()} gave up waiting for the others"
        told = [store.get(f"{key}/{other}").decode().partition(" ") for other in range(world_size)]
    except RuntimeError as error:  # the process that has the store is gone
        return f"the store of the process group does not answer ({error})"
    if len({made for made, _, _ in told}) > 1:
        return "ranks stopped in different steps"
    return next((f"on rank {other} {cause}" for other, (_, _, cause) in enumerate(told) if cause), "")
