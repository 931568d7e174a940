"""Buffers and other tensors that no optimizer steps: each node has its own, and checkpoints contain the average."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sparse.agree import differing, extremes, on_all, same_bits
from lightning_sparse.exchange import HierCommunicator
from lightning_sparse.exchange.communicator import average
from lightning_sparse.messages import log
from lightning_sparse.sharding import local_of


class Buffers:
    """Averages the floating-point buffers of a module, such as batch norm statistics.

    It also averages parameters that no optimizer steps and that differ between ranks, such as a teacher's weights.

    Args:
        stepped: returns ``id()`` of the parameters that optimizers step.
    """

    def __init__(
        self, module: nn.Module, communicator: HierCommunicator, stepped: Callable[[], Collection[int]]
    ) -> None:
        self._module, self._communicator, self._stepped = module, communicator, stepped
        self._drifting: set[str] = set()  # names of parameters that differ between ranks
        self._warned = False  # of buffers that are not averaged
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}  # this rank's own value, and the shown average

    @torch.no_grad()
    def average(self) -> None:
        """Average over all ranks, in place. A collective of the world."""
        self._find_drifting()
        self._average(self._common())

    def _average(self, tensors: Mapping[str, Tensor]) -> None:
        for names, reduce, count in self._by_holders(tensors):
            topology = self._communicator.topology
            is_first = topology.rank == 0 if count == topology.world_size else topology.node_index == 0
            average([tensors[name] for name in names], reduce, count, is_first=is_first)

    @torch.no_grad()
    def show_averaged(self) -> None:
        """Average, and keep this rank's own values for `swap_in_local_weights`."""
        self._find_drifting()
        tensors = self._common()
        own = {name: tensor.clone() for name, tensor in tensors.items()}
        self._average(tensors)
        self._kept = {name: (own[name], tensor.clone()) for name, tensor in tensors.items()}

    @torch.no_grad()
    def swap_in_local_weights(self) -> None:
        """Restore this rank's own values, except for changes made to the averages."""
        for name, tensor in self._tensors().items():
            if name in self._kept and same_bits(tensor, self._kept[name][1]):
                tensor.copy_(self._kept[name][0])
        self._kept = {}

    def own(self) -> dict[str, Tensor]:
        """Return this rank's own values by name, even while the averages are shown."""
        return {
            name: self._kept[name][0] if name in self._kept and same_bits(tensor, self._kept[name][1]) else tensor
            for name, tensor in self._tensors().items()
        }

    def fit(self, saved: Mapping[str, Tensor]) -> bool:
        """Return whether saved buffers have the names and shapes of these."""
        tensors = {**dict(self._module.named_parameters()), **self._tensors()}
        same = all(name in tensors and local_of(tensors[name]).shape == tensor.shape for name, tensor in saved.items())
        return same and self._tensors().keys() <= saved.keys()

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        self._drifting = saved.keys() & dict(self._module.named_parameters()).keys()
        for name, tensor in self._tensors().items():
            tensor.copy_(saved[name])

    def _common(self) -> dict[str, Tensor]:
        # Ranks may hold different buffers, such as a cache as long as the longest sequence so far. A collective of the
        # world even if this rank has no buffers, because others may have some.
        tensors = dict(sorted(self._tensors().items()))
        devices = [p.device for p in self._module.parameters()]
        device = next((each for each in devices if each.type != "cpu"), devices[0])
        stated = {name: f"{list(buffer.shape)} {buffer.dtype}" for name, buffer in sorted(self._floats().items())}
        digest = zlib.crc32(repr(stated).encode())
        most, least = extremes([digest], self._communicator.flat_all_reduce, device)
        if most == least:
            return tensors
        first, *others = on_all(lambda: stated)
        odd = {name for other in others for name in {**first, **other} if first.get(name) != other.get(name)}
        if not self._warned and self._communicator.topology.rank == 0:
            log.warning(
                "buffers with other shapes or types on other ranks are not averaged. Checkpoints have rank 0's: %s",
                ", ".join(sorted(odd)),
            )
        self._warned = True
        return {name: tensor for name, tensor in tensors.items() if name not in odd}

    def _floats(self) -> dict[str, Tensor]:
        return {name: b for name, b in self._module.named_buffers() if b.is_floating_point() and b.numel()}

    def _tensors(self) -> dict[str, Tensor]:
        floats = self._floats()
        stepped = self._stepped()  # each time, because a teacher may be trained later
        drifting = {n: p for n, p in self._module.named_parameters() if n in self._drifting and id(p) not in stepped}
        return {**floats, **{name: local_of(p.data) for name, p in drifting.items()}}

    def _by_holders(self, names: Iterable[str]) -> Iterator[tuple[list[str], Callable[..., None], int]]:
        # All ranks hold a plain tensor, but only the counterparts on other nodes hold the same shard. Each group comes
        # with the collective of its holders, and with their number.
        comm, names = self._communicator, list(names)
        sharded = {name for name, p in self._module.named_parameters() if isinstance(p, DTensor)}
        for group, reduce, count in (
            ([name for name in names if name not in sharded], comm.flat_all_reduce, comm.topology.world_size),
            ([name for name in names if name in sharded], comm.all_reduce, comm.topology.num_nodes),
        ):
            # No collective for an empty group: the names are equal on all ranks, so ranks decide alike.
            if group:
                yield group, reduce, count

    def _find_drifting(self) -> None:
        stepped, parameters = self._stepped(), dict(self._module.named_parameters())
        names = [
            name
            for name, p in parameters.items()
            if id(p) not in stepped and name not in self._drifting and p.is_floating_point() and p.numel()
        ]
        # A collective of the world, if there are any such parameters.
        for group, reduce, _ in self._by_holders(names):
            held = [local_of(parameters[name].data) for name in group]
            self._drifting |= {group[place] for place in differing(held, reduce, held[0].device)}
