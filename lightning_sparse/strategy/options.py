"""What the strategies for Trainer and Fabric do alike with the options they are given."""

import inspect
from dataclasses import fields
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.gradients.config import HierConfig

OWN = tuple(field.name for field in fields(HierConfig) if field.name != "error_feedback")
"""The options that are not DDP's; without the one that only experiments use."""

_REFUSED = {
    **dict.fromkeys(
        ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"),
        "this strategy is a communication hook, and DDP takes one",
    ),
    "model_averaging_period": "averaging parameters now and then replaces the gradient exchange that this strategy is",
}


def check_options(cls: type, given: dict[str, Any]) -> None:
    """Look through the options that are passed on to Lightning's DDPStrategy and to DistributedDataParallel.

    Raises:
        ValueError: for an unknown option, or one that cannot be combined with this strategy.
    """
    for name in given.keys() & _REFUSED.keys():
        if given[name] is not None:
            raise ValueError(
                f"{name}={given[name]!r} cannot be combined with {cls.__name__}: {_REFUSED[name]}. Leave it out, or "
                f"use strategy='ddp' with it."
            )
    known = set(inspect.signature(DistributedDataParallel.__init__).parameters)
    for base in cls.__mro__:
        if "__init__" in vars(base):
            known |= set(inspect.signature(base.__init__).parameters)  # type: ignore[misc]
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ValueError(
            f"{cls.__name__} does not know the option(s) {', '.join(unknown)}: its own are {', '.join(OWN)}, and "
            f"those of DDPStrategy and DistributedDataParallel are passed on."
        )


def with_defaults(ddp_kwargs: dict[str, Any]) -> dict[str, Any]:
    """DistributedDataParallel's options with what this strategy adds: gradients that lie in the buckets, so that
    neither is copied."""
    return {"gradient_as_bucket_view": True, **ddp_kwargs}


def loss_scale_of(precision: Any) -> Tensor | None:
    """The scale of a precision plugin's loss scaler, a 0-dim tensor; None where there is none."""
    scaler = getattr(precision, "scaler", None)
    scale: Tensor | None = scaler._get_scale_async() if scaler is not None and scaler.is_enabled() else None
    return scale
