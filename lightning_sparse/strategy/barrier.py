"""A barrier on which one rank waits, through the process group's store rather than by a collective.

A checkpoint is whole only with the residuals of all ranks. Were the main file written first and the job killed then,
the new main file would lack some residuals, and the old ones would be of no use any more. So rank 0 waits until all
ranks have written theirs. A save may come from a signal handler or from an exception that one rank alone has met; then
rank 0 waits in vain for a while, but the ranks' collectives stay in step.
"""

from datetime import timedelta

from torch._C._distributed_c10d import Store  # torch.distributed re-exports it unannounced
from torch.distributed.distributed_c10d import _get_default_store, default_pg_timeout


class StoreBarrier:
    """All ranks arrive; one rank waits for them, once.

    Args:
        key: the same on all ranks, and another one for each barrier.
        world_size: how many ranks there are.
    """

    def __init__(self, key: str, world_size: int, store: Store | None = None) -> None:
        self.names: list[str] = []  # that ranks arrived with, once they were waited for
        self._keys = [f"{key}/{rank}" for rank in range(world_size)]
        self._store = store or _get_default_store()

    def arrive(self, rank: int, name: str = "") -> None:
        """Record that this rank has arrived."""
        self._store.set(self._keys[rank], name)

    def wait(self, timeout: timedelta | None) -> list[int]:
        """Wait until all have arrived, or the time is over; None stands for the timeout of the process group.

        Returns:
            The ranks that have not arrived; empty when all have.
        """
        try:
            self._store.wait(self._keys, timeout or default_pg_timeout)
            missing = []
        except RuntimeError:  # it took longer than that
            missing = [rank for rank, key in enumerate(self._keys) if not self._store.check([key])]
        for rank, key in enumerate(self._keys):
            if rank not in missing:
                self.names.append(self._store.get(key).decode())
            self._store.delete_key(key)
        return missing
