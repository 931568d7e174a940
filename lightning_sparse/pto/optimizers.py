"""What is known of optimizers: which cannot be shared, which were tested, whose step can be cut, what a step costs."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.NAdam,
)
"""Each element is stepped by itself; these very classes, for a subclass may do anything."""

_TESTED = {f"{cls.__module__}.{cls.__qualname__}" for cls in (*ELEMENTWISE, torch.optim.Muon)}
_TESTED |= {"timm.optim.lars.Lars", "timm.optim.lamb.Lamb"}

_REFUSED = {
    "LBFGS": "it evaluates the closure several times within a step and mixes all parameters",
    "ZeroRedundancyOptimizer": "it shares out the step already",
    "PostLocalSGDOptimizer": "ranks hold different parameters between its averagings",
}


def is_tested(optimizer: Optimizer) -> bool:
    """Whether this very class, stepped in parts and as a whole, gave the same bits in every variant."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" in _TESTED


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether a part of a parameter can be stepped alone."""
    return type(optimizer) in ELEMENTWISE


def step_cost(optimizer: Optimizer, parameter: Tensor) -> int:
    """What the parameter's share of a step costs: its elements, or the multiplications of Muon's Newton-Schulz steps.

    Those are, for a matrix of m rows and n >= m columns, two products of m x m x n and one of m x m x m each time.
    """
    if isinstance(optimizer, torch.optim.Muon) and parameter.dim() == 2:
        m, n = sorted(parameter.shape)
        return m * m * (2 * n + m)
    return parameter.numel()


def refuse(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer that is known not to treat parameters independently."""
    for cls in type(optimizer).__mro__:
        if cls.__name__ in _REFUSED:
            raise ValueError(
                f"PTOCallback cannot share the step of {type(optimizer).__name__}: {_REFUSED[cls.__name__]}. Use an "
                f"optimizer that steps each parameter by itself, or leave the callback out."
            )
    limits = {group["max_grad_norm"] for group in optimizer.param_groups if group.get("max_grad_norm")}
    if limits:
        raise ValueError(
            f"{type(optimizer).__name__}(max_grad_norm={limits.pop()}) clips by the norm of all gradients, of which "
            f"each rank sees its share only. Set max_grad_norm=None and clip with Trainer(gradient_clip_val=...)."
        )
    if isinstance(getattr(optimizer, "consolidate_state_dict", None), Callable):  # type: ignore[arg-type]
        raise ValueError(
            f"the step of {type(optimizer).__name__} is shared already: use one PTOCallback, and create optimizers in "
            f"configure_optimizers()."
        )
