"""What networks and kernels cost: the numbers that paths are compared by.

A collective of n steps that receives b bytes takes ``n * latency + b * seconds_per_byte``. Kernels cost a constant for
each call and a price for each element; the constant decides for small shards, such as those of 25 MB buckets on eight
devices. `probe` measures the numbers.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Link:
    """A network as one device sees it while all devices of its node communicate.

    Args:
        latency: seconds for each step of a collective.
        seconds_per_byte: for each byte that the device receives.
    """

    latency: float
    seconds_per_byte: float

    def seconds(self, steps: int, nbytes: float) -> float:
        """Time of a collective."""
        return steps * self.latency + nbytes * self.seconds_per_byte


@dataclass(frozen=True)
class Rates:
    """What the machines can do; the slowest rank counts. All are seconds.

    Args:
        inter: the network between nodes.
        intra: the network inside a node.
        add: per byte that a reduction sums, beyond carrying it.
        select: per element of a shard that is searched for the largest.
        scatter: per pair of a message that is added to a shard.
        fill: per element of a shard that is cleared before.
        cast: per element of a shard that is rounded to 16 bits, summed and read again.
        select_call: per shard, for the calls that select and scatter, at any size.
        cast_call: per shard, for the calls that round and sum, at any size.
    """

    inter: Link
    intra: Link
    add: float = 0.0
    select: float = 0.0
    scatter: float = 0.0
    fill: float = 0.0
    cast: float = 0.0
    select_call: float = 0.0
    cast_call: float = 0.0

    @staticmethod
    def of_link(gbps: float, num_devices: int) -> Rates:
        """A link of ``gbps`` Gbit/s per node, shared by its devices; everything else takes no time."""
        return Rates(Link(0.0, 8e-9 * num_devices / gbps), Link(0.0, 0.0))

    def describe(self, num_devices: int) -> str:
        """For the log."""
        between, inside = (8e-9 / max(link.seconds_per_byte, 1e-15) for link in (self.inter, self.intra))
        parts = [f"{between * num_devices:.3g} Gbit/s and {1e3 * self.inter.latency:.2g} ms between nodes"]
        if num_devices > 1:
            parts.append(f"{inside:.3g} Gbit/s and {1e3 * self.intra.latency:.2g} ms between devices of one")
        return ", ".join([*parts, f"selection {rate(self.select, 'elements')}"])

    def to_list(self) -> list[float]:
        """Plain numbers, for a checkpoint and for agreement between ranks."""
        inter, intra, *rest = astuple(self)
        return [*inter, *intra, *rest]

    @staticmethod
    def from_list(numbers: list[float]) -> Rates:
        """Return the inverse of to_list().

        Raises:
            ValueError: for another number of rates, such as from an earlier version.
        """
        expected = len(Rates.of_link(1.0, 1).to_list())
        if len(numbers) != expected:
            raise ValueError(f"{len(numbers)} rates, and this version has {expected}: measure them again.")
        return Rates(Link(*numbers[0:2]), Link(*numbers[2:4]), *numbers[4:])


def rate(seconds: float, what: str) -> str:
    """For the log, from the seconds that each takes: 0 where few of them were timed, and the call takes all of it."""
    return f"at {1e-9 / seconds:.2g} G {what}/s" if seconds > 0 else "at no measurable cost"
