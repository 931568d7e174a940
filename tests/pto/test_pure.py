"""Partition of the step, packing of shares, and refused optimizers, without ranks."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_sparse.agree import fingerprint
from lightning_sparse.flavours.pytorch_lightning import PTOCallback
from lightning_sparse.optimizers import refuse, step_cost
from lightning_sparse.pto import communicator_of
from lightning_sparse.pto.gather import ALIGN, FlatGather
from lightning_sparse.pto.state import cut_state, join_states
from lightning_sparse.pto.step import LocalShard, ShardedStep
from lightning_sparse.sharding import (
    ALIGNMENT,
    BALANCED,
    Part,
    Parts,
    flat_view,
    loads_of,
    partition,
    sparse_parameters,
)
from lightning_sparse.topology import Topology
from tests.helpers.lines import Lines

SIZES = st.lists(st.integers(0, 10_000), max_size=40)


def whole(numels: list[int], loads: list[int]) -> list[Parts]:
    return partition(numels, numels, loads, [False] * len(numels))


@given(SIZES, st.integers(1, 9))
def test_shares_are_balanced_up_to_the_largest_parameter(numels: list[int], size: int) -> None:
    parts = whole(numels, [0] * size)
    assert parts == whole(numels, [0] * size)
    assert all(
        0 <= part.owner < size and (part.begin, part.end) == (0, n) for n, (part,) in zip(numels, parts, strict=True)
    )
    loads = loads_of(parts, numels, size)
    assert sum(loads) == sum(max(1, n) for n in numels)
    assert max(loads) <= sum(loads) / size + max([1, *numels])


@given(SIZES, SIZES, st.integers(1, 5))
def test_later_parameters_fill_the_smallest_shares(first: list[int], later: list[int], size: int) -> None:
    loads = loads_of(whole(first, [0] * size), first, size)
    both = [a + b for a, b in zip(loads, loads_of(whole(later, loads), later, size), strict=True)]
    assert max(both) <= sum(both) / size + max([1, *first, *later])


@given(st.lists(st.integers(0, 100_000), max_size=20), st.integers(1, 5), st.data())
def test_parameters_are_split_until_shares_are_balanced(numels: list[int], size: int, data: st.DataObject) -> None:
    cuttable = [data.draw(st.booleans()) for _ in numels]
    parts = partition(numels, numels, [0] * size, cuttable)
    for numel, may, of_one in zip(numels, cuttable, parts, strict=True):
        assert [p.begin for p in of_one] == [0, *[p.end for p in of_one[:-1]]]
        assert of_one[-1].end == numel
        assert all(p.begin % ALIGNMENT == 0 for p in of_one)
        assert len(of_one) == 1 or (may and len({p.owner for p in of_one}) == len(of_one) <= size)
    loads = loads_of(parts, numels, size)
    if all(cuttable):
        assert max(loads, default=0) <= BALANCED * sum(loads) / size + ALIGNMENT * size * (1 + len(numels))


@pytest.mark.parametrize(("model", "size"), [("resnet50", 4), ("vgg19", 2)])
def test_largest_share_of_known_models_is_close_to_the_mean(model: str, size: int) -> None:
    """The first classifier layer of VGG-19 holds 72% of its parameters."""
    with torch.device("meta"):
        numels = [p.numel() for p in getattr(torchvision.models, model)().parameters()]
    parts = partition(numels, numels, [0] * size, [True] * len(numels))
    loads = loads_of(parts, numels, size)
    assert max(loads) * size <= BALANCED * sum(loads)
    assert sum(len(each) > 1 for each in parts) <= 6


def test_muon_is_balanced_by_multiplications() -> None:
    muon = torch.optim.Muon([nn.Parameter(torch.zeros(8, 4))])
    assert step_cost(muon, torch.zeros(8, 4)) == step_cost(muon, torch.zeros(4, 8)) == 16 * 20
    assert step_cost(torch.optim.SGD([torch.zeros(1)]), torch.zeros(8, 4)) == 32


@pytest.mark.parametrize(
    ("layout", "of_grad"),
    [(torch.contiguous_format, torch.channels_last), (torch.channels_last, torch.contiguous_format)],
)
def test_parameter_is_narrowed_and_put_back(layout: torch.memory_format, of_grad: torch.memory_format) -> None:
    parameter = nn.Parameter(torch.randn(8, 4, 3, 3).to(memory_format=layout))
    grad = parameter.grad = torch.randn(8, 4, 3, 3).to(memory_format=of_grad)
    data, expected, share = parameter.data, parameter.detach() - 0.5 * grad, LocalShard()
    for part in (Part(0, 0, 64), Part(1, 64, 288)):
        share.apply([parameter], [part])
        assert parameter.shape == (part.end - part.begin,)
        torch.optim.SGD([parameter], lr=0.5).step()
        share.restore()
    assert parameter.grad is grad
    assert parameter.data_ptr() == data.data_ptr()
    assert parameter.stride() == data.stride()
    assert torch.equal(parameter, expected)


def test_sparse_gradient_is_not_split() -> None:
    embedding = nn.Embedding(100, 4, sparse=True)
    embedding(torch.tensor([3])).sum().backward()
    with pytest.raises(ValueError, match="is sparse"):
        LocalShard().apply([embedding.weight], [Part(0, 0, 128)])
    assert sparse_parameters(nn.Sequential(embedding, nn.Embedding(3, 3))) == {id(embedding.weight)}


def one(owner: int, numel: int) -> Parts:
    return (Part(owner, 0, numel),)


def odd_tensors(seed: int) -> list[Tensor]:
    """Return tensors of every dtype, unaligned sizes, a scalar, an empty tensor, and channels last."""
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(7, 3, generator=g),
        torch.randn((), generator=g, dtype=torch.float64),
        torch.randn(5, generator=g).bfloat16(),
        torch.randn(11, generator=g).half(),
        torch.empty(0),
        torch.randn(3, generator=g, dtype=torch.complex64),
        torch.randn(2, 3, 5, 5, generator=g).to(memory_format=torch.channels_last),
        torch.randint(0, 99, (13,), generator=g),
        torch.randn(97, 31, generator=g),
    ]


class Sending:
    """Simulates the collectives of one rank, and keeps the sent data."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size
        self.packed: list[Tensor] = []
        self.in_place: list[Tensor | None] = []

    def gather(self, shard_S: Tensor) -> Tensor:
        self.packed.append(shard_S.clone())
        return shard_S.repeat(self.size)

    def broadcast(self, tensor: Tensor, device_index: int) -> Callable[[], None]:
        self.in_place.append(tensor.clone() if device_index == self.index else None)
        return lambda: None


