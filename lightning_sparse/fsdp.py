"""FSDP2 inside each node, for models that are too large for one device: mesh, sharding, and gradients between nodes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_sparse.checkpoint.state import Piece, State, layout_of, sum_slice_over_nodes
from lightning_sparse.engine import Engine
from lightning_sparse.exchange import Exchange, ExchangeConfig, Shard
from lightning_sparse.exchange.communicator import average
from lightning_sparse.gradients.config import GradientsConfig, Warmup
from lightning_sparse.messages import LogOnce
from lightning_sparse.optimizers import sparse_gradient_objection, sparse_gradient_warning
from lightning_sparse.sharding import check_sharded, local_of, parameter_names, part_of
from lightning_sparse.topology import Topology, device_type, undisturbed


def mesh_of(topology: Topology) -> DeviceMesh:
    """Return a mesh with the axes "replicate" (nodes) and "shard" (devices in each node).

    Raises:
        ValueError: if nodes have different numbers of devices.
    """
    if topology.kind == "unequal nodes":
        raise ValueError(
            f"nodes have {sorted({len(node) for node in topology.nodes})} devices, so their shards differ. Start the "
            f"same number of processes on each node, or define nodes of equal size with LIGHTNING_SPARSE_NODE."
        )
    mesh = topology.mesh_of_axes("replicate", "shard")
    if mesh is not None:
        return mesh
    kind = device_type(dist.get_backend_config())
    return init_device_mesh(kind, (1, topology.world_size), mesh_dim_names=("replicate", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard a model over the devices of each node: first its repeated blocks, then the rest.

    Blocks are the children of the outermost ``ModuleList`` and ``Sequential`` whose class occurs there more than once,
    such as the layers of a Transformer. A sharded model stays unchanged.

    Args:
        model: on the CPU, on a GPU, or on the meta device.
        mesh: from ``mesh_of``, or its axis "shard".
        **options: options of ``fully_shard``.

    Raises:
        ValueError: for a model that must be sharded by hand.
    """
    # After an evaluation, FSDP2 keeps gathered parameters, which are not DTensors.
    sharded = (isinstance(each, FSDPModule) for each in model.modules())
    if any(sharded) or any(isinstance(p, DTensor) for p in model.parameters()):
        return model
    names = mesh.mesh_dim_names
    inside = mesh["shard"] if names is not None and len(names) > 1 else mesh
    wholes = list(with_forward([model]))
    if not all(_is_alone(whole, model) for whole in wholes):
        raise ValueError(f"modules of a {type(model).__name__} share parameters: {by_hand(model)}")
    for module in [*blocks(model), *(whole for whole in wholes if any(True for _ in whole.parameters()))]:
        try:
            fully_shard(module, mesh=inside, **options)
        except (AssertionError, ValueError) as error:
            raise ValueError(f"FSDP2 refuses {type(module).__name__} ({error}): {by_hand(model)}") from error
    return model


def by_hand(model: nn.Module) -> str:
    return (
        f"shard {type(model).__name__} as a whole with fully_shard(model, mesh=mesh['shard']). In a LightningModule, "
        f"import fully_shard and register_fsdp_forward_method from torch.distributed.fsdp, and write:\n"
        f"    def configure_model(self):\n"
        f'        fully_shard(self, mesh=self.device_mesh["shard"])\n'
        f'        for name in ("training_step", "validation_step"):\n'
        f"            register_fsdp_forward_method(self, name)"
    )


@contextmanager
def explained_if_mixed() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise RuntimeError(
            f"{error}\nSharded parameters were used before FSDP2 gathered them: it gathers the parameters of a module "
            f"only for its forward(), but another method or module uses them. After sharding, register the method: "
            f"torch.distributed.fsdp.register_fsdp_forward_method(module, 'encode'). Or shard the common parent module "
            f"as a whole, in configure_model()."
        ) from error


