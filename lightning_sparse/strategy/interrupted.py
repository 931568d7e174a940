"""Checkpoints after an exception: only where all ranks come to save, since collectives gather what is saved.

One rank alone may have met the exception, and the others wait for it in a training step. Its collectives would then be
paired with theirs. So the ranks meet in the store of the process group first, which nobody else uses, and wait 10 s at
most.
"""

from __future__ import annotations

from lightning_sparse.internals import default_store
from lightning_sparse.messages import PATIENCE


def why_not_saved(key: str, rank: int, world_size: int, steps: int, broken: str) -> str:
    """Wait until all ranks have come, and return why they cannot save; empty if they can. Every rank calls it.

    Args:
        key: the same on all ranks, and another one for each call.
        steps: of the optimizers so far: ranks that stopped in different ones cannot exchange anything.
        broken: why this rank cannot save; empty if it can.
    """
    try:
        store = default_store()
        store.set(f"{key}/{rank}", f"{steps} {broken}")
        try:
            store.wait([f"{key}/{other}" for other in range(world_size)], PATIENCE)
        except RuntimeError:  # it took longer than that
            store.set(f"{key}/left", str(rank))
        missing = [other for other in range(world_size) if not store.check([f"{key}/{other}"])]
        if missing:
            listed = ", ".join(map(str, missing))
            return f"rank(s) {listed} did not come to save within {PATIENCE.total_seconds():.0f} s"
        if store.check([f"{key}/left"]):
            return f"rank {store.get(f'{key}/left').decode()} waited for the others, and left"
        told = [store.get(f"{key}/{other}").decode().partition(" ") for other in range(world_size)]
    except RuntimeError as error:  # the process that has the store is gone
        return f"the store of the process group does not answer ({error})"
    if len({made for made, _, _ in told}) > 1:
        return "ranks stopped in different steps"
    return next((f"on rank {other} {cause}" for other, (_, _, cause) in enumerate(told) if cause), "")
