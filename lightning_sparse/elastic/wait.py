"""The wait of a node for other nodes."""

from __future__ import annotations

import time
from typing import Any

from lightning_sparse.elastic.snapshots import Download
from lightning_sparse.messages import SLOW_AFTER, log

UNANSWERED = "the lighthouse sends no list of nodes. If it has ended, start it again at the same address"
UNREACHED_TIMEOUTS, LONGEST_SECONDS = 4, 1800.0  # limits for a joining node


class Wait:
    """Limits and logs a wait for other nodes."""

    def __init__(self) -> None:
        self._began = self._logged = time.monotonic()

    def check(self, download: Download[Any] | None, timeout: float, unanswered: bool) -> None:
        """Log the wait of a joining node.

        Raises:
            RuntimeError: if the wait has taken too long.
        """
        now = time.monotonic()
        cause = UNANSWERED if unanswered else "no node offers its weights"
        if download is not None:
            cause = f"the node at {download.address} sends no weights ({download.problem})"
        unreached = download is not None and now - download.last_answer > UNREACHED_TIMEOUTS * max(timeout, 10.0)
        since = max(self._began, 0.0 if download is None else download.advanced)
        if unreached or now - since > LONGEST_SECONDS:
            raise RuntimeError(
                f"this node could not join the others within {now - self._began:.0f} s: {cause}. Make sure that nodes "
                f"reach each other on all ports, then start this node again."
            )
        self.warn("join the other nodes", cause)

    def warn(self, aim: str, cause: str) -> None:
        """Log the wait every 10 s."""
        now = time.monotonic()
        if now - self._logged > SLOW_AFTER.total_seconds():
            self._logged = now
            log.warning("this node has waited %.0f s to %s: %s", now - self._began, aim, cause)
