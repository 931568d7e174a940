"""Which parameters no rank used in a round, for DDP's ``find_unused_parameters``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_sparse.exchange.communicator import MAX, HierCommunicator
from lightning_sparse.gradients.groups import ParamGroup


class UnusedParameters:
    """Which parameters took part in a backward pass, for DDP's ``find_unused_parameters``.

    DDP leaves the gradient of a parameter that no rank used as it is, whatever a hook writes there. So a rank withholds
    the residual of what it did not use, which loses nothing, and once a round all ranks agree on what none of them
    used: there the round is undone, in the bucket and in the residual.

    Args:
        module: whose parameters to watch. With gradient accumulation, uses add up as DDP's do.
    """

    def __init__(self, module: nn.Module) -> None:
        watched = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._places = {name: place for place, name in enumerate(watched)}
        self._used: set[str] = set()
        self._used_in_round: set[str] = set()
        self._undo: list[tuple[str, Tensor, Tensor | None]] = []
        self._handles = [
            p.register_post_accumulate_grad_hook(self._marker(name))  # type: ignore[no-untyped-call]
            for name, p in watched.items()
        ]

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def take(self, group: ParamGroup) -> frozenset[str]:
        """The group's parameters that this rank did not use since the last call."""
        used = self._used.intersection(group.names)
        self._used -= used
        self._used_in_round |= used
        return frozenset(group.names) - used

    def save(self, name: str, target: Tensor, before: Tensor | None) -> None:
        """At the end of the round restore ``target`` to ``before`` (None: zeros) if no rank used the parameter."""
        self._undo.append((name, target, before))

    @property
    def saved(self) -> list[Tensor]:
        """What ``undo`` may restore."""
        return [before for _, _, before in self._undo if before is not None]

    def agree(self, communicator: HierCommunicator, device: torch.device) -> Tensor:
        """Which parameters some rank used in this round. A collective of the world."""
        used = torch.zeros(len(self._places), dtype=torch.uint8, pin_memory=device.type == "cuda")
        used[[self._places[name] for name in self._used_in_round]] = 1
        used = used.to(device, non_blocking=True)
        communicator.flat_all_reduce(used, op=MAX)
        self._used_in_round.clear()
        return used.bool()

    def undo(self, used: Tensor) -> None:
        """End the round: undo it where no rank used the parameter. No host sync."""
        for name, target, before in self._undo:
            before = torch.zeros_like(target) if before is None else before
            target.copy_(torch.where(used[self._places[name]], target, before))
        self._undo.clear()

    def abandon(self) -> None:
        """Forget a round that was cut short."""
        self._undo.clear()
        self._used_in_round.clear()

    def _marker(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self._used.add(name)