def options_for(precision: Any) -> dict[str, Any]:
    if precision != "bf16-mixed":
        return {}
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield each repeated block once. Blocks that share parameters with others stay with the whole model.

    >>> layers = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)), nn.Linear(2, 1))
    >>> [type(block).__name__ for block in blocks(nn.ModuleDict({"layers": layers}))]
    ['Sequential', 'Sequential', 'Sequential']
    """
    blocks_by_id = {id(block): block for block in _repeated(model)}
    yield from (block for block in blocks_by_id.values() if _is_alone(block, model))


def _repeated(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            inside = list(with_forward(child.children()))
            kinds = [type(module) for module in inside]
            repeated = [
                module for module in inside if kinds.count(type(module)) > 1 and any(True for _ in module.parameters())
            ]
            if repeated:
                yield from repeated
                continue
        yield from _repeated(child)


def with_forward(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield each module once, and the modules inside lists and dicts, which have no ``forward()``."""
    seen: set[int] = set()
    waiting = list(modules)[::-1]
    while waiting:
        module = waiting.pop()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            waiting.extend(list(module.children())[::-1])
        elif id(module) not in seen:
            seen.add(id(module))
            yield module


def _is_alone(part: nn.Module, model: nn.Module) -> bool:
    # FSDP2 would give each module its own copy of a shared parameter.
    uses = _uses(model)
    return all(uses[key] == count for key, count in _uses(part).items())


def _uses(module: nn.Module) -> Counter[int]:
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


