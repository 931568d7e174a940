"""Checkpoints after an exception: only if all ranks save, because a checkpoint needs collectives."""

from __future__ import annotations

import torch.distributed as dist

from lightning_sparse.checkpoint.verdict import Reports, decide
from lightning_sparse.internals import default_store
from lightning_sparse.messages import SLOW_AFTER


def why_not_saved(steps: int, broken: str) -> str:
    """Return the reason why ranks cannot save, or an empty string. Every rank calls it, and waits for all ranks.

    Args:
        steps: number of optimizer steps so far, which must be equal on all ranks.
        broken: reason why this rank cannot save, or an empty string.
    """
    try:
        # If only one rank met the exception, the other ranks are in a training step. So the ranks decide through the
        # store, without a collective, and wait at most 10 s.
        number = default_store().add(f"lightning_sparse/interruptions/{dist.get_rank()}", 1)
        return decide(f"lightning_sparse/interruption {number}", f"{steps} {broken}", _reason, SLOW_AFTER)[0]
    except RuntimeError as error:  # the process with the store has ended
        return f"the store of the process group does not answer ({error})"


def _reason(reports: Reports) -> str:
    missing = [str(rank) for rank, report in enumerate(reports) if report is None]
    if missing:
        return f"rank(s) {', '.join(missing)} did not reach the save within {SLOW_AFTER.total_seconds():.0f} s"
    parts = [report.partition(" ") for report in reports if report is not None]
    if len({steps for steps, _, _ in parts}) > 1:
        return "ranks stopped in different steps"
    return next((f"on rank {rank} {broken}" for rank, (_, _, broken) in enumerate(parts) if broken), "")
