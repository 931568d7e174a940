"""What is known of a module's parameters, without keeping the module or them alive."""

import weakref
from collections.abc import Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.strategy.layout import flat_numel, parameter_names


class Parameters:
    """The parameters that a module had when this was made.

    Attributes:
        names: by ``id()`` of the parameter; a shared one has its first name.
        dtypes: by name.
        numels: elements of the gradient in a bucket, by name.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names = parameter_names(module)
        self.dtypes = {name: p.dtype for name, p in module.named_parameters()}
        self.numels = {name: flat_numel(p) for name, p in module.named_parameters()}
        self._module = weakref.ref(module)
        self._references = {name: weakref.ref(p) for name, p in module.named_parameters()}

    def __getitem__(self, name: str) -> Tensor:
        parameter = self._references[name]()
        assert parameter is not None, f"{name} is gone"
        return parameter

    def name_of(self, parameter: Tensor) -> str:
        """Empty for a parameter that is not one of them, were it to live where one of them lived."""
        name = self.names.get(id(parameter), "")
        return name if name and self._references[name]() is parameter else ""

    @property
    def module(self) -> nn.Module | None:
        """None when it is gone."""
        return self._module()

    def are_of(self, module: nn.Module) -> bool:
        """Whether this is that very module, whatever parameters it has by now."""
        return self.module is module

    def are_in(self, module: nn.Module) -> bool:
        """Whether the module has these very parameters and no others."""
        now = dict(module.named_parameters())
        return now.keys() == self._references.keys() and all(self._references[n]() is p for n, p in now.items())

    def are_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer steps any of them."""
        return any(map(self.name_of, stepped_by(optimizer)))


def stepped_by(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters that an optimizer has now: groups are added while training."""
    return (p for group in optimizer.param_groups for p in group["params"])
