"""Every choice a user makes about the reduction, checked when it is made."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch

Exchange = Literal["auto", "sparse", "regional", "dense", "dense16"]
ValueDtype = Literal["float32", "bfloat16", "float16"]
Density = float | Literal["auto"]
Exclude = Literal["none", "vectors"] | tuple[str, ...]

LEAST_DENSITY = 0.01  # below it accuracy was seen to suffer (benchmarks/results/convergence-*.md)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class HierConfig:
    """Options of the hierarchical top-k reduction.

    Args:
        density: K / S, the share of each shard that is sent between nodes, in (0, 1]. ``"auto"``: at least 0.01, and
            more where it costs nothing: the largest density whose exchange hides behind backward, by the measured
            networks and the measured backward; set a few times in a run (lightning_sparse.strategy.window).
        exchange: what travels between nodes. ``"sparse"``: each node's K largest entries, to all others;
            ``"regional"``: the K largest of all nodes together, nearly (for many nodes: its volume does not grow with
            their number, but it applies K entries where ``"sparse"`` applies up to M K); ``"dense"``: everything;
            ``"dense16"``: everything, as bfloat16 between nodes, whose rounding error stays in the residual;
            ``"auto"``: for each group of parameters whichever is predicted to be faster, from a short measurement of
            both networks in the first round: sparse, dense or (unless ``value_dtype`` is float32) dense16; of two that
            are close, the one that leaves less out.
        value_dtype: how the values of a message are written. The rounding error of a 16-bit value stays in the
            residual, so it is sent later rather than lost.
        warmup_epochs: epochs over which the density falls exponentially to ``density`` (DGC, Lin et al. 2018,
            section 3.3). 0 turns it off.
        dense_rounds: this many rounds at the start send everything.
        overlap: reduce buckets while backward goes on, where the backend needs help for that (Gloo).
        inter_gbps: rate of a node's link in Gbit/s. ``"auto"`` then decides by the time of the bytes on it, and
            measures nothing: two runs never differ in what they choose.
        momentum_correction: for torch.optim.SGD with momentum: the hook keeps it with the residuals, and stops it
            where an entry was sent (lightning_sparse.strategy.momentum).
        exclude: parameters that are always reduced densely, for their entries are few and matter much. ``"vectors"``:
            those of at most one dimension, which are biases and norms; or patterns of names, such as
            ``("*.bias", "head.*")``, in which ``*`` stands for anything.
        error_feedback: keep what was not sent and add it to the next gradient. Only experiments turn it off.

    Raises:
        ValueError: naming the value, the rule and the way out.
    """

    density: Density = 0.01
    exchange: Exchange = "auto"
    value_dtype: ValueDtype = "bfloat16"
    warmup_epochs: int = 4
    dense_rounds: int = 0
    overlap: bool = True
    inter_gbps: float | None = None
    momentum_correction: bool = False
    exclude: Exclude = "none"
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if self.density != "auto" and not (_is_number(self.density) and 0 < self.density <= 1):
            raise ValueError(
                f"density={self.density!r} must be a number in (0, 1], or 'auto': it is the share of entries that is "
                f"sent, 0.01 for one in a hundred. For plain dense communication use exchange='dense'."
            )
        _one_of("exchange", self.exchange, get_args(Exchange))
        _one_of("value_dtype", self.value_dtype, get_args(ValueDtype))
        for name in ("warmup_epochs", "dense_rounds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}={value!r} must be a whole number, 0 or more; 0 turns it off.")
        if self.inter_gbps is not None and not (_is_number(self.inter_gbps) and 0 < self.inter_gbps < float("inf")):
            raise ValueError(f"inter_gbps={self.inter_gbps!r} must be a rate in Gbit/s; None has it measured.")
        _check_exclude(self.exclude)
        for name in ("overlap", "momentum_correction", "error_feedback"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False.")
        if self.momentum_correction and not self.error_feedback:
            raise ValueError("momentum_correction=True needs error_feedback: velocities add up in the residual.")
        if self.density == "auto" and not self.overlap:
            raise ValueError(
                "density='auto' sends what hides behind backward, and with overlap=False nothing does: "
                "give a number, or leave overlap on."
            )

    @property
    def least_density(self) -> float:
        """The number given, or where ``"auto"`` begins."""
        return LEAST_DENSITY if self.density == "auto" else self.density

    @property
    def measures(self) -> bool:
        """Whether something is decided by the rates of the networks."""
        return self.exchange == "auto" or (self.density == "auto" and self.exchange in ("sparse", "regional"))

    @property
    def dtype(self) -> torch.dtype:
        """``value_dtype`` as torch knows it."""
        return _DTYPES[self.value_dtype]

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, for a checkpoint."""
        return asdict(self)

    def differences(self, other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """The options in which a saved configuration differs: name -> (saved, now)."""
        return {
            field.name: (other[field.name], getattr(self, field.name))
            for field in fields(self)
            if field.name in other and other[field.name] != getattr(self, field.name)
        }


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known: choose one of {', '.join(map(repr, allowed))}.")


def _check_exclude(value: object) -> None:
    if value in ("none", "vectors"):
        return
    if not isinstance(value, tuple) or not value or not all(isinstance(each, str) and each for each in value):
        raise ValueError(
            f"exclude={value!r} must be 'none', 'vectors' (parameters of at most one dimension), or a tuple of "
            f"patterns of parameter names such as ('*.bias', 'head.*')."
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