class Receiving:
    """Simulates collectives that return the sent data."""

    def __init__(self, sent: list[Sending]) -> None:
        self.packed = iter(zip(*(each.packed for each in sent), strict=True))
        self.in_place = iter(zip(*(each.in_place for each in sent), strict=True))

    def gather(self, _: Tensor) -> Tensor:
        return torch.cat(next(self.packed))

    def broadcast(self, tensor: Tensor, device_index: int) -> Callable[[], None]:
        sent = next(self.in_place)[device_index]
        assert sent is not None

        def arrive() -> None:
            tensor.copy_(sent)

        return arrive


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_state_is_split_and_joined(layout: torch.memory_format) -> None:
    parameter = torch.zeros(8, 4, 3, 3).to(memory_format=layout)
    moment = torch.randn(8, 4, 3, 3).contiguous(memory_format=layout)
    state = {"step": torch.tensor(3.0), "moment": moment, "name": "x", "nothing": None}
    parts = (Part(1, 0, 128), Part(0, 128, 288))
    cut = [cut_state(state, parameter, part) for part in parts]
    assert [each["moment"].shape for each in cut] == [(128,), (160,)]
    joined = join_states(cut, parameter, parts)
    assert torch.equal(joined["moment"], moment)
    assert joined["moment"].stride() == moment.stride()
    assert {key: joined[key] for key in ("step", "name", "nothing")} == {
        key: state[key] for key in state if key != "moment"
    }


@pytest.mark.parametrize("large", [1, 2000, 2**20])
@pytest.mark.parametrize("piece", [1, 200, 2**20])
@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_gather_sends_each_share_to_all_ranks(size: int, piece: int, large: int) -> None:
    """Each of `size` simulated ranks sends in turn. Then each rank receives."""
    ranks = [odd_tensors(seed) for seed in range(size)]
    before = [[t.clone() for t in rank] for rank in ranks]
    numels = [t.numel() for t in ranks[0]]
    parts = partition(numels, numels, [0] * size, [True] * len(numels))
    assert size == 1 or len(parts[-1]) > 1
    sent = [Sending(index, size) for index in range(size)]
    for index, sending in enumerate(sent):
        FlatGather([t.clone() for t in ranks[index]], parts, index, size, piece=piece, large=large)(sending)
    sizes = [[part.numel() for part in sending.packed] for sending in sent]
    assert all(each == sizes[0] for each in sizes), "a collective needs equal sizes"
    assert max(sizes[0], default=0) * size <= max(piece, ALIGN * size)
    assert bool(sent[0].in_place) == (large < 2**20 and size > 1)
    for index, tensors in enumerate(ranks):
        FlatGather(tensors, parts, index, size, piece=piece, large=large)(Receiving(sent))
        for place, of_one in enumerate(parts):
            for part in of_one:
                here = slice(part.begin, part.end)
                assert torch.equal(flat_view(tensors[place])[here], flat_view(before[part.owner][place])[here])
            assert tensors[place].stride() == before[index][place].stride()


