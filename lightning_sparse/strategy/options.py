"""Options of the strategies.

A strategy's own options are the fields of a config, and its constructor finds them among its ``**kwargs``. So only the
config names, documents and checks each option.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.elastic.updates import ElasticConfig
from lightning_sparse.exchange import ExchangeConfig
from lightning_sparse.exchange.config import ValueDtype
from lightning_sparse.gradients.config import GradientsConfig, HierConfig
from lightning_sparse.internals import scale_of
from lightning_sparse.options import Init, class_with_options, refuse_unknown, with_options_of
from lightning_sparse.topology import Topology
from lightning_sparse.updates import UpdatesConfig

Send = Literal["updates", "gradients"]
"""Values that nodes exchange under FSDP2."""


@dataclass(frozen=True, kw_only=True)
class ShardsConfig(UpdatesConfig, GradientsConfig):
    """Options of the FSDP2 strategies, in addition to `UpdatesConfig` and `GradientsConfig`.

    Args:
        value_dtype: Format of the values in a message: ``"float32"``, ``"bfloat16"`` or ``"2bit"``.
            Default: ``"2bit"`` for updates and ``"bfloat16"`` for gradients.
        send: Exchanged values: ``"updates"`` or ``"gradients"``.
    """

    value_dtype: ValueDtype | None = None  # type: ignore[assignment]
    send: Send = "updates"

    def __post_init__(self) -> None:
        if self.send not in get_args(Send):
            raise ValueError(f"send={self.send!r} must be 'updates' or 'gradients', the values that nodes exchange.")
        if self.value_dtype is None:
            object.__setattr__(
                self, "value_dtype", (UpdatesConfig if self.send == "updates" else HierConfig).value_dtype
            )
        super().__post_init__()
        of_updates = ("step_ahead", "delay", "sync_every", "outer_lr")
        others = ("warmup_epochs", "warmup_steps") if self.send == "updates" else of_updates
        for name in (option for option in others if getattr(self, option) != getattr(ShardsConfig, option)):
            what, other = ("gradients", "updates") if self.send == "updates" else ("updates", "gradients")
            raise ValueError(
                f"{name}={getattr(self, name)!r} applies to {what}, but send={other!r}. Omit {name}, or use "
                f"send={what!r}."
            )


DDP_BUCKET_MB = 25
"""DistributedDataParallel's own bucket size."""
BUCKETS = 8
"""Number of buckets in a backward pass. With fewer buckets, little of the exchange overlaps with the pass."""


class Kind(NamedTuple):
    """The options of one strategy.

    Args:
        config: dataclass whose fields are options of the strategy.
        hidden: fields that a user cannot set.
        unsupported: options that the strategy refuses: "reason. Fix".
        wrapper: class to which Lightning's strategy passes options.
    """

    config: type[ExchangeConfig]
    hidden: tuple[str, ...] = ()
    unsupported: Mapping[str, str] = {}
    wrapper: type = DistributedDataParallel

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self.config) if field.name not in self.hidden)


_OR_DDP = "Omit it, or use strategy='ddp'"
_FOR_GRADIENTS = "it applies only to gradients. Omit it, or use MSTopKHierStrategy"
HIER = Kind(
    HierConfig,
    unsupported={
        **dict.fromkeys(
            ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"),
            f"this strategy is a communication hook, and DDP accepts only one. {_OR_DDP}",
        ),
        "model_averaging_period": f"periodic averaging would replace the exchange of gradients. {_OR_DDP}",
    },
)
_UNSUPPORTED_WITH_UPDATES = {
    "model_averaging_period": f"periodic averaging would replace the exchange of updates. {_OR_DDP}",
    "process_group": "in this strategy, DDP averages inside each node. Omit it. To define nodes, use node_name",
    "inter_gbps": _FOR_GRADIENTS,
}
LOCAL = Kind(UpdatesConfig, ("inter_gbps",), _UNSUPPORTED_WITH_UPDATES)
ELASTIC = Kind(
    ElasticConfig,
    ("inter_gbps", "exchange", "overlap"),
    {
        **_UNSUPPORTED_WITH_UPDATES,
        "exchange": "elastic nodes always use exchange='sparse'. Omit it",
        "save_distributed_checkpoint": "only the first node writes checkpoints, because nodes join and leave. Omit it",
    },
)
FSDP = Kind(
    ShardsConfig,
    ("inter_gbps", "shard_optimizer", "send"),
    {
        **dict.fromkeys(
            ("data_parallel_size", "tensor_parallel_size"),
            "the mesh has one row per node. Omit it. To define nodes, use node_name",
        ),
        "shard_optimizer": "FSDP2 always shards the optimizer's state with the parameters. Omit it",
        "inter_gbps": _FOR_GRADIENTS,
    },
    wrapper=object,
)
ELASTIC_FSDP = Kind(
    ElasticConfig,
    (*ELASTIC.hidden, "shard_optimizer"),
    {**FSDP.unsupported, "exchange": ELASTIC.unsupported["exchange"]},
    wrapper=object,
)


def take_options(kind: Kind, cls: type, given: dict[str, Any], **more: Any) -> ExchangeConfig:
    """Remove the strategy's own options from ``given``, and return their config. Check the other options."""
    config = kind.config(**{name: given.pop(name) for name in kind.options if name in given}, **more)
    check_supported(kind, cls, given)
    valid_names = _parameter_names(kind.wrapper)[0]
    ancestors = cls.__mro__[cls.__mro__.index(class_with_options(cls)) :]
    for base in (ancestor for ancestor in ancestors if "__init__" in vars(ancestor)):
        names, passes_on = _parameter_names(base)
        valid_names |= names
        if not passes_on:
            break  # it passes no options on
    valid_names -= {"self", "module"}
    own = (*kind.options, *more)
    others = "its base class in Lightning" if kind.wrapper is object else "DistributedDataParallel"
    refuse_unknown(
        cls, given, {*own, *valid_names}, f" Its own options are {', '.join(own)}; options of {others} are passed on."
    )
    return config


def check_supported(kind: Kind, cls: type, given: Mapping[str, Any]) -> None:
    for name in given.keys() & kind.unsupported.keys():
        if given[name] is not None:
            raise ValueError(
                f"{name}={given[name]!r} cannot be combined with {cls.__name__}: {kind.unsupported[name]}."
            )


def _parameter_names(cls: type) -> tuple[set[str], bool]:
    parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name for p in parameters if p.kind not in variable}, any(p.kind == p.VAR_KEYWORD for p in parameters)


def with_strategy_options(kind: Kind) -> Callable[[Init], Init]:
    return with_options_of(kind.config, without=kind.hidden, takes_others=True)


def bucket_cap_mb(nbytes: int, topology: Topology, device: torch.device) -> int | None:
    """Return the default size of buckets in MB; None for DDP's own."""
    # On a GPU, a bucket costs about 30 kernels at any size, and selection works on its L-th part: with 25 MB on 8
    # devices, this is too little for a GPU. On a CPU, larger buckets gained nothing.
    if topology.kind != "hierarchical" or device.type != "cuda":
        return None
    return max(DDP_BUCKET_MB, min(DDP_BUCKET_MB * topology.num_devices, (nbytes >> 20) // BUCKETS))


def loss_scale_of(precision: Any) -> Tensor | None:
    """Return the scale of a precision plugin's loss scaler, a 0-dim tensor; None without a scaler."""
    scaler = getattr(precision, "scaler", None)
    return scale_of(scaler) if scaler is not None and scaler.is_enabled() else None
