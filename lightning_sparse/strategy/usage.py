"""Which parameters took part in a backward pass, as all ranks see it. Needed only with ``find_unused_parameters``.

DDP leaves the gradient of a parameter alone that no rank used, whatever a hook writes there: a residual flushed into it
would be lost, and one drawn from it would move a parameter that the user holds still. So such parameters are left out
of the round, and since every rank must leave out the same ones, the ranks agree on a bitmap: one all-reduce of one byte
a parameter and bucket.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_sparse.strategy.layout import ParamGroup

MaxReduce = Callable[[Tensor], None]
"""All-reduce with MAX over the world, in place."""


class UsageTracker:
    """Marks parameters as their gradients are accumulated. With gradient accumulation the marks add up, as DDP's do.

    Args:
        module: the module whose parameters to watch.
    """

    def __init__(self, module: nn.Module) -> None:
        self._used: set[str] = set()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._marker(name))  # type: ignore[no-untyped-call]
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        ]

    def take(self, group: ParamGroup) -> list[bool]:
        """Which of the group's parameters this rank used since it was last asked."""
        used = [name in self._used for name in group.names]
        self._used.difference_update(group.names)
        return used

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def _marker(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self._used.add(name)


def unused_everywhere(
    group: ParamGroup, used_here: list[bool], device: torch.device, max_reduce: MaxReduce
) -> frozenset[str]:
    """The group's parameters that no rank used. A collective of the world."""
    flags = torch.tensor(used_here, dtype=torch.uint8, device=device)
    max_reduce(flags)
    return frozenset(name for name, used in zip(group.names, flags.tolist(), strict=True) if not used)
