"""The private API of torch that training uses. All of it is here, and checked on import.

`lightning_sparse.strategy.adapter.Adapter` lists the private API of Lightning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed.distributed_c10d
import torch.utils._pytree
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # re-exported, unannounced
from torch.optim import Optimizer

TESTED = "2.11 to 2.15"
USED = (
    "_C._current_graph_task_id",
    "autograd.Variable._execution_engine.queue_callback",
    "amp.GradScaler._get_scale_async",
    "distributed.distributed_c10d._get_default_store",
    "distributed.distributed_c10d.default_pg_timeout",
    "distributed.distributed_c10d.default_pg_nccl_timeout",
    "utils._pytree.tree_leaves",
    "utils._pytree.tree_map",
    "utils._pytree.tree_map_only",
)


def missing(names: Iterable[str] = USED) -> list[str]:
    def there(name: str) -> bool:
        try:
            attrgetter(name)(torch)
        except AttributeError:
            return False
        return True

    return [f"torch.{name}" for name in names if not there(name)]


if _lacking := missing():
    raise ImportError(
        f"torch {torch.__version__} has no {', '.join(_lacking)}, which lightning_sparse uses. Install torch {TESTED}, "
        f"or a later lightning_sparse."
    )

tree_leaves = torch.utils._pytree.tree_leaves
tree_map = torch.utils._pytree.tree_map
tree_map_only = torch.utils._pytree.tree_map_only
default_timeout = torch.distributed.distributed_c10d.default_pg_timeout


def current_backward() -> int:
    """Return the id of this thread's running backward pass; -1 outside."""
    return int(torch._C._current_graph_task_id())


def after_backward(function: Callable[[], None]) -> None:
    """Register a callback for the end of this thread's running backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def default_store() -> Store:
    return torch.distributed.distributed_c10d._get_default_store()


def nccl_options(parent: Any, max_ctas: int, timeout: timedelta | None) -> Any:
    """Return the parent group's options for a new NCCL group, with at most `max_ctas` blocks per kernel."""
    options = copy.deepcopy(parent._get_backend(torch.device("cuda")).options)
    options.config.max_ctas = max_ctas
    # torch warns if the timeout in the options differs from the timeout of the new group.
    options._timeout = timeout or torch.distributed.distributed_c10d.default_pg_nccl_timeout  # type: ignore[attr-defined]
    return options


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta, host: str) -> torch.distributed.ProcessGroup:
    """Return a Gloo group that listens on a given address."""
    options = torch.distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    # By default, Gloo uses the address of the host name, which may be a loopback address.
    options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname=host)]
    backend = torch.distributed.ProcessGroupGloo(store, rank, size, options)
    backend._set_sequence_number_for_group()
    group = torch.distributed.ProcessGroup(store, rank, size)
    group._set_default_backend(torch.distributed.ProcessGroup.BackendType.GLOO)
    for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ())):
        group._register_backend(torch.device(device), torch.distributed.ProcessGroup.BackendType.GLOO, backend)
    return group


def scale_of(scaler: torch.amp.GradScaler) -> Tensor | None:
    """Return the scale as a 0-dim tensor on its device; None before the first step."""
    # ``get_scale()`` would wait for the device.
    scale: Tensor | None = scaler._get_scale_async()
    return scale


def runs_last(optimizer: Optimizer, hook: int) -> None:
    """Move a pre-step hook, given by its id, behind later hooks."""
    optimizer._optimizer_step_pre_hooks.move_to_end(hook)  # type: ignore[attr-defined]


def runs_first(optimizer: Optimizer, hook: int) -> None:
    """Move a post-step hook, given by its id, before earlier hooks."""
    optimizer._optimizer_step_post_hooks.move_to_end(hook, last=False)  # type: ignore[attr-defined]
