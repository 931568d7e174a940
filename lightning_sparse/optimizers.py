"""Properties of optimizers: whether they tolerate sparse gradients, and whether their step can be sharded."""

from collections.abc import Callable, Iterable
from typing import Literal

from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop

Scaling = Literal["linear", "adaptive", "unknown"]

_LINEAR = {"sgd", "lars", "asgd", "sgdw", "sgdp"}
_ADAPTIVE = (
    "ada",  # Adam, AdamW, NAdam, RAdam, Adagrad, Adadelta, Adafactor, AdaBelief, AdEMAMix, ...
    "rmsprop", "lamb", "shampoo", "soap", "lion", "muon", "rprop", "sophia", "novograd", "adopt", "kron", "mars",
    "yogi", "laprop", "madgrad", "came", "grams", "prodigy",
)  # fmt: skip
_INNER = ("base_optimizer", "_base_optimizer", "optimizer", "inner_optimizer", "_optimizer", "optim")


def gradient_scaling_of(optimizer: Optimizer) -> Scaling:
    """Return how an optimizer, or the optimizer inside it, responds to the size of a gradient."""
    # Error feedback sends an entry of the gradient once in many rounds, as the sum of its values. SGD is linear, so the
    # sum moves the parameter as far as its terms would. Adam and similar optimizers divide by the size of recent
    # gradients, so a sum of 100 steps moves the parameter by about 10 steps instead of 100 (Aji et al., EMNLP 2019).
    # LARS scales a layer as a whole, so the entries of a layer keep their proportions.
    names = [cls.__name__.lower() for cls in type(optimizer).__mro__ if cls not in (Optimizer, object)]
    if any(word in name for name in names for word in _ADAPTIVE):
        return "adaptive"
    if _LINEAR.intersection(names):
        return "linear"
    inner = [getattr(optimizer, name, None) for name in _INNER]
    return next((gradient_scaling_of(candidate) for candidate in inner if isinstance(candidate, Optimizer)), "unknown")


def sparse_gradient_objection(optimizers: Iterable[Optimizer]) -> str:
    """Return the reason to send all entries with these optimizers; empty if none is known."""
    scalings = {type(optimizer).__name__: gradient_scaling_of(optimizer) for optimizer in optimizers}
    adaptive = [name for name, response in scalings.items() if response == "adaptive"]
    unknown = [name for name, response in scalings.items() if response == "unknown"]
    if adaptive:
        return f"{', '.join(adaptive)} divides by the size of recent gradients, so rare sums move parameters too little"
    if unknown:
        return f"how {', '.join(unknown)} responds to gradients that arrive as rare sums is not known"
    return ""


def sparse_gradient_warning(exchange: str, objected: str, alternative: str) -> str:
    return f"exchange={exchange!r}: {objected}. Compare the loss with the single-node baseline, or use {alternative}"


# -- whose step can be sharded -----------------------------------------------------------------------------------------
#
# Tables of optimizers: refused, tested, elementwise; and the cost of a step.

ELEMENTWISE = (SGD, Adam, AdamW, Adagrad, RMSprop, NAdam)
"""They step each element independently. Exact classes: a subclass may not."""

_TESTED = {f"{cls.__module__}.{cls.__qualname__}" for cls in (*ELEMENTWISE, Muon)}
_TESTED |= {"timm.optim.lars.Lars", "timm.optim.lamb.Lamb"}

_REFUSED = {
    "LBFGS": "it evaluates the closure several times per step and mixes all parameters",
    "ZeroRedundancyOptimizer": "it already shards the step",
    "PostLocalSGDOptimizer": "ranks have different parameters between its averages",
}


def is_tested(optimizer: Optimizer) -> bool:
    """Return whether tests show that the sharded step of exactly this class is bit-identical in every variant."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" in _TESTED


def step_cost(optimizer: Optimizer, parameter: Tensor) -> int:
    """Return the cost of a parameter's step: its elements, or the multiplications of Muon's Newton-Schulz step."""
    if isinstance(optimizer, Muon) and parameter.dim() == 2:
        m, n = sorted(parameter.shape)
        # Two products of m x m x n and one of m x m x m, for m rows and n >= m columns.
        return m * m * (2 * n + m)
    return parameter.numel()


def refuse(optimizer: Optimizer) -> None:
    for cls in type(optimizer).__mro__:
        if cls.__name__ in _REFUSED:
            raise ValueError(
                f"PTOCallback cannot shard the step of {type(optimizer).__name__}: {_REFUSED[cls.__name__]}. Use an "
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
            f"the step of {type(optimizer).__name__} is already sharded. Use one PTOCallback, and create optimizers in "
            f"configure_optimizers()."
        )
