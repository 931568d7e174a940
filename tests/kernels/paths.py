"""The implementations of the operators on a CPU, and difficult inputs for a selection.

plain      torch, as in an installation without compiled kernels
compiled   the default
scalar     compiled, without vector instructions
whole      compiled, as with a misleading sample: refine and emit run over all elements
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_sparse import kernels
from lightning_sparse.kernels import ops, plain, wire

FLAGS = {"compiled": 0, "scalar": 1, "whole": 2}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VALUES = tuple(wire.VALUE_CODES)


@dataclass(frozen=True)
class Path:
    name: str
    threads: int = 1

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return an operator by its name."""
        if name.startswith("_"):
            raise AttributeError(name)

        def run(*arguments: Any) -> Any:
            with self._running() as operators:
                return getattr(operators, name)(*arguments)

        return run

    @contextmanager
    def _running(self) -> Iterator[ModuleType]:
        """Yield the module of the operators, and set the number of threads."""
        if self.name != "plain" and ops._handle is None:
            pytest.skip(f"no compiled kernels: {'; '.join(kernels.kernel_report().reasons)}")
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        if ops._handle is not None:
            ops._handle.lightning_sparse_force(FLAGS.get(self.name, 0))
        try:
            plain_operators = mock.patch.object(torch.ops, "lightning_sparse", plain)
            with plain_operators if self.name == "plain" else nullcontext():
                yield kernels
        finally:
            if ops._handle is not None:
                ops._handle.lightning_sparse_force(0)
            torch.set_num_threads(before)


PLAIN = Path("plain")
PATHS = [
    PLAIN,
    Path("compiled"),
    Path("compiled", threads=2),
    Path("scalar"),
    Path("whole", threads=2),
]


def paths(*chosen: Path) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", chosen, ids=lambda path: f"{path.name}{path.threads}")


# paths for the tests of arbitrary inputs only
RARE = [Path("scalar", threads=2), Path("whole")]
every_path = paths(*PATHS)
with_threads = paths(*PATHS, Path("plain", threads=2))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether tensors are equal, including NaNs and the sign of zero."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@lru_cache(maxsize=2)
def inputs(numel: int) -> dict[str, Tensor]:
    """Return named fp32 inputs of one length. The tensors are cached, so tests must not write to them."""
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(numel, generator=g)
    uniform = torch.rand(numel, generator=g)
    position = torch.arange(numel)
    sparse = torch.where(uniform < 0.05, normal, 0.0)
    layered = normal * 10.0 ** (-4 * (position * 7 // numel).float() / 7)
    special = normal.clone()
    special[position % 97 == 5] = torch.nan
    special[position % 89 == 3] = torch.inf
    special[position % 83 == 1] = -torch.inf
    return {
        "gaussian": normal,
        "heavy-tailed": normal / uniform.clamp(min=1e-6),
        "layered": layered,
        "one spike": torch.where(position == numel // 3, 1e6, normal),
        "5 % dense": sparse,
        "rounded": normal.bfloat16().float(),
        "constant": torch.full((numel,), -2.5),
        "all zero": torch.zeros(numel),
        "zeros of both signs": torch.where(uniform < 0.5, 0.0, -0.0),
        "ties at the maximum": normal.clamp(-0.5, 0.5),
        "few values": (normal * 2).round(),
        "denormal": normal * 1e-41,
        "huge": normal * 1e38,
        "rising": position.float(),
        "falling": -position.flip(0).float(),
        "special": special,
        "all nan": torch.full((numel,), torch.nan),
    }


def large_input() -> Tensor:
    """Return an input that is large enough for threads in every phase, with ties and non-finite elements."""
    made = inputs(1_200_007)
    return made["few values"] * 0.5 + made["special"]


def nearly_equal(numel: int, shares: tuple[float, ...]) -> Tensor:
    """Return 1.0 and its successors in fp32, shuffled: values that a histogram of high bits cannot distinguish."""
    uniform = torch.rand(numel, generator=torch.Generator().manual_seed(len(shares)))
    bounds = torch.tensor(shares).cumsum(0)[:-1]
    return (torch.bucketize(uniform, bounds).to(torch.int32) + 0x3F80_0000).view(torch.float32)


def ks(numel: int) -> list[int]:
    return sorted({1, min(2, numel), -(-numel // 100), -(-numel // 10), numel // 2 + 1, max(1, numel - 1), numel})


def decoded(message: Tensor, numel: int, k: int, value_dtype: torch.dtype) -> Tensor:
    """Return the message as a dense fp32 vector."""
    values, indices, _ = wire.decode(message, numel, k, value_dtype)
    dense = torch.zeros(numel)
    dense[indices] = values
    return dense


def nonfinite_count(message: Tensor) -> int:
    """Return the count of non-finite elements in the message's header."""
    return int(message[4:8].view(torch.int32))
