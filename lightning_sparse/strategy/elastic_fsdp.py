"""``mstopk_elastic_fsdp``: elastic nodes whose devices shard the model with FSDP2."""

from __future__ import annotations

from typing import Any

from lightning_sparse.elastic.updates import ElasticUpdates
from lightning_sparse.fsdp import shard
from lightning_sparse.strategy.elastic import ElasticFabricAdapter, ElasticTrainerAdapter
from lightning_sparse.strategy.fsdp import Parallelize, ShardsFabricAdapter, ShardsTrainerAdapter
from lightning_sparse.strategy.options import ELASTIC_FSDP, with_strategy_options
from lightning_sparse.strategy.trainer import call_around


class MSTopKElasticFSDPMixin(ElasticTrainerAdapter, ShardsTrainerAdapter):
    """FSDP2 inside each node, and exchange of updates between nodes that join and leave.

    Each node has its own Trainer (``num_nodes=1``), and torchft's lighthouse lists the nodes. It shards the model like
    ``mstopk_fsdp``. Each device of a joining node downloads its shards and their optimizer state from one device of
    another node.

    Args:
        node_name: Name of this process's node. Default: the host.
        save_distributed_checkpoint: Save a checkpoint as a folder to which each device of the node writes its part,
            instead of one file.
        process_group_backend: Backend of the process groups inside the node. Default: NCCL on GPUs, else Gloo.
        **kwargs: options of `ElasticConfig` (``lighthouse``, ``min_nodes``, ``timeout``, ``density``, ...).

    Raises:
        ValueError: for a bad value, an unknown option, or an option that this strategy does not support.
    """

    send = "updates"

    @with_strategy_options(ELASTIC_FSDP)
    def __init__(
        self,
        *,
        node_name: str | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._init_common(ELASTIC_FSDP, node_name, kwargs, ElasticUpdates.kind)
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint, process_group_backend=process_group_backend
        )

    def _start(self, trainer: Any) -> None:
        # Lightning loads a sharded checkpoint after `setup`. The node must join with the loaded weights.
        join = super()._start

        def start(_: Any) -> None:
            join(trainer)
            self._after_join(trainer)

        restored = call_around(trainer._checkpoint_connector, "_restore_modules_and_callbacks", after=start)
        self._wrapped_methods = [*self._wrapped_methods, restored]


class MSTopKElasticFSDPFabricMixin(ElasticFabricAdapter, ShardsFabricAdapter):
    """``mstopk_elastic_fsdp`` for Fabric. It takes the options of ``MSTopKElasticFSDPStrategy`` for a Trainer.

    A node joins when its optimizers are set up. Load a checkpoint between ``fabric.setup_module`` and
    ``fabric.setup_optimizers``.

    Args:
        parallelize_fn: Shards a module, given the module and the mesh with the axes "replicate" and "shard". Default:
            shard the repeated blocks, then the rest, in bf16 with the precision "bf16-mixed".
    """

    send = "updates"

    @with_strategy_options(ELASTIC_FSDP)
    def __init__(self, *, parallelize_fn: Parallelize = shard, node_name: str | None = None, **kwargs: Any) -> None:
        self._init_common(ELASTIC_FSDP, node_name, kwargs, ElasticUpdates.kind)
        super().__init__(parallelize_fn=self._shard if parallelize_fn is shard else parallelize_fn, **kwargs)
        self._modules = []
