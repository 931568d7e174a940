"""Log where a rank waits for other ranks, and where those ranks wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from lightning_sparse.internals import default_store
from lightning_sparse.messages import SLOW_AFTER, log

MOST_NAMED = 4
"""Maximum number of ranks that a log line names."""


@contextmanager
def waiting(place: str) -> Iterator[None]:
    """Log where this rank (such as "in step 7") and others wait, after `SLOW_AFTER`, and again after changes."""
    # Ranks that make different numbers of steps wait for each other in different collectives, until the timeout of
    # their process group. So each rank publishes its place in the store of the default group.
    over, published = threading.Event(), threading.Event()
    watch = threading.Thread(target=_watch, args=(over, published, place), name="lightning_sparse", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        if published.is_set():
            watch.join()
            with suppress(RuntimeError):  # the rank with the store has ended
                default_store().set(_key(dist.get_rank()), "")  # reading a deleted key would block


def _watch(over: threading.Event, published: threading.Event, place: str) -> None:
    logged, passed = "", 0.0
    while not over.wait(SLOW_AFTER.total_seconds()) and dist.is_initialized():
        passed += SLOW_AFTER.total_seconds()
        published.set()
        others = _others(place)
        if others != logged:
            rank = dist.get_rank()
            log.warning("rank %d has waited %.0f s for other ranks, %s. %s", rank, passed, place, others)
        logged = others


def _others(place: str) -> str:
    try:
        places = _exchange_places(place)
    except RuntimeError as error:
        return f"The store that says where other ranks wait does not answer: {error}"
    if not places:
        return "No other rank has waited that long: a rank still computes, is stopped, or has left the training"
    named = ", ".join(f"rank {rank} {other_place}" for rank, other_place in list(places.items())[:MOST_NAMED])
    remainder = f", and {len(places) - MOST_NAMED} more" if len(places) > MOST_NAMED else ""
    return (
        f"Also waiting: {named}{remainder}. If their step differs, a rank has skipped a step. Let every "
        f"rank make the same number of steps, even a rank without a gradient. All ranks must enter global_weights()"
    )


def _exchange_places(place: str) -> dict[int, str]:
    rank, store = dist.get_rank(), default_store()
    store.set(_key(rank), place)
    others = [other for other in range(dist.get_world_size()) if other != rank and store.check([_key(other)])]
    places = {other: store.get(_key(other)).decode() for other in others}
    return {other: other_place for other, other_place in places.items() if other_place}


def _key(rank: int) -> str:
    return f"lightning_sparse/waits/{rank}"
