"""What a lab should look like. Checked when it is made, before anything on the machine is touched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAX_NODES = 250  # one address each in 10.77.0.0/24


class LabUnavailableError(RuntimeError):
    """This machine, or this user, cannot make network namespaces; the message names what is missing."""


@dataclass(frozen=True, kw_only=True)
class LabConfig:
    """A cluster of `nodes` machines with `devices` ranks each.

    Args:
        gbps: rate of each node's link in Gbit/s, in each direction.
        network: False rehearses the same nodes on loopback: nothing is shaped or counted, and no root is needed.
        storage: a folder that the nodes shall see only through a network file system.
        storage_gbps: rate of the link of the storage node in Gbit/s; `gbps` when not given.
    """

    nodes: int = 2
    devices: int = 2
    gbps: float = 1.0
    network: bool = True
    storage: Path | None = None
    storage_gbps: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise ValueError(f"nodes={self.nodes}: a lab has 1 to {MAX_NODES} nodes. Give --nodes 2 to start with.")
        if self.devices < 1:
            raise ValueError(f"devices={self.devices}: each node runs at least one rank. Give --devices 1 or more.")
        _check_rate("gbps", self.gbps)
        if self.storage_gbps is not None:
            _check_rate("storage_gbps", self.storage_gbps)
        if self.storage is None:
            if self.storage_gbps is not None:
                raise ValueError(
                    f"storage_gbps={self.storage_gbps} shapes the link of a storage node, and there is none. "
                    "Give --storage DIR too, or leave it out."
                )
        elif not self.network:
            raise ValueError(
                f"storage={self.storage} needs a network to sit behind, and network=False has none. "
                "Leave out --no-net, or --storage."
            )
        elif not self.storage.is_dir():
            raise ValueError(f"storage={self.storage} is no folder. Give an existing folder: the nodes will mount it.")


def _check_rate(name: str, value: float) -> None:
    if not 0.001 <= value <= 100:
        raise ValueError(
            f"{name}={value}: the rate of a link is between 0.001 and 100 Gbit/s. Ethernet is usually 1 or 10."
        )
