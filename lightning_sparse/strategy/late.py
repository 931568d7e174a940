"""Averages gradients that DistributedDataParallel leaves out.

DDP silently leaves out parameters that are unfrozen or added after it wraps the module, and the weights of the ranks
diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.exchange.communicator import MAX, HierCommunicator
from lightning_sparse.sharding import parameters_of


class LateGradients:
    """Averages the gradients of late parameters: optimizers step them, but DDP does not reduce them.

    Args:
        communicator: its ``world`` has the ranks over which DDP averages.
        refused: reason why late parameters cannot be trained; empty if they can.
    """

    def __init__(
        self,
        communicator: HierCommunicator,
        log_once: Callable[[str, int], None],
        level: int,
        refused: str,
    ) -> None:
        self._communicator, self._log_once, self._level, self._refused = communicator, log_once, level, refused
        self._known: WeakKeyDictionary[DistributedDataParallel, dict[int, Tensor]] = WeakKeyDictionary()
        self._equal: dict[int, Tensor] = {}  # late parameters that are equal on all ranks

    def add(self, ddp: DistributedDataParallel) -> None:
        for before in [wrapper for wrapper in self._known if wrapper.module is ddp.module]:
            del self._known[before]
        named = ddp.module.named_parameters(remove_duplicate=False)
        ignored = ddp.parameters_to_ignore
        # Parameters that the user lets DDP ignore are not late.
        self._known[ddp] = {id(p): p for name, p in named if p.requires_grad or name in ignored}

    @torch.no_grad()
    def average(self, optimizers: Iterable[Optimizer]) -> None:
        """Average the gradients of late parameters. All ranks call it after each backward pass.

        It is a collective if there are late parameters. Modules inside ``no_sync()`` wait for a later call.
        """
        late = self._late(optimizers)
        if not late:
            return
        self._communicator.error_context = "while averaging the gradients that DistributedDataParallel leaves out"
        self._begin_equal(late)
        average_gradients(late, self._communicator)

    def _late(self, optimizers: Iterable[Optimizer]) -> list[Tensor]:
        stepped = {id(p): p for optimizer in optimizers for p in parameters_of(optimizer) if p.requires_grad}
        late = stepped.keys() - set().union(*self._known.values())
        if not late:
            return []
        waiting = {id(p) for ddp in self._known if not ddp.require_backward_grad_sync for p in ddp.module.parameters()}
        return [p for key, p in stepped.items() if key in late and key not in waiting]

    def _begin_equal(self, late: Sequence[Tensor]) -> None:
        new = [p for p in late if id(p) not in self._equal]
        if not new:
            return
        names = {id(p): name for ddp in self._known for name, p in ddp.module.named_parameters()}
        listed = ", ".join([names.get(id(p), f"one of shape {tuple(p.shape)}") for p in new[:3]])
        noticed = (
            f"{len(new)} parameter(s) were unfrozen or added after DistributedDataParallel wrapped the module "
            f"({listed}{', ...' if len(new) > 3 else ''}). DDP does not reduce them"
        )
        if self._refused:
            raise ValueError(
                f"{noticed}, and {self._refused}. Train them from the start of a fit, or set momentum_correction=False."
            )
        self._log_once(
            f"{noticed}, so their gradients are averaged densely after each backward pass. To avoid this, train them "
            f"from the start of a fit.",
            self._level,
        )
        # The ranks may have initialized the parameters differently.
        self._communicator.broadcast_from_rank0(new)
        self._equal.update({id(p): p for p in new})


def average_gradients(parameters: Sequence[Tensor], communicator: HierCommunicator) -> None:
    """Average gradients over the communicator's ``world``. A collective that waits for the device.

    A rank without a gradient counts as zero. A parameter without a gradient on any rank gets none.
    """
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
    communicator.flat_all_reduce(used, op=MAX)
    parameters = [p for p, some in zip(parameters, used.tolist(), strict=True) if some]
    for kind in dict.fromkeys((p.device, p.dtype) for p in parameters):
        alike = [p for p in parameters if (p.device, p.dtype) == kind]
        flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else _dense(p.grad) for p in alike])
        communicator.flat_all_reduce(flat.mul_(1.0 / communicator.world.size))  # before the sum, as DDP does
        for parameter, mean in zip(alike, torch.split(flat, [p.numel() for p in alike]), strict=True):
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(mean.view_as(parameter))


def _dense(gradient: Tensor) -> Tensor:
    return (gradient.to_dense() if gradient.is_sparse else gradient).flatten()
