"""Telling a zero that the user wrote from a zero that a round left.

A user may hold a parameter still by zeroing its gradient before the step. That gradient is thrown away: it may neither
add to the residual nor spend it. But a sparse round leaves zeros too, wherever a parameter had no entry among the
largest, and there the residual must keep what it took up. By value the two look the same.

So a round ends by writing ``-0.0`` for a zero at the head of each parameter. It counts as zero in every sum, product
and comparison, and clipping or unscaling keep it; ``zero_()``, ``fill_(0)`` and an assignment of zero replace it by
``+0.0``. One element a parameter tells them apart, and no pass over the gradient is needed.

Of a gradient *multiplied* by zero this recognises half: a head that was positive. Use ``zero_()``, or drop it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def heads_of(numels: Sequence[int], device: torch.device) -> Tensor:
    """Where each parameter begins in the flat tensor, int64; empty parameters have no head."""
    starts, start = [], 0
    for numel in numels:
        if numel:
            starts.append(start)
        start += numel
    return torch.tensor(starts, dtype=torch.int64, device=device)


def mark_heads(grad_N: Tensor, heads: Tensor) -> None:
    """Write -0.0 where a parameter's first element is zero, in place; no host sync."""
    first = grad_N.index_select(0, heads)
    grad_N.index_copy_(0, heads, torch.where(first == 0, -0.0, first))


class WrittenZeros:
    """Which of these gradients consist of zeros that the user wrote, as they are now.

    On a GPU the answer is computed there and copied while the host goes on.

    Args:
        grads: by parameter name; marked by ``mark_heads`` in the round that filled them.
    """

    def __init__(self, grads: Mapping[str, Tensor]) -> None:
        self._names = [name for name, grad in grads.items() if grad.numel()]
        self._event: torch.cuda.Event | None = None
        self._flags = _written_zero([grads[name].detach() for name in self._names])
        if self._flags.is_cuda:
            stream = torch.cuda.current_stream(self._flags.device)
            pinned = torch.empty(self._flags.shape, dtype=torch.bool, pin_memory=True)
            self._flags = pinned.copy_(self._flags, non_blocking=True)
            self._event = stream.record_event()

    def names(self) -> set[str]:
        """The parameters zeroed by the user; waits for the GPU to have come this far."""
        if self._event is not None:
            self._event.synchronize()
        return {name for name, zero in zip(self._names, self._flags.tolist(), strict=True) if zero}


def _written_zero(grads: list[Tensor]) -> Tensor:
    if not grads:
        return torch.zeros(0, dtype=torch.bool)
    heads = torch.stack([grad[(0,) * grad.dim()].float() for grad in grads])
    written = (heads == 0) & ~heads.signbit()
    if written.is_cuda:  # asking which ones would wait for the GPU: all of them, in one launch
        return written & (torch.stack(torch._foreach_norm(grads, float("inf"))) == 0)
    for i in written.nonzero().flatten().tolist():  # the head alone says little: one row may be masked
        written[i] = not grads[i].any()
    return written
