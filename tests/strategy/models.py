"""Small models and step helpers. Every rank builds the same model; only the data differs by rank."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.checkpoint import side_files as saves
from lightning_sparse.checkpoint.restore import restore
from lightning_sparse.engine import Engine
from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.topology import Topology, discover

PLAIN = {"bucket_cap_mb": 0.002}  # several buckets, rebuilt after the first round


def mlp(seed: int = 0) -> nn.Sequential:
    """Return a model in which neither the bucket sizes nor the parameter sizes are divisible by 2 or 3."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 29), nn.Tanh(), nn.Linear(29, 5))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 13, generator=generator), torch.randn(8, 5, generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return nn.functional.mse_loss(model(x), y)


def wrap(
    model: nn.Module,
    config: HierConfig,
    topology: Topology | None = None,
    state: HierState | None = None,
    **ddp: object,
) -> tuple[DistributedDataParallel, HierState]:
    """Wrap a model in DDP with the hook; `state` carries over from an earlier wrapper."""
    if state is None:
        state = HierState(
            model, config, topology or discover(), find_unused_parameters=bool(ddp.get("find_unused_parameters", False))
        )
    wrapped = DistributedDataParallel(model, **ddp)  # type: ignore[arg-type]
    wrapped.register_comm_hook(state, hier_hook)
    return wrapped, state


def train(model: nn.Module, ddp: DistributedDataParallel, steps: int, lr: float = 0.1, momentum: float = 0.0) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        optimizer.step()
    return flat_parameters(model)


def loop(ddp: nn.Module, state: HierState, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Train as a user's loop does, with a state that knows the optimizer."""
    for step in steps:
        state.before_backward()
        loss_of(ddp, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()


def backward(ddp: nn.Module, steps: Iterable[int]) -> None:
    """Compute the gradients of these steps without stepping an optimizer."""
    for step in steps:
        loss_of(ddp, step, dist.get_rank()).backward()


def flat_grads(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def flat_parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def node_residual(model: nn.Module, state: HierState) -> Tensor:
    """Return this node's residual of the whole model, in the order of its parameters. A collective inside the node."""
    by_name: dict[str, Tensor] = dict(state.store.by_name)
    for group in sorted(state.store.entries, key=lambda g: g.names):  # the order of `current` differs by device
        shard = state.store.committed.get(group)
        nothing = torch.zeros(group.shard_numel(state.topology.num_devices))
        flat = state.exchange.communicator.gather(nothing if shard is None else shard)
        by_name.update({name: flat[place].clone() for name, place in group.slices.items()})
    return torch.cat([by_name.get(name, torch.zeros(p.numel())) for name, p in model.named_parameters()])


def sum_over_nodes(tensor: Tensor, state: HierState) -> Tensor:
    """Sum a value over nodes: sum over ranks, divided by L, because every device of a node holds the node's value."""
    total = tensor.double()
    dist.all_reduce(total)
    return total / state.topology.num_devices


def mean_gradient(ddp: DistributedDataParallel, step: int) -> Tensor:
    """Return the gradient that plain DDP would compute, in fp64."""
    copied = copy.deepcopy(ddp.module)
    copied.zero_grad()
    loss_of(copied, step, dist.get_rank()).backward()
    mean = flat_grads(copied).double()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def watched(
    density: float, parameters: int | None = None, exchange: Any = "sparse"
) -> tuple[DistributedDataParallel, HierState, torch.optim.SGD]:
    """Return a wrapped model with a state that watches the optimizer of its first few parameters, or of all."""
    model = mlp()
    config = HierConfig(density=density, exchange=exchange, value_dtype="float32", warmup_epochs=0)
    ddp, state = wrap(model, config, **PLAIN)
    optimizer = torch.optim.SGD(list(model.parameters())[:parameters], lr=0.1)
    state.watch([optimizer])
    return ddp, state, optimizer


def conserved(
    config: HierConfig, caps: Iterable[float], rounds: int, rewrap: int
) -> tuple[Tensor, Tensor, Tensor, HierState]:
    """Run rounds of one model. Every `rewrap` rounds, wrap it again with another bucket size, hence with new groups.

    Returns:
        The sum of mean gradients, the sum of applied gradients, the residuals, and the state after its last commit.
    """
    model, state, sizes = mlp(), None, iter(caps)
    given = torch.zeros_like(flat_parameters(model)).double()
    applied = given.clone()
    for step in range(rounds):
        if step % rewrap == 0:
            ddp, state = wrap(model, config, state=state, bucket_cap_mb=next(sizes))
        given += mean_gradient(ddp, step)
        model.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        applied += flat_grads(model)
    assert state is not None
    state.commit_round()
    return given, applied, sum_over_nodes(node_residual(model, state), state), state


def save(engine: Engine, path: str) -> dict[str, Any]:
    """Save an engine as a strategy does, and return its metadata. A collective."""
    metadata = saves.SideFiles(engine.kind).metadata_of(engine)
    saves.write_side_file(engine.state().to_dict(), metadata["save_id"], path, dist.get_rank())
    if dist.get_rank() == 0:
        torch.save({saves.CHECKPOINT_KEY: [metadata]}, path)
    dist.barrier()
    return metadata


def go_on(engine: Engine, path: str) -> list[str]:
    """Restore an engine from a saved checkpoint and return the lines that it logs. A collective."""
    said: list[str] = []
    engine.log_once = lambda line, *_, **__: said.append(line)  # type: ignore[assignment]
    (saved,) = saves.load(torch.load(path, weights_only=True), path, dist.get_rank())
    restore(engine, saved, torch.device("cpu"))
    return said
