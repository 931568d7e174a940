"""Rates: the costs of networks and kernels, by which paths are compared.

A collective of n steps that receives b bytes takes ``n * latency + b * seconds_per_byte``. A kernel costs a constant
per call plus a rate per element.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Link:
    """A network as one device sees it while all devices of its node communicate.

    Args:
        latency: seconds per step of a collective.
    """

    latency: float
    seconds_per_byte: float

    def seconds(self, steps: int, nbytes: float) -> float:
        return steps * self.latency + nbytes * self.seconds_per_byte


@dataclass(frozen=True)
class Rates:
    """Rates of the slowest rank, in seconds.

    Args:
        inter: the network between nodes.
        intra: the network inside each node.
        add: per byte that a reduction sums, in addition to its transfer.
        select: per element that is searched for the largest entries.
        scatter: per pair that is added to a shard.
        fill: per element that is cleared first.
        cast: per element that is rounded to 16 bits, summed and read again.
        select_call, cast_call: per shard of any size, for the calls of the kernels.
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
        """Return the rates of a link of ``gbps`` Gbit/s per node, shared by its devices."""
        return Rates(Link(0.0, 8e-9 * num_devices / gbps), Link(0.0, 0.0))

    def describe(self, num_devices: int) -> str:
        between, inside = (8e-9 / max(link.seconds_per_byte, 1e-15) for link in (self.inter, self.intra))
        parts = [f"{between * num_devices:.3g} Gbit/s and {1e3 * self.inter.latency:.2g} ms between nodes"]
        if num_devices > 1:
            parts.append(f"{inside:.3g} Gbit/s and {1e3 * self.intra.latency:.2g} ms between devices of one")
        return ", ".join([*parts, f"selection {rate(self.select, 'elements')}"])

    def to_list(self) -> list[float]:
        inter, intra, *costs = astuple(self)
        return [*inter, *intra, *costs]

    @staticmethod
    def from_list(numbers: list[float]) -> Rates:
        """Return the inverse of ``to_list``. Raise ValueError for numbers of an earlier version."""
        expected = len(Rates.of_link(1.0, 1).to_list())
        if len(numbers) != expected:
            raise ValueError(f"{len(numbers)} rates, and this version has {expected}: measure them again.")
        return Rates(Link(*numbers[0:2]), Link(*numbers[2:4]), *numbers[4:])


def rate(seconds: float, what: str) -> str:
    """Format a rate from seconds per unit; 0 if the constant dominates."""
    return f"at {1e-9 / seconds:.2g} G {what}/s" if seconds > 0 else "at no measurable cost"
