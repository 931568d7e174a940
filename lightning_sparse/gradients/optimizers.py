"""Which optimizers tolerate sparse gradients, whose entries arrive rarely and as sums.

Error feedback sends an entry of the gradient once in many rounds, as the sum of what these rounds would have sent. SGD
is linear, so the sum moves the parameter as far as its terms would have. Adam and similar optimizers divide by the
size of recent gradients: a sum of 100 steps moves the parameter by about 10 steps' worth instead of 100, and a run ends
worse than one node alone, without any communication (benchmarks/results/convergence-text-*.md; Aji et al., EMNLP 2019).

LARS scales a layer as a whole, so the entries of a layer keep their proportions; the paper trains with it.
"""

from collections.abc import Iterable
from typing import Literal

from torch.optim import Optimizer

Response = Literal["linear", "adaptive", "unknown"]

_LINEAR = {"sgd", "lars", "asgd", "sgdw", "sgdp"}
_ADAPTIVE = (
    "ada",  # Adam, AdamW, NAdam, RAdam, Adagrad, Adadelta, Adafactor, AdaBelief, AdEMAMix, ...
    "rmsprop", "lamb", "shampoo", "soap", "lion", "muon", "rprop", "sophia", "novograd", "adopt", "kron", "mars",
    "yogi", "laprop", "madgrad", "came", "grams", "prodigy",
)  # fmt: skip
_INNER = ("base_optimizer", "_base_optimizer", "optimizer", "inner_optimizer", "_optimizer", "optim")


def response_of(optimizer: Optimizer) -> Response:
    """How an optimizer, or the one inside it, responds to the size of a gradient."""
    names = [cls.__name__.lower() for cls in type(optimizer).__mro__ if cls not in (Optimizer, object)]
    if any(word in name for name in names for word in _ADAPTIVE):
        return "adaptive"
    if _LINEAR.intersection(names):
        return "linear"
    inner = [getattr(optimizer, name, None) for name in _INNER]
    return next((response_of(each) for each in inner if isinstance(each, Optimizer)), "unknown")


def objection(optimizers: Iterable[Optimizer]) -> str:
    """Why entries of gradients should not be left out for these optimizers; empty where nothing is known against it."""
    found = {type(each).__name__: response_of(each) for each in optimizers}
    adaptive = [name for name, response in found.items() if response == "adaptive"]
    unknown = [name for name, response in found.items() if response == "unknown"]
    if adaptive:
        return f"{', '.join(adaptive)} divides by the size of recent gradients, so rare sums move parameters too little"
    if unknown:
        return f"how {', '.join(unknown)} responds to gradients that arrive as rare sums is not known"
    return ""


def warning_of(exchange: str, objected: str, way_out: str) -> str:
    """Return the warning for a user who sends only some entries."""
    return f"exchange={exchange!r}: {objected}. Compare the loss with the single-node baseline, or use {way_out}"
