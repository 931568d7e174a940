"""The strategy of FSDP2 inside nodes and updates between them for Trainer, as a mixin that imports no Lightning.

It stands on Lightning's ModelParallelStrategy, whose mesh it replaces by one with a row a node:

============================ =========================================================================================
method                       why
============================ =========================================================================================
setup_environment            the mesh, before ``configure_model``; a module without that hook is sharded by blocks
setup                        the optimizers' updates are exchanged
optimizer_step, ...          in lightning_sparse.strategy.local_trainer
distributed_sampler_kwargs   Lightning's are those of a mesh whose devices share samples
lightning_module_state_dict  of the shared weights
save/load_checkpoint         what a device alone knows is stored beside the checkpoint
============================ =========================================================================================
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_sparse.exchange.config import Density, ValueDtype
from lightning_sparse.exchange.paths import Exchange
from lightning_sparse.fsdp import ShardedGradients, shard
from lightning_sparse.messages import described
from lightning_sparse.strategy import side_files
from lightning_sparse.strategy.fsdp_core import FSDPCore
from lightning_sparse.strategy.local_core import detached
from lightning_sparse.strategy.local_trainer import LocalTrainerMixin
from lightning_sparse.strategy.options import OWN_OF_UPDATES, REFUSED_BY_FSDP, check_options
from lightning_sparse.updates import UpdatesConfig
from lightning_sparse.updates.config import StepAhead

Send = Literal["updates", "gradients"]
"""What travels between nodes."""


class MSTopKFSDPMixin(FSDPCore, LocalTrainerMixin):
    """FSDP2 inside each node, for models that one device cannot hold; between nodes travel the largest updates.

    ``configure_model`` shards the model over ``self.device_mesh["shard"]``. Without that hook, each child of the
    LightningModule is sharded: first the blocks that repeat in it, then what remains.

    Args:
        send: ``"updates"``: what each node's own optimizers did to the shards; ``"gradients"``: the gradients,
            in FSDP2's hook, so that all nodes hold the same weights. Behind AdamW choose updates, or send gradients
            whole (``exchange="dense16"`` or ``"dense"``).
        density: share of what each device sends to other nodes, in (0, 1]; ``"auto"``, for updates: at least 0.01, and
            more where that hides behind the next step.
        exchange: ``"sparse"``, ``"regional"``, ``"dense16"`` or ``"dense"``.
        value_dtype: how values are written into messages; rounding errors stay pending.
        step_ahead: share of its own pending updates that a node's model keeps, from 0.001 to 1; ``"auto"``: 1 on
            two nodes, on more as much as they agree, which is measured now and then.
        delay: 1: a message arrives one step later, and the exchange hides behind the whole step; 0: the step waits.
        sync_every: steps between two exchanges.
        overlap: run the exchange beside the next step, with ``delay=1``.
        node_name: the node that this process belongs to, by name, on every rank; default: the environment variable
            LIGHTNING_SPARSE_NODE, else the host (see lightning_sparse.topology).
        save_distributed_checkpoint: True: a checkpoint is a folder, to which each device writes its shards; False: one
            file with the whole model, which any strategy reads.
        process_group_backend, timeout: of the process groups.

    Raises:
        ValueError: for a bad value, or an option that this strategy sets itself.
    """

    def __init__(
        self,
        send: Send = "updates",
        density: Density = 0.01,
        exchange: Exchange = "sparse",
        value_dtype: ValueDtype = "bfloat16",
        step_ahead: StepAhead = "auto",
        delay: int = 1,
        sync_every: int = 1,
        overlap: bool = True,
        node_name: str | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        check_options(type(self), kwargs, OWN_OF_UPDATES, REFUSED_BY_FSDP, type(self))
        config = UpdatesConfig(
            density=density,
            exchange=exchange,
            value_dtype=value_dtype,
            step_ahead=step_ahead,
            delay=delay,
            sync_every=sync_every,
            overlap=overlap,
        )
        _check_send(send, config)
        self.send = send
        self._configure(config, node_name)
        self._kind = "updates" if send == "updates" else "gradients of shards"
        given = {} if timeout is None else {"timeout": timeout}
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            **given,
        )

    def __repr__(self) -> str:
        return described(type(self), f"density={self.config.density}")

    # -- life of a fit -------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """The mesh, which ``configure_model`` finds as ``self.device_mesh``."""
        super().setup_environment()
        module = self.lightning_module
        module._device_mesh = mesh = self._set_mesh()
        if type(module).configure_model.__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):
            module.configure_model = partial(_shard_children, module, mesh)

    def setup(self, trainer: Any) -> None:
        """Let Lightning set up the sharded model and its optimizers, then begin to exchange updates."""
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        for before in self.local_updates:
            before.detach(self.optimizers)
        self.local_updates = []
        if self.send == "gradients":
            earlier = self.gradients
            self.gradients = ShardedGradients(self.lightning_module, self.config, self._discover({}))
            if earlier is not None:
                self.gradients.take_over(earlier)
            return
        self._attach(self.lightning_module, self.optimizers)
        self._look_at_callbacks(trainer)

    def on_validation_start(self) -> None:
        """All ranks validate with the same buffers; with updates, the shared weights."""
        super().on_validation_start()
        if self.gradients is not None and self._fitting:
            self.gradients.average_buffers()

    def teardown(self) -> None:
        """The module is the user's again."""
        if isinstance(vars(self.lightning_module).get("configure_model"), partial):
            del self.lightning_module.configure_model
        super().teardown()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Micro-batches that are accumulated stay inside the node."""
        with self.gradients.accumulating() if self.gradients is not None else nullcontext():
            yield

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step; updates are exchanged after it, gradients were before it."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.gradients is not None:
            self.gradients.end_round()
        return output

    @property
    def _fitting(self) -> bool:
        return bool(self.lightning_module.trainer.state.fn == "fit")

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Of the shared weights. All ranks call it."""
        if self.gradients is not None and self._fitting:
            self.gradients.average_buffers()
        if self.updates is None or not self._fitting:
            return super().lightning_module_state_dict()
        with self.updates.shared_weights():
            return detached(super().lightning_module_state_dict())

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """What each device alone knows first, then the main file or folder. All ranks call it."""
        with self._saving(filepath, whole="optimizer_states" in checkpoint) as manifests:
            if manifests is not None:
                checkpoint[side_files.KEY] = manifests
            if self._save_distributed_checkpoint and not self._saves_optimizers:
                checkpoint.pop("optimizer_states", None)
            super().save_checkpoint(checkpoint, filepath, storage_options)
            dist.barrier()  # before files of earlier saves are removed

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The model and its optimizers; in a fit this device goes on where it was saved."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._load(checkpoint, self.broadcast(checkpoint_path))
        if self.updates is not None and self._fitting:
            self.updates.restart()
            self._restore(self.updates)
        elif self.gradients is not None and self._fitting:
            self._restore_gradients(self.gradients)
        self._saved = []
        return checkpoint


