"""A tensor on its way to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Copies a tensor to the host, which goes on meanwhile, and waits when it reads it."""

    def __init__(self, tensor: Tensor) -> None:
        self._here, self._copied = tensor, None
        if tensor.is_cuda:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._here = pinned.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> Tensor:
        """It, on the CPU."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._here
