"""What is known of optimizers: which cannot be shared, which are tested, which are elementwise, and a step's cost."""

from collections.abc import Callable

from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop

ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, RMSprop, NAdam)
"""They step each element independently. Exact classes: a subclass may not."""

_TESTED = {f"{cls.__module__}.{cls.__qualname__}" for cls in (*ELEMENTWISE, Muon)}
_TESTED |= {"timm.optim.lars.Lars", "timm.optim.lamb.Lamb"}

_REFUSED = {
    "LBFGS": "it evaluates the closure several times per step and mixes all parameters",
    "ZeroRedundancyOptimizer": "it already shares the step",
    "PostLocalSGDOptimizer": "ranks hold different parameters between its averages",
}


def is_tested(optimizer: Optimizer) -> bool:
    """Whether tests show that the shared step of exactly this class is bit-identical in every variant."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" in _TESTED


def step_cost(optimizer: Optimizer, parameter: Tensor) -> int:
    """Return the cost of a parameter's step: its elements, or the multiplications of a Newton-Schulz step of Muon.

    For a matrix of m rows and n >= m columns, these are two products of m x m x n and one of m x m x m.
    """
    if isinstance(optimizer, Muon) and parameter.dim() == 2:
        m, n = sorted(parameter.shape)
        return m * m * (2 * n + m)
    return parameter.numel()


def refuse(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer that does not treat parameters independently."""
    for cls in type(optimizer).__mro__:
        if cls.__name__ in _REFUSED:
            raise ValueError(
                f"PTOCallback cannot share the step of {type(optimizer).__name__}: {_REFUSED[cls.__name__]}. Use an "
                f"optimizer that steps each parameter independently, or remove the callback."
            )
    limits = {group["max_grad_norm"] for group in optimizer.param_groups if group.get("max_grad_norm")}
    if limits:
        raise ValueError(
            f"{type(optimizer).__name__}(max_grad_norm={limits.pop()}) clips by the norm of all gradients, but "
            f"each rank sees only its share. Set max_grad_norm=None and clip with Trainer(gradient_clip_val=...)."
        )
    if isinstance(getattr(optimizer, "consolidate_state_dict", None), Callable):  # type: ignore[arg-type]
        raise ValueError(
            f"the step of {type(optimizer).__name__} is already shared: use one PTOCallback, and create optimizers in "
            f"configure_optimizers()."
        )
