"""Parts of the GPU session: each has a function, a time limit, and the claims that the function checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DDP = "DDP"
"""Name of the method that other methods are compared with."""
HELD, NOT_HELD, NOT_RUN = "held", "not held", "not run"
Claims = dict[str, tuple[str, str]]
"""The verdict and the number of each claim."""
Result = tuple[Claims, Any]
"""The claims that are checked so far, and all data so far."""


@dataclass(frozen=True)
class Part:
    """One part of the session.

    Args:
        run: gets the folder for files, and the device. It yields all results so far whenever it has new results, so
            that a part that reaches its time limit keeps them.
        seconds: time limit on a GPU.
        claims: text of each claim, by name.
        by_default: whether the session runs this part without --parts.
    """

    run: Callable[[Path, torch.device], Iterator[Result]]
    seconds: float
    claims: dict[str, str]
    by_default: bool = True


def verdict(is_true: bool, number: str) -> tuple[str, str]:
    return (HELD if is_true else NOT_HELD, number)