class FSDPParamGroup:
    """The parameters that FSDP2 reduces together.

    Args:
        managed: parameters of the module by name, in order, except parameters of FSDP2 modules inside it.

    Attributes:
        numel: S, number of elements of this device's shards, each padded to the largest shard of all devices.
        residual_S: unsent entries, fp32; None before the first exchange.
    """

    def __init__(self, name: str, managed: dict[str, DTensor]) -> None:
        self.name = name
        self.parameters = parameters = {key: parameter for key, parameter in managed.items() if parameter.requires_grad}
        # Frozen parameters take no part. A change during the fit would change the layout.
        self._trained = {key: (parameter, parameter.requires_grad) for key, parameter in managed.items()}
        self.numel = 0
        self._begins: list[int] = []
        for parameter in parameters.values():
            self._begins.append(self.numel)
            rows = -(-parameter.shape[0] // parameter.device_mesh.size()) if parameter.dim() else 1
            self.numel += rows * prod(parameter.shape[1:])
        self.residual_S: Tensor | None = None
        self._spare_S: Tensor | None = None

    def check(self, numel: int) -> None:
        # The hook must get the gradients of all parameters that were trainable at set-up.
        changed = [name for name, (parameter, trained) in self._trained.items() if parameter.requires_grad != trained]
        if changed:
            raise ValueError(
                f"{changed[0]} was frozen or unfrozen during the fit, but the layout of messages is fixed at its "
                f"start. Freeze or unfreeze between two fits, or use send='updates'."
            )
        if numel != self.numel:
            raise ValueError(
                f"{numel} of {self.numel} gradients of {self.name or 'the model'} came out of this backward pass, "
                f"because it did not use some parameters, and this torch does not pad with zeros. Use torch 2.15 or "
                f"later, freeze them before the fit, or use send='updates'."
            )

    def views(self, flat_S: Tensor) -> Iterator[tuple[str, DTensor, Tensor]]:
        """Yield each parameter, and its shard in a flat tensor, without padding."""
        for (name, parameter), begin in zip(self.parameters.items(), self._begins, strict=True):
            yield name, parameter, flat_S[begin : begin + local_of(parameter).numel()]

    def take_accumulated(self, flat_S: Tensor) -> None:
        """Add the gradients of earlier backward passes, which no other node has, and remove them."""
        for _, parameter, view in self.views(flat_S):
            if parameter.grad is not None:
                earlier = local_of(parameter.grad)
                view.add_(earlier.flatten())
                record_stream_use(earlier)
                parameter.grad = None

    def new_residual(self) -> Tensor:
        device = local_of(next(iter(self.parameters.values()))).device
        self.residual_S = torch.zeros(self.numel, dtype=torch.float32, device=device)
        return self.residual_S

    def residuals(self) -> tuple[Tensor, Tensor]:
        residual_S = self.new_residual() if self.residual_S is None else self.residual_S
        if self._spare_S is None:
            self._spare_S = torch.empty_like(residual_S)
        return residual_S, self._spare_S

    def swap(self) -> None:
        self.residual_S, self._spare_S = self._spare_S, self.residual_S


def residual_of(state: State, name: str, begin: int, end: int) -> Iterator[Piece]:
    return state.cut("residual", name, begin, end)


class ShardedGradients(Engine):
    """Averages the gradients of a sharded model over nodes::

        topology = discover()
        model = shard(model, mesh_of(topology))
        gradients = ShardedGradients(model, ExchangeConfig(exchange="dense16"), topology)

    The training loop does not change. To accumulate gradients, use FSDP2's ``set_requires_gradient_sync(False)``, which
    does not communicate, or ``accumulating()``, which averages inside the node.

    Args:
        model: sharded along dim 0 over the devices of each node. All nodes start with the weights of the first node.
        config: options of the exchange, except ``"auto"``. With a `GradientsConfig`, the density may warm up.
        topology: topology of the ranks, with groups.

    Attributes:
        epoch: current epoch, for the density warm-up. Set it at the start of each epoch.

    Raises:
        ValueError: for parameters that are sharded in another way, or an exchange that must measure first.
    """

    kind = "gradients of shards"
    reshard_message = "the mean of the residuals over nodes is kept"
    loss_message = "residuals start at zero, and unsent gradients are lost"

    def __init__(self, model: nn.Module, config: ExchangeConfig, topology: Topology) -> None:
        if config.path is None:
            raise ValueError(
                f"exchange={config.exchange!r} needs DDP's buckets. Use 'sparse', 'regional', 'dense16' or 'dense'."
            )
        topology = undisturbed(topology)
        self.module, self.config, self.topology = model, config, topology
        self.active = topology.kind == "hierarchical"
        self.managed: list[FSDPParamGroup] = []
        self.log_once = LogOnce(topology.rank)
        self.epoch: int | None = None
        self.warmup = Warmup()
        if isinstance(config, GradientsConfig):
            self.warmup = Warmup(config.warmup_epochs, config.warmup_steps)
        self._accumulating = False
        if not self.active:
            return
        device = next(local_of(p).device for p in model.parameters())
        self.exchange = Exchange(config, topology, device, sum(p.numel() for p in model.parameters()), self.log_once)
        names = parameter_names(model)
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule) and (managed := params_of(module, names)):
                self._attach(module, FSDPParamGroup(name, managed))
        self.exchange.communicator.broadcast_from_rank0([*model.parameters(), *model.buffers()])

    def _attach(self, module: FSDPModule, managed: FSDPParamGroup) -> None:
        module.set_all_reduce_hook(partial(self._reduce, managed))
        always_all = getattr(module, "set_reduce_scatter_unused_params", None)  # torch 2.15
        if always_all is not None:
            always_all(True)
        self.managed.append(managed)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Leave the exchange of the backward passes in this context to the next pass outside."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def adopt_residuals(self, before: ShardedGradients) -> None:
        """Continue with the residuals and the warm-up of an earlier set-up of the same parameters."""
        if before.module is self.module:
            self.steps, self.epoch, self.warmup = before.steps, before.epoch, before.warmup
        of = {tuple(map(id, group.parameters.values())): group for group in before.managed}
        for group in self.managed:
            old = of.get(tuple(map(id, group.parameters.values())))
            if old is not None:
                group.residual_S = old.residual_S

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Warn about optimizers that do not tolerate gradients with missing entries."""
        objected = sparse_gradient_objection(optimizers) if self.active and self.config.leaves_entries_out else ""
        if objected:
            alternative = "exchange='dense16', which sends everything, or exchange updates (send='updates')"
            self.log_once(sparse_gradient_warning(self.config.exchange, objected, alternative), logging.WARNING)

    @torch.no_grad()
    def swap_in_global_weights(self, wait: bool = True) -> None:
        """Average floating-point buffers over all ranks, if there are any. A collective of the world."""
        # Weights are equal on all nodes anyway. Buffers such as batch norm statistics are not.
        buffers = [buffer for buffer in self.module.buffers() if buffer.is_floating_point() and buffer.numel()]
        if not self.active or not buffers:
            return
        all_reduce, ranks = self.exchange.communicator.flat_all_reduce, self.topology.world_size
        average(buffers, all_reduce, ranks, is_first=self.topology.rank == 0)

    def step(self, optimizer: Optimizer | None = None) -> None:
        """Update the statistics after the optimizer's step."""
        self.steps += 1
        if self.active:
            self.exchange.stats.end_round()

    def norms(self) -> dict[str, Tensor]:
        held = [torch.linalg.vector_norm(group.residual_S) for group in self.managed if group.residual_S is not None]
        return {"residual_norm": torch.stack(held).norm() if held else torch.zeros(())}

    # -- checkpoints: residuals, by pieces of parameters and without padding -------------------------------------------

    def global_parts(self) -> list[Tensor]:
        return [local_of(p.data) for p in self.module.parameters()] if self.active else []

    def state(self) -> State:
        pieces, layouts = [], {}
        for managed in self.managed:
            for name, parameter, view in managed.views(managed.residual_S) if managed.residual_S is not None else ():
                pieces.append(Piece(name, *part_of(parameter)[1:], view.to("cpu", copy=True)))
                layouts[name] = layout_of(parameter)
        return State({"residual": pieces}, layouts)

    def fits(self, metadata: Mapping[str, Any], state: State) -> bool:
        saved = [piece.place for piece in state.pieces["residual"]]
        mine = [(name, *part_of(p)[1:]) for managed in self.managed for name, p in managed.parameters.items()]
        return self.active and (not saved or saved == mine)

    @torch.no_grad()
    def load(self, metadata: Mapping[str, Any], state: State | None) -> None:
        self.steps = metadata["steps"]
        residuals = {piece.name: piece.tensor for piece in state.pieces["residual"]} if state is not None else {}
        for managed in self.managed:
            for name, _, view in managed.views(managed.new_residual()):
                if name in residuals:
                    view.copy_(residuals[name])

    @torch.no_grad()
    def load_from(self, metadata: Mapping[str, Any], nodes: Sequence[Sequence[State]]) -> None:
        if not self.active:
            if metadata["config"]["exchange"] != "dense":  # "dense" leaves no residual
                self.log_once("the saved residuals are lost: one node has nothing to send", logging.WARNING)
            return
        self.steps = metadata["steps"]
        for managed in self.managed:
            for name, parameter, view in managed.views(managed.new_residual()):
                _, begin, end = part_of(parameter)
                residual = sum_slice_over_nodes(nodes, residual_of, name, begin, end, layout_of(parameter))
                if residual is not None:
                    view.copy_(residual.div_(len(nodes)))

    @torch.no_grad()
    def _reduce(self, managed: FSDPParamGroup, flat_S: Tensor) -> None:
        # FSDP2 calls this hook in the backward pass of each module that it manages. It passes this device's shard [S]
        # of the node's mean gradient, padded per parameter.
        self.exchange.refuse_capture()
        managed.check(flat_S.numel())
        if self._accumulating:
            return
        record_stream_use(flat_S)
        managed.take_accumulated(flat_S)
        exchange = self.exchange
        exchange.communicator.error_context = f"in step {self.steps + 1}, gradients of {managed.name or 'the model'}"
        work = exchange.choice.work(managed.numel * self.topology.num_devices, flat_S.dtype)
        density = self.warmup.density_now(self.config.density, self.epoch, self.steps, self.log_once)
        path = exchange.choice.path(work, density)
        residual_S, next_S = managed.residuals() if path.residual_kind != "nothing" else (None, None)
        total_S = exchange.sum(path, Shard(flat_S, residual_S, next_S))
        if next_S is not None:
            managed.swap()
        if total_S is not flat_S:
            flat_S.copy_(total_S)
        flat_S.div_(self.topology.num_nodes)


def record_stream_use(tensor: Tensor) -> None:
    # FSDP2's hook runs on another stream than the owner of its memory. Otherwise, the next reduce-scatter could reuse
    # the memory too early.
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def params_of(module: Any, names: dict[int, str]) -> dict[str, DTensor]:
    """Return the parameters that FSDP2 manages with a module, in the order in which it lays out their gradients."""
    params: dict[str, DTensor] = {}

    def visit(each: nn.Module) -> None:
        for child in each.children():  # children first, as in FSDP2's buffer
            if not isinstance(child, FSDPModule):
                visit(child)
        for parameter in each.parameters(recurse=False):
            check_sharded(names[id(parameter)], parameter)
            assert isinstance(parameter, DTensor)
            params.setdefault(names[id(parameter)], parameter)

    visit(module)
    return params
