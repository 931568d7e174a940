"""The state that a device offers to its counterpart on a joining node.

========== ============================================================================= =======================
tensors    content                                                                       during the download
========== ============================================================================= =======================
weights    this device's slice of the global weights, fp32 [S], one tensor per optimizer a copy, of one version
optimizer  this device's optimizer state: one tensor per parameter and quantity          may change
module     frozen parameters, or this device's shards of them                            not copied
module     buffers                                                                       a copy
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


def snapshot_of(
    optimizers: Sequence[LocalOptimizer], module: nn.Module, names: Mapping[int, str], head: dict[str, Any]
) -> Snapshot:
    """Return a snapshot of this device. The module must hold the global weights.

    Args:
        head: plain values for the joining device.
    """
    weights = [
        local_optimizer.state.read_global().to("cpu", copy=True) for local_optimizer in with_elements(optimizers)
    ]
    # The weights come first: a node that has only missed rounds downloads this prefix.
    tensors = [(WEIGHTS, tensor) for tensor in weights]
    other_values = {}
    for local_optimizer in optimizers:
        for parameter, part in local_optimizer.stepped():
            name = names[id(parameter)]
            flats, other_values[name] = optimizer_state.split(local_optimizer.optimizer, parameter, part)
            # Not a copy: optimizer states differ between nodes anyway, so a step during the download does no harm.
            tensors += [(f"{OPTIMIZER}/{name}/{quantity}", flat) for quantity, flat in flats.items()]
    others, parameters = {}, {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, value in not_exchanged(optimizers, module).items():
        if isinstance(value, Tensor) and not name.endswith(EXTRA_STATE):
            flat = local_of(value).detach().contiguous().view(-1)
            # Frozen parameters do not change, so they are not copied. Buffers change in each forward pass.
            tensors.append((f"{MODULE}/{name}", flat if name in parameters else flat.to("cpu", copy=True)))
        else:
            others[name] = value
    head = {**head, "trained": trained_of(optimizers, names), "places": places_of(optimizers, names)}
    groups = [optimizer_state.options_of(local_optimizer.optimizer) for local_optimizer in optimizers]
    return Snapshot({**head, "optimizer": other_values, "groups": groups, "module": others}, tensors)


def trained_of(optimizers: Sequence[LocalOptimizer], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return for each optimizer the names in each of its groups, and the names of the exchanged parameters."""
    return [
        {
            "groups": [[names[id(p)] for p in group["params"]] for group in local_optimizer.optimizer.param_groups],
            "exchanged": [names[id(p)] for p in local_optimizer.parameters],
        }
        for local_optimizer in optimizers
    ]


def places_of(optimizers: Sequence[LocalOptimizer], names: Mapping[int, str]) -> list[list[Any]]:
    return [[list(place) for place in local_optimizer.state.slices.named(names)] for local_optimizer in optimizers]


class OtherParameters(RuntimeError):
    """The peer exchanges other parameters: they were added or unfrozen during the run.

    Attributes:
        trained: the peer's `trained_of`.
    """

    def __init__(self, mine: list[dict[str, Any]], trained: list[dict[str, Any]]) -> None:
        own_names, other_names = ({name for entry in of for name in entry["exchanged"]} for of in (mine, trained))
        super().__init__(
            f"this node trains {len(own_names - other_names)} parameters that the other nodes do not train, and lacks "
            f"{len(other_names - own_names)} of theirs. Parameters were added, unfrozen or removed during the run. "
            f"Start this node again, with the same frozen parameters and optimizers as the other nodes."
        )
        self.trained = trained


def with_elements(optimizers: Sequence[LocalOptimizer]) -> list[LocalOptimizer]:
    return [local_optimizer for local_optimizer in optimizers if local_optimizer.state.slices.numel]


def not_exchanged(optimizers: Sequence[LocalOptimizer], module: nn.Module) -> dict[str, Any]:
    """Return the entries of the module's state dict without the exchanged parameters."""
    exchanged = {id(parameter) for local_optimizer in optimizers for parameter in local_optimizer.parameters}
    left_out = {name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in exchanged}
    return {name: value for name, value in module.state_dict().items() if name not in left_out}


class DeviceReceiver(Receiver):
    """Stores the snapshot of a device's counterpart.

    Args:
        joins: if True, receive all tensors; otherwise only the weights.
    """

    def __init__(
        self, optimizers: Sequence[LocalOptimizer], module: nn.Module, names: Mapping[int, str], *, joins: bool
    ) -> None:
        self._optimizers, self._module, self._names, self._joins = optimizers, module, names, joins
        self._stepped = {
            names[id(p)]: (local_optimizer.optimizer, p, part)
            for local_optimizer in optimizers
            for p, part in local_optimizer.stepped()
        }
        self._found: dict[str, dict[str, Any]] = {name: {} for name in self._stepped}
        self._others = not_exchanged(optimizers, module)
        self.weights: list[Tensor] = []  # this device's slice of the global weights per optimizer, fp32, CPU

    def begin(self, head: Any, layout: Sequence[Entry]) -> int:
        missing = {"version", "run", "history", "trained", "places", "optimizer", "groups", "module"} - set(head)
        mine = trained_of(self._optimizers, self._names)
        if not missing and head["trained"] != mine:
            raise OtherParameters(mine, head["trained"])
        # Indices in messages refer to the slice, so counterparts must own the same pieces.
        if not missing and head["places"] != places_of(self._optimizers, self._names):
            raise RuntimeError(
                "the devices of a training node divide the parameters differently, because some parameters were added "
                "or unfrozen later. Use nodes of one device, or strategy='mstopk_elastic_fsdp'."
            )
        weights = [
            (WEIGHTS, "float32", local_optimizer.state.slices.numel)
            for local_optimizer in with_elements(self._optimizers)
        ]
        if missing or len(head["version"]) != 2 or list(layout[: len(weights)]) != weights:
            raise RuntimeError(
                f"a training node offers {layout[: len(weights)]}, but this device needs {weights}: the nodes differ "
                f"in their models, or in their versions of lightning_sparse. Use one model and one version on all "
                f"nodes."
            )
        self.head = head
        return len(layout) if self._joins else len(weights)

    def take(self, name: str, tensor: Tensor) -> None:
        kind, _, key = name.partition("/")
        if kind == WEIGHTS:
            self.weights.append(tensor)
        elif kind == OPTIMIZER:
            owner, _, quantity = key.rpartition("/")
            _, parameter, part = self._stepped[owner]
            self._found[owner][quantity] = optimizer_state.as_stepped(tensor, parameter, part)
        else:
            own = local_of(self._others[key])
            own.copy_(tensor.view(own.shape))

    def install(self) -> None:
        """Load everything except the weights."""
        for name, (optimizer, parameter, _) in self._stepped.items():
            state = {**self.head["optimizer"].get(name, {}), **self._found[name]}
            # State that the peer lacks would belong to other weights.
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = optimizer_state.placed(state, optimizer, parameter)
        optimizer_state.load_options(
            [local_optimizer.optimizer for local_optimizer in self._optimizers], self.head["groups"]
        )
        self._module.load_state_dict({**self._others, **self.head["module"]}, strict=False)