def _shard_children(module: nn.Module, mesh: DeviceMesh) -> None:
    """Not the module itself: ``training_step`` calls children, and gathers what it is to use by their forward."""
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    held = [{id(p) for p in child.parameters()} for child in children]
    alone = any(True for _ in module.parameters(recurse=False))
    if alone or sum(map(len, held)) > len(set().union(*held)):
        why = "parameters of its own" if alone else "children that share parameters"
        raise ValueError(
            f"{type(module).__name__} has {why}, and without configure_model() each child is sharded by itself: "
            f"shard the model there, with fully_shard(..., mesh=self.device_mesh['shard'])."
        )
    for child in children:
        shard(child, mesh)


def _check_send(send: str, config: UpdatesConfig) -> None:
    if send not in get_args(Send):
        raise ValueError(f"send={send!r} must be 'updates' or 'gradients': what travels between nodes.")
    plain = UpdatesConfig()
    given = [name for name in ("step_ahead", "delay", "sync_every") if getattr(config, name) != getattr(plain, name)]
    if send == "gradients" and config.density == "auto":
        raise ValueError(
            "density='auto' sends what hides behind the next step, and send='gradients' hides behind backward: give a "
            "number in (0, 1], or use send='updates'."
        )
    if send == "gradients" and given:
        raise ValueError(
            f"{given[0]}={getattr(config, given[0])!r} says how updates are exchanged, and send='gradients' sends "
            f"none: leave it out, or use send='updates'."
        )
