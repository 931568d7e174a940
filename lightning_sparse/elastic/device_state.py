"""The state that a device offers to its counterpart on a joining node.

========== ============================================================================= =======================
tensors    content                                                                       during the download
========== ============================================================================= =======================
weights    this device's slice of the global weights, fp32 [S]                           a copy, of one version
optimizer  the optimizer state that this device has, one tensor per parameter and        may change: it differs
           quantity, such as "exp_avg"                                                   between nodes anyway
module     frozen parameters, or this device's shards of them, and buffers               frozen: the tensors
                                                                                         themselves; buffers: copies
========== ============================================================================= =======================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_sparse.elastic.snapshots import Entry, Receiver, Snapshot
from lightning_sparse.sharding import local_of
from lightning_sparse.updates import optimizer_state
from lightning_sparse.updates.optimizer import LocalOptimizer

WEIGHTS, OPTIMIZER, MODULE = "weights", "optimizer", "module"
EXTRA_STATE = "_extra_state"  # end of torch's key for the result of get_extra_state(), a tensor of any size


def snapshot_of(one: LocalOptimizer, module: nn.Module, names: Mapping[int, str], head: dict[str, Any]) -> Snapshot:
    """Return a snapshot of this device. The module must hold the global weights.

    Args:
        names: names of the parameters by ``id()``.
        head: plain values for the joining device.
    """
    tensors = [(WEIGHTS, one.state.read_global().to("cpu", copy=True))]
    rest = {}
    for parameter, part in one.stepped():
        name = names[id(parameter)]
        flats, rest[name] = optimizer_state.split(one.optimizer, parameter, part)
        tensors += [(f"{OPTIMIZER}/{name}/{quantity}", flat) for quantity, flat in flats.items()]
    others, parameters = {}, {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, value in not_exchanged(one, module).items():
        if isinstance(value, Tensor) and not name.endswith(EXTRA_STATE):
            flat = local_of(value).detach().contiguous().view(-1)
            tensors.append((f"{MODULE}/{name}", flat if name in parameters else flat.to("cpu", copy=True)))
        else:
            others[name] = value
    groups = optimizer_state.options_of(one.optimizer)
    return Snapshot({**head, "optimizer": rest, "groups": groups, "module": others}, tensors)


def not_exchanged(one: LocalOptimizer, module: nn.Module) -> dict[str, Any]:
    """Return the entries of the module's state dict without the exchanged parameters."""
    exchanged = set(map(id, one.parameters))
    left_out = {name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in exchanged}
    return {name: value for name, value in module.state_dict().items() if name not in left_out}


class DeviceReceiver(Receiver):
    """Stores the snapshot of a device's counterpart.

    Args:
        joins: if True, receive all tensors; otherwise only the weights.

    Attributes:
        weights_S: this device's slice of the global weights, fp32 on the CPU.
    """

    weights_S: Tensor

    def __init__(self, one: LocalOptimizer, module: nn.Module, names: Mapping[int, str], *, joins: bool) -> None:
        self._one, self._module, self._joins = one, module, joins
        self._stepped = {names[id(parameter)]: (parameter, part) for parameter, part in one.stepped()}
        self._found: dict[str, dict[str, Any]] = {name: {} for name in self._stepped}
        self._others = not_exchanged(one, module)

    def begin(self, head: Any, layout: Sequence[Entry]) -> int:
        """Store the head, and return the number of tensors to receive."""
        missing = {"version", "run", "history", "optimizer", "groups", "module"} - set(head)
        numel = self._one.state.slices.numel
        if missing or len(head["version"]) != 2 or not layout or layout[0] != (WEIGHTS, "float32", numel):
            raise RuntimeError(
                f"a training node offers {layout[:1]}, but this device needs {numel:,} weights: the nodes differ in "
                f"their models, or in their versions of lightning_sparse. Use one model and one version on all nodes."
            )
        self.head = head
        return len(layout) if self._joins else 1

    def take(self, name: str, tensor: Tensor) -> None:
        """Store a tensor, flat and on the CPU."""
        kind, _, rest = name.partition("/")
        if kind == WEIGHTS:
            self.weights_S = tensor
        elif kind == OPTIMIZER:
            owner, _, quantity = rest.rpartition("/")
            parameter, part = self._stepped[owner]
            self._found[owner][quantity] = optimizer_state.as_stepped(tensor, parameter, part)
        else:
            own = local_of(self._others[rest])
            own.copy_(tensor.view(own.shape))

    def install(self) -> None:
        """Load everything except the weights."""
        for name, (parameter, _) in self._stepped.items():
            found = {**self.head["optimizer"].get(name, {}), **self._found[name]}
            self._one.optimizer.state.pop(parameter, None)
            if found:
                self._one.optimizer.state[parameter] = optimizer_state.placed(found, self._one.optimizer, parameter)
        optimizer_state.load_options([self._one.optimizer], [self.head["groups"]])
        self._module.load_state_dict({**self._others, **self.head["module"]}, strict=False)
