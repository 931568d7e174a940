"""Time the steps of a reduction separately."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from lightning_sparse.exchange import HierCommunicator, paths
from lightning_sparse.topology import Topology


class TakenApart(HierCommunicator):
    """Times each step. A barrier before it excludes the wait for other ranks."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        dist.barrier(group=self.topology.world)
        begin = time.perf_counter()
        result = call(*arguments, **options)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
        return result

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return partial(self.timed, name, found) if name in ("reduce_scatter", "exchange", "gather") else found

    @contextmanager
    def kernels_too(self) -> Iterator[None]:
        """Also time the sparse path's compress and accumulate."""
        self.seconds.clear()
        with ExitStack() as patched:
            for name in ("compress", "accumulate"):
                patched.enter_context(patch.object(paths, name, partial(self.timed, name, getattr(paths, name))))
            yield
