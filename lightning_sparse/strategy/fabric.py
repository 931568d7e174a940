"""The strategy for Lightning Fabric, as a mixin that imports no Lightning.

    fabric = Fabric(accelerator="cpu", devices=2, num_nodes=2, strategy="mstopk_hier")
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)

Fabric has no epochs and no estimate of its steps, so there is no density warm-up by default. Set ``warmup_steps``, or
``warmup_epochs`` and call ``set_epoch``.
"""

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_sparse.gradients import HierConfig
from lightning_sparse.messages import log
from lightning_sparse.strategy import side_files
from lightning_sparse.strategy.core import HierCore, prepare_ddp
from lightning_sparse.strategy.hosts import FabricHost
from lightning_sparse.strategy.options import OWN


class MSTopKHierFabricMixin(HierCore, FabricHost):
    """DDP whose gradients travel hierarchically, and between nodes only the largest of them, for Fabric.

    Args:
        node_name: the node that this process belongs to, by name, on every rank (see lightning_sparse.topology).
        **kwargs: those of ``HierConfig`` (``density``, ``exchange``, ...), of Fabric's DDPStrategy and of
            DistributedDataParallel. ``gradient_as_bucket_view`` is True unless given, and on GPUs
            ``bucket_cap_mb`` grows with the devices of a node.

    Raises:
        ValueError: for a bad value, an unknown option, or one that cannot be combined with this strategy.
    """

    def __init__(self, node_name: str | None = None, **kwargs: Any) -> None:
        config = HierConfig(**{name: kwargs.pop(name) for name in OWN if name in kwargs})
        self._configure(config, node_name, kwargs)
        super().__init__(**kwargs)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Tell the density warm-up which epoch begins, counted from 0."""
        self._epoch = epoch
        for state in self.hier_states:
            state.epoch = epoch

    # -- set-up --------------------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap the module, and reduce its gradients our way. A module that is set up again goes on with its residuals;
        those of modules that are gone are dropped. A collective of the world."""
        prepare_ddp(self)
        with self._sized_buckets(module):
            ddp: DistributedDataParallel = super().setup_module(module)
        known = list(self.hier_states)
        state = self._attach(ddp, self.precision)
        if state not in known:
            state.epoch = self._epoch
            self._restore(state)
            self._watch([each for found in self._seen_optimizers if (each := found()) is not None])
        return ddp

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Watch whose parameters it steps: their residuals count. Its module may be set up before or after it; where
        both are set up a second time, the module comes first."""
        optimizer = super().setup_optimizer(optimizer)
        self._seen_optimizers = [each for each in self._seen_optimizers if each() is not None] + [
            weakref.ref(optimizer)
        ]
        self._watch([optimizer])
        return optimizer

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Settle the last round, then go backward."""
        self._drop_what_fits_no_module()
        for state in self.hier_states:
            state.before_backward()
        super().backward(tensor, module, *args, **kwargs)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
        """The residuals of all ranks first, then the main file. All ranks call it, as ``fabric.save``. A dict without
        an optimizer, or the state of one, is taken for weights alone."""
        with self._saving(path, whole=isinstance(state, Mapping) and _has_optimizer(state)) as manifests:
            if manifests is not None:
                state = {**state, side_files.KEY: manifests}
            super().save_checkpoint(path, state, storage_options, filter)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Modules that are set up get their residuals back now, others when they are, before the next backward pass:
        each the first that fit it, in the order of set-up. Weights loaded without an optimizer leave residuals
        alone."""
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        manifests = rest.pop(side_files.KEY, []) if isinstance(rest, dict) else []
        if state and not _has_optimizer(state):  # what was loaded is in it by now
            return rest
        self._load({side_files.KEY: manifests}, path)
        for hier_state in self.hier_states:
            self._restore(hier_state)
        return rest

    def _drop_what_fits_no_module(self) -> None:
        """Modules that are to be restored are set up before the first backward pass."""
        left = [each for each in self._saved if any(each.manifest["stores"])]  # in the others there was no residual
        if left and self.is_global_zero:
            log.warning(
                "%d residual(s) of %s were saved for modules with other parameters than those set up: they are lost",
                len(left),
                left[0].path,
            )
        self._saved = []


def _has_optimizer(entry: Any) -> bool:
    """Whether there is an optimizer, or the state of one, in what is saved or loaded."""
    if isinstance(entry, Mapping):
        return "param_groups" in entry or any(map(_has_optimizer, entry.values()))
    return isinstance(entry, Optimizer) or (isinstance(entry, (list, tuple)) and any(map(_has_optimizer, entry)))
