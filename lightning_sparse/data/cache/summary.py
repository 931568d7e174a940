"""Samples and bytes by tier and epoch, over all nodes: for loggers after each epoch, and a table at the end."""

from collections.abc import Callable
from dataclasses import asdict

from lightning_sparse.data.cache.counts import TierCounts
from lightning_sparse.data.peers.collectives import on_all_ranks

TIERS = ("memory", "peer", "disk", "storage")
_ERRORS = {
    "flipped_memory": "checksum failures in memory, read from the next tier",
    "flipped_disk": "checksum failures on disk, read from the next tier",
    "changed": "files that have changed on storage",
    "replaced": "corrupt files replaced by other samples",
}


class TierLog:
    """Counts by epoch.

    Args:
        read: returns what this rank reports so far; the reports of all ranks are added.
    """

    def __init__(self, read: Callable[[], TierCounts]) -> None:
        self._read = read
        self._total = TierCounts()
        self.epochs: dict[int, TierCounts] = {}

    def end_epoch(self, epoch: int) -> TierCounts:
        """Return what was read since the last call. A collective."""
        total = sum(on_all_ranks(self._read), TierCounts())
        self.epochs[epoch] = self.epochs.get(epoch, TierCounts()) + (total - self._total)
        self._total = total
        return self.epochs[epoch]

    def sizes(self, read: Callable[[], tuple[int, ...]]) -> str:
        """Return one line on what the tiers of all nodes hold. A collective; `read`: see `SampleStore.sizes`."""
        memory, memory_bytes, disk, disk_bytes = (sum(column) for column in zip(*on_all_ranks(read), strict=True))
        return (
            f"  in memory: {memory:,} samples, {memory_bytes / 1e6:,.1f} MB; on local disks: {disk:,} samples, "
            f"{disk_bytes / 1e6:,.1f} MB"
        )

    def table(self) -> list[str]:
        """Return one line per epoch, of long runs the first and the last ones."""
        epochs = list(self.epochs.items())
        shown = epochs if len(epochs) <= 8 else [*epochs[:3], *epochs[-3:]]
        lines = ["  epoch  " + "".join(f"{tier:>12} MB" for tier in TIERS) + "   hits in memory"]
        for row, (epoch, counts) in enumerate(shown):
            if len(epochs) > len(shown) and row == 3:
                lines.append(f"  ... {len(epochs) - len(shown)} more")
            numbers = asdict(counts)
            sizes = "".join(f"{numbers[f'{tier}_bytes'] / 1e6:>15,.1f}" for tier in TIERS)
            lines.append(f"  {epoch:>5}  {sizes}{100 * counts.memory_hits:>16.1f} %")
        total = asdict(sum(self.epochs.values(), TierCounts()))
        return lines + [f"  {text}: {total[name]:,}" for name, text in _ERRORS.items() if total[name]]


def metrics(counts: TierCounts) -> dict[str, float]:
    """Return values for a logger: bytes by tier, and the fraction of samples that were in memory."""
    numbers = asdict(counts)
    sizes = {f"data/{tier}_bytes": float(numbers[f"{tier}_bytes"]) for tier in TIERS}
    return {**sizes, "data/memory_hits": counts.memory_hits}
