"""Make each wait of the host for the GPU an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waits_raise() -> Iterator[None]:
    """Raise RuntimeError if the host waits for the GPU. Restore the previous mode at the end."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set_mode("error")
        yield
    finally:
        _set_mode(before)


def _set_mode(mode: str | int) -> None:
    """Set the mode, and ignore torch's warning.

    After torch sets the mode, it warns once that the mode is a prototype. The warning must not become an error here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