def test_gather_follows_parameters_to_other_memory() -> None:
    tensors = [torch.zeros(3), torch.zeros(4)]
    gather = FlatGather(tensors, [one(0, 3), one(1, 4)], 0, 2)
    tensors[1].data = torch.ones(4)
    other = Sending(1, 2)
    other.packed.append(torch.full((4,), 7.0).view(torch.uint8))
    first = Sending(0, 2)
    gather(first)
    gather(Receiving([first, other]))
    assert tensors[1].tolist() == [7.0] * 4


def test_parameter_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(4, 2\) and strides \(3, 1\) has gaps .* make it contiguous"):
        FlatGather([torch.zeros(4, 3)[:, :2]], [one(0, 8)], 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_fingerprint_changes_with_one_bit(dtype: torch.dtype) -> None:
    x = torch.arange(30).to(dtype)
    y = x.clone()
    assert fingerprint(x) == fingerprint(y)
    y.view(torch.uint8)[17] ^= 1
    assert fingerprint(x) != fingerprint(y)
    assert fingerprint(None) != fingerprint(torch.zeros(3))


@settings(deadline=None, max_examples=60)
@given(numel=st.integers(2, 30_000), offset=st.integers(0, 3), data=st.data())
def test_fingerprint_changes_with_the_order(numel: int, offset: int, data: st.DataObject) -> None:
    x = torch.arange(numel + offset, dtype=torch.float32)[offset:]
    assert fingerprint(x) == fingerprint(x.clone())
    one, other = data.draw(st.lists(st.integers(0, numel - 1), min_size=2, max_size=2, unique=True))
    y = x.clone()
    y[one], y[other] = x[other], x[one]
    assert fingerprint(x) != fingerprint(y)


def test_scopes_have_ascending_ranks() -> None:
    """A group gathers in the order of its ranks."""
    topology = Topology(((2, 0), (3, 1)), rank=2)
    node, world = communicator_of(topology, "node").node, communicator_of(topology, "world").node
    assert (node.ranks, node.place) == ((0, 2), 1)
    assert (world.ranks, world.place) == ((0, 1, 2, 3), 2)


@pytest.mark.parametrize("nodes", [((0, 1), (2, 3)), ((0,), (1,))], ids=["node", "world"])
def test_auto_tries_the_node_or_else_the_world(nodes: tuple[tuple[int, ...], ...]) -> None:
    assert communicator_of(Topology(nodes, rank=0), "auto").node.ranks == (0, 1)


@pytest.mark.parametrize(("option", "value"), [("scope", "all"), ("scope", None), ("trusted_optimizers", "Lion")])
def test_bad_option_is_refused(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{option}={value!r}|{option} {value!r}"):
        PTOCallback(**{option: value})  # type: ignore[arg-type]


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Checked by its class name. torch's own class needs a process group and takes long to import."""


class Clipping(torch.optim.Adam):
    """Clips like timm's LAMB."""

    def __init__(self, params: list[Tensor], max_grad_norm: float | None) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["max_grad_norm"] = max_grad_norm


@pytest.mark.parametrize(
    ("cls", "options", "says"),
    [
        (torch.optim.LBFGS, {}, "cannot shard the step of LBFGS: .*remove the callback"),
        (ZeroRedundancyOptimizer, {}, "ZeroRedundancyOptimizer: it already shards the step"),
        (Clipping, {"max_grad_norm": 1.0}, r"max_grad_norm=1.0\) clips by the norm of all .*gradient_clip_val"),
    ],
)
def test_optimizers_that_mix_parameters_are_refused(
    cls: type[torch.optim.Optimizer], options: dict[str, float], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        refuse(cls([nn.Parameter(torch.ones(2))], **options))
    refuse(Clipping([nn.Parameter(torch.ones(2))], max_grad_norm=None))


def test_step_is_sharded_once_and_its_hook_runs_first() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    optimizer.register_step_post_hook(lambda *_: None)
    communicator = communicator_of(Topology(((0,),), rank=0), "node")
    step = ShardedStep(optimizer, communicator)
    hooks = optimizer._optimizer_step_post_hooks
    assert isinstance(hooks, OrderedDict)
    assert next(iter(hooks.values())) == step._after
    with pytest.raises(ValueError, match="is already sharded"):
        ShardedStep(optimizer, communicator)


class Unknown(torch.optim.SGD):
    """A class without tests."""


def test_untested_optimizer_is_not_sharded_and_the_log_names_the_option() -> None:
    lines = Lines()
    optimizer = Unknown([nn.Parameter(torch.ones(2))])
    step = ShardedStep(optimizer, communicator_of(Topology(((0,),), rank=0), "node"))
    assert not step.active
    assert not optimizer._optimizer_step_pre_hooks
    assert not hasattr(optimizer, "consolidate_state_dict")
    (said,) = lines.lines
    assert "PTO is off for Unknown; every rank runs the full step" in said
    assert "use PTOCallback(trusted_optimizers=['Unknown'])" in said
