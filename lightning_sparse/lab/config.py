"""The configuration of a lab, validated before the lab changes anything on the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAX_NODES = 250  # each has an address in 10.77.0.0/24


class LabUnavailableError(RuntimeError):
    """Raised if this machine or user cannot create network namespaces; the message names what is missing."""


@dataclass(frozen=True, kw_only=True)
class LabConfig:
    """A cluster of `nodes` nodes with `devices` ranks each.

    Args:
        gbps: rate of each node's link in Gbit/s, per direction.
        rtt_ms: milliseconds that a packet to another node and its answer take beside what the rate costs.
        network: if False, run on loopback: no root needed, no rates limited, no bytes counted.
        storage: a folder that the nodes access only through a network file system.
        storage_gbps: rate of the storage node's link in Gbit/s. Default: `gbps`.
    """

    nodes: int = 2
    devices: int = 2
    gbps: float = 1.0
    rtt_ms: float = 0.0
    network: bool = True
    storage: Path | None = None
    storage_gbps: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise ValueError(f"nodes={self.nodes} must be 1 to {MAX_NODES}. Start with --nodes 2.")
        if self.devices < 1:
            raise ValueError(f"devices={self.devices} must be at least 1, one rank per node. Pass --devices 1 or more.")
        _check_rate("gbps", self.gbps)
        if not 0 <= self.rtt_ms <= 10_000:
            raise ValueError(f"rtt_ms={self.rtt_ms} must be 0 to 10,000 milliseconds, for example 100.")
        if self.rtt_ms and not self.network:
            raise ValueError(f"rtt_ms={self.rtt_ms} needs a network, but network=False. Omit --no-net or --rtt-ms.")
        if self.storage_gbps is not None:
            _check_rate("storage_gbps", self.storage_gbps)
        if self.storage is None:
            if self.storage_gbps is not None:
                raise ValueError(f"storage_gbps={self.storage_gbps} needs storage. Pass --storage DIR too, or omit it.")
        elif not self.network:
            raise ValueError(f"storage={self.storage} needs a network, but network=False. Omit --no-net or --storage.")
        elif not self.storage.is_dir():
            raise ValueError(f"storage={self.storage} is not a folder. Pass an existing one: the nodes mount it.")


def _check_rate(name: str, value: float) -> None:
    if not 0.001 <= value <= 100:
        raise ValueError(f"{name}={value} must be between 0.001 and 100 Gbit/s, for example 1 or 10.")
