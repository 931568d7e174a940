"""Options of the exchange between nodes, validated on creation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch

from lightning_sparse import options
from lightning_sparse.exchange.paths import PATHS, ExchangeName, Path
from lightning_sparse.kernels.wire import TWO_BIT

ValueDtype = Literal["float32", "bfloat16", "2bit"]


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """Options of the exchange between nodes.

    Args:
        density: Fraction of elements that nodes exchange, above 0, at most 1. 0.01 is 1%. Use 0.03 to 0.1 for short
            runs.
        exchange: How nodes exchange entries: ``"sparse"``, ``"regional"``, ``"dense"``, ``"dense16"`` or ``"auto"``.
            ``"sparse"`` sends the K largest entries of each node to all others. ``"regional"`` finds approximately the
            K largest entries of all nodes together, so its traffic does not grow with the number of nodes. ``"dense"``
            sends everything. ``"dense16"`` sends everything as bfloat16 and sends the rounding error later. ``"auto"``
            measures both networks in the first step, and selects the fastest of sparse, dense and dense16 for each
            group of parameters (no dense16 if ``value_dtype`` is float32).
        value_dtype: Format of the values in a message: ``"float32"``, ``"bfloat16"`` or ``"2bit"``. ``"2bit"`` stores a
            sign and one of two levels per value. The rounding error is sent later.
        overlap: Run the exchange in the background. Set it to False to debug hangs.
        inter_gbps: Bandwidth of a node's link in Gbit/s, for ``exchange="auto"``. With it, "auto" compares the number
            of bytes instead of measuring, so all runs make the same choice.
    """

    density: float = 0.01
    exchange: ExchangeName = "auto"
    value_dtype: ValueDtype = "bfloat16"
    overlap: bool = True
    inter_gbps: float | None = None

    def __post_init__(self) -> None:
        options.number(
            self, "density", above=0, high=1, hint="Use 0.01 for 1%; to send everything, use exchange='dense'"
        )
        options.one_of(self, "exchange", get_args(ExchangeName), hint="Use 'sparse' for top-k")
        hint = "use 'bfloat16', which has as many bytes" if str(self.value_dtype) == "float16" else ""
        options.one_of(self, "value_dtype", get_args(ValueDtype), hint=hint)
        options.number(self, "inter_gbps", above=0, optional=True, hint="it is a rate in Gbit/s; None measures it")
        options.flag(self, "overlap", hint="Use True, or False to debug hangs")
        if self.inter_gbps is not None and self.exchange != "auto":
            raise ValueError(
                f"inter_gbps={self.inter_gbps!r} applies only to exchange='auto', but exchange={self.exchange!r}. Omit "
                f"inter_gbps."
            )

    @property
    def path(self) -> type[Path] | None:
        """The requested path; None for ``"auto"``."""
        return next((kind for kind in PATHS if kind.name == self.exchange), None)

    @property
    def leaves_entries_out(self) -> bool:
        """Whether the requested path sends only some entries."""
        return self.path is not None and self.path.residual_kind == "entries"

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = TWO_BIT if self.value_dtype == "2bit" else getattr(torch, self.value_dtype)
        return dtype

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return the options in which another configuration differs: name -> (other, this)."""
        return {
            field.name: (other[field.name], getattr(self, field.name))
            for field in fields(self)
            if field.name in other and other[field.name] != getattr(self, field.name)
        }
