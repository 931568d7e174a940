"""Where the samples of each epoch came from, over all nodes: after each epoch for a logger, as a table at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from lightning_sparse.data.cache.counts import TierCounts, TierSizes
from lightning_sparse.data.peers.collectives import on_all_ranks

TIERS = ("memory", "peer", "disk", "storage")


class TierLog:
    """Counts by epoch.

    Args:
        read: what this rank has to report of all that was read so far; reports of all ranks are added.
    """

    def __init__(self, read: Callable[[], TierCounts]) -> None:
        self._read = read
        self._total = TierCounts()
        self.epochs: dict[int, TierCounts] = {}

    def end_epoch(self, epoch: int) -> TierCounts:
        """What was read since the last call. A collective."""
        total = sum(on_all_ranks(self._read), TierCounts())
        self.epochs[epoch] = self.epochs.get(epoch, TierCounts()) + (total - self._total)
        self._total = total
        return self.epochs[epoch]

    def sizes(self, read: Callable[[], TierSizes]) -> str:
        """What the tiers of all nodes hold. A collective; `read` as for the counts: one report a node."""
        memory, memory_bytes, disk, disk_bytes = (sum(column) for column in zip(*on_all_ranks(read), strict=True))
        return (
            f"  in memory {memory:,} samples, {memory_bytes / 1e6:,.1f} MB; on local disks {disk:,} samples, "
            f"{disk_bytes / 1e6:,.1f} MB"
        )

    def table(self) -> list[str]:
        """One line an epoch; long runs show their first and last."""
        epochs = list(self.epochs.items())
        shown = epochs if len(epochs) <= 8 else [*epochs[:3], *epochs[-3:]]
        lines = ["  epoch  " + "".join(f"{tier:>12} MB" for tier in TIERS) + "   hits in memory"]
        for place, (epoch, counts) in enumerate(shown):
            if len(epochs) > len(shown) and place == 3:
                lines.append(f"  ... {len(epochs) - len(shown)} more")
            numbers = asdict(counts)
            lines.append(
                f"  {epoch:>5}  "
                + "".join(f"{numbers[f'{tier}_bytes'] / 1e6:>15,.1f}" for tier in TIERS)
                + f"{100 * hit_rate(counts):>16.1f} %"
            )
        problems = {name: sum(asdict(each)[name] for each in self.epochs.values()) for name in _PROBLEMS}
        return lines + [f"  {_PROBLEMS[name]}: {count:,}" for name, count in problems.items() if count]


_PROBLEMS = {
    "flipped_memory": "samples whose checksum failed in memory, taken from elsewhere",
    "flipped_disk": "samples whose checksum failed on disk, taken from elsewhere",
    "changed": "files that have changed on storage",
    "replaced": "damaged files replaced by others",
}


def hit_rate(counts: TierCounts) -> float:
    """Share of samples that the node's own memory had."""
    return counts.memory_samples / max(1, counts.samples)


def metrics(counts: TierCounts) -> dict[str, float]:
    """For a logger: bytes by tier, and the share of samples that were in memory."""
    numbers = asdict(counts)
    return {f"data/{tier}_bytes": float(numbers[f"{tier}_bytes"]) for tier in TIERS} | {
        "data/memory_hits": hit_rate(counts)
    }
