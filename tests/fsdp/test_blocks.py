"""Selection of the modules to shard: nested blocks, repeated blocks, blocks that share parameters."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_sparse.exchange import ExchangeConfig
from lightning_sparse.fsdp import ShardedGradients, blocks, mesh_of, shard
from lightning_sparse.topology import discover
from tests.fsdp.runs import whole
from tests.fsdp.test_trainer import fitted, fsdp
from tests.helpers.distributed import RunRanks, run_ranks
from tests.helpers.lines import raised
from tests.strategy.trainers import plain_module


class Rows(nn.Module):
    """Rows of blocks, as in a UNet: a list of lists, a list of dicts, or a dict of lists."""

    def __init__(self, row: Callable[[dict[str, nn.Module]], nn.Module], named: bool = False) -> None:
        super().__init__()
        rows = {name: row({"a": nn.Linear(7, 11), "b": nn.Linear(11, 7)}) for name in "xyz"}
        self.rows = nn.ModuleDict(rows) if named else nn.ModuleList(rows.values())
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows.children():
            a, b = row.children()
            x = x + b(torch.relu(a(x)))
        out: Tensor = self.head(x)
        return out


class Repeated(nn.Module):
    """A block that occurs several times, as in ALBERT, or two blocks that share a weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        block, other = nn.Linear(7, 7), nn.Linear(7, 7)
        other.weight = block.weight
        self.blocks = nn.ModuleList([block, other] if tied else [block] * 3)
        self.more = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.more):
            x = torch.relu(block(x))
        return x


def _list(row: dict[str, nn.Module]) -> nn.Module:
    return nn.ModuleList(row.values())


def _nested(row: dict[str, nn.Module]) -> nn.Module:
    return nn.ModuleDict({"a": row["a"], "b": row["b"]})


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lists in a list": lambda: Rows(_list),
    "dicts in a list": lambda: Rows(_nested),
    "lists in a dict": lambda: Rows(_list, named=True),
    "one block three times": lambda: Repeated(tied=False),
    "blocks that share a weight": lambda: Repeated(tied=True),
}


def train(model: nn.Module, average: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(8, 7, generator=generator)).square().mean().backward()
        for parameter in model.parameters() if average else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad.div_(dist.get_world_size()))
        optimizer.step()


def sharded_and_whole() -> dict[str, tuple[Tensor, Tensor]]:
    topology, found = discover(), {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        plain = make()
        model = shard(deepcopy(plain), mesh_of(topology))
        assert all(isinstance(p, DTensor) for p in model.parameters()), name
        ShardedGradients(model, ExchangeConfig(exchange="dense"), topology)
        train(model, average=False)
        train(plain, average=True)
        found[name] = whole(model).clone(), whole(plain).clone()
    return found


def test_shard_nested_and_repeated_blocks_train_as_ddp_does(ranks: RunRanks) -> None:
    for found in ranks(sharded_and_whole, nodes=2, devices=2):
        for name, (sharded, plain) in found.items():
            assert sharded.shape == plain.shape, name
            torch.testing.assert_close(sharded, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "count"),
    [("lists in a list", 6), ("dicts in a list", 6), ("lists in a dict", 6), ("one block three times", 2),
     ("blocks that share a weight", 2)],
)  # fmt: skip
def test_blocks_contain_repeated_modules_once(name: str, count: int) -> None:
    assert len(list(blocks(MODELS[name]()))) == count


def refused() -> list[str]:
    said, mesh = [], mesh_of(discover())
    first, second = nn.Linear(7, 7), nn.Linear(7, 7)
    second.weight = first.weight
    for model in (nn.ModuleList([first, second]), nn.ModuleDict({"a": first, "b": nn.ModuleList([second])})):
        with pytest.raises(ValueError, match="share parameters") as error:
            shard(model, mesh)
        said.append(str(error.value))
    return said


def test_shard_tied_modules_without_common_forward_are_refused_with_the_fix(ranks: RunRanks) -> None:
    for said in ranks(refused, nodes=1, devices=2)[0]:
        assert 'fully_shard(self, mesh=self.device_mesh["shard"])' in said
        assert "register_fsdp_forward_method(self, name)" in said


class Encoder(nn.Module):
    """`encode` uses the layer's parameters, but FSDP2 gathers them only for `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(13, 5)

    def encode(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.layer.weight)

    forward = encode


def other_methods() -> str:
    pl_module = type(plain_module("pytorch_lightning", Encoder()))

    class Module(pl_module):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Tensor, _: int) -> Tensor:
            loss: Tensor = self.net.encode(batch).square().mean()
            return loss

    return raised(fitted, "pytorch_lightning", fsdp("pytorch_lightning"), Module())


def test_fsdp_method_other_than_forward_is_explained() -> None:
    for said in run_ranks(other_methods, nodes=1, devices=2, timeout=120, init=False):
        assert "mixed torch.Tensor and DTensor" in said
        assert "register_fsdp_forward_method(module, 'encode')" in said
