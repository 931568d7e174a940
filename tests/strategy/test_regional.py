"""exchange="regional": nothing is lost, ranks agree, and the volume does not grow with the number of nodes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_sparse.exchange import ExchangeConfig, Work
from lightning_sparse.exchange.choice import PathChoice
from lightning_sparse.exchange.paths import Regional
from lightning_sparse.kernels import message_bytes
from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.topology import Topology
from tests.helpers.threads import Exchange, ThreadCommunicator, run_threads
from tests.strategy.test_threads import Bucket

NODES = [3, 4, 5]


# -- the arithmetic ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(0, 300), st.data())
def test_regions_hold_each_element_once(nodes: int, more: int, data: st.DataObject) -> None:
    shard = nodes + more
    total = data.draw(st.integers(1, shard))
    regions = Regional(Work(nodes, 1, shard), total, torch.bfloat16).regions
    places = [regions.place(node) for node in range(nodes)]
    assert [i for place in places for i in range(shard)[place]] == list(range(shard))
    for node, place in enumerate(places):
        assert 1 <= regions.pairs(node) <= place.stop - place.start
        assert regions.nbytes(node) <= regions.row_nbytes
    assert total <= sum(regions.pairs(node) for node in range(nodes)) < total + nodes


@pytest.mark.parametrize("path", ["sparse", "regional"])
def test_the_volume_is_flat_in_the_number_of_nodes(path: str) -> None:
    shard, k = 10**7, 10**5
    received = []
    for nodes in (2, 4, 16, 64, 256):
        config = ExchangeConfig(exchange=path)  # type: ignore[arg-type]
        topology = Topology(tuple((rank,) for rank in range(nodes)), 0)
        chosen = PathChoice(config, topology, shard, lambda _: None).path(Work(nodes, 1, shard), 0.01)
        assert (chosen.name, chosen.sent) == (path, k)
        received.append(chosen.bytes())
    pairs = message_bytes(shard, k, torch.bfloat16)
    if path == "regional":
        assert max(received[:-1]) < 2.1 * pairs, "2 K pairs and a header a message"
        assert received[-1] < 2.2 * pairs
    else:
        assert received[-1] == 255 * pairs


# -- between threads ---------------------------------------------------------------------------------------------------


def exchange_once(nodes: int, grads: Tensor, density: float) -> list[tuple[Tensor, Tensor, int]]:
    """What each node applies, keeps, and received in one round of these gradients, one row a node."""

    def rank(topology: Topology, exchange: Exchange) -> tuple[Tensor, Tensor, int]:
        module = nn.Linear(grads.shape[1], 1, bias=False).to(grads.dtype)
        state = HierState(module, HierConfig(density=density, exchange="regional", warmup_epochs=0), topology)
        comm = state.exchange.communicator = CountingCommunicator(topology, exchange)
        for _ in range(2):  # until the layout is settled
            hier_hook(state, Bucket(torch.zeros_like(grads[0]), list(module.parameters())))  # type: ignore[arg-type]
        comm.received = 0
        bucket = Bucket(grads[topology.rank].clone(), list(module.parameters()))
        applied = hier_hook(state, bucket).value()  # type: ignore[arg-type]
        state.settle()
        (left,) = state.store.current.values()
        return applied, left, comm.received

    return run_threads(rank, [[node] for node in range(nodes)])


class CountingCommunicator(ThreadCommunicator):
    """Counts bytes that come from other nodes."""

    received = 0

    def exchange(self, message_B: Tensor) -> Tensor:
        self.received += message_B.nbytes * (self.topology.num_nodes - 1)
        return super().exchange(message_B)

    def all_to_all(self, messages_MB: Tensor) -> Tensor:
        self.received += messages_MB[1:].nbytes
        return super().all_to_all(messages_MB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nodes", NODES)
def test_the_largest_of_the_sums_are_applied_and_the_rest_stays(nodes: int, dtype: torch.dtype) -> None:
    """A spike that every node has in every region wins; with one pair a region nothing else is applied."""
    numel = 1000
    grads = torch.randn(nodes, numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    spikes = [regions_start + 7 for regions_start in (j * numel // nodes for j in range(nodes))]
    grads[:, spikes] = 50.0
    results = exchange_once(nodes, grads, density=nodes / numel)
    for applied, _, _ in results:
        assert torch.equal(applied, results[0][0])
        assert applied.nonzero().flatten().tolist() == spikes
    left = torch.stack([left for _, left, _ in results]).double().sum(0)
    given = grads.double().mean(0)
    torch.testing.assert_close(
        results[0][0].double() + left, given, rtol=1e-5, atol=1e-5 if dtype.itemsize == 4 else 0.2
    )


def test_what_arrives_is_what_was_planned_and_flat() -> None:
    volumes = []
    for nodes in (2, 4, 8):
        results = exchange_once(nodes, torch.randn(nodes, 50_000), density=0.05)
        (received,) = {received for _, _, received in results}
        regions = Regional(Work(nodes, 1, 50_000), 2500, torch.bfloat16).regions
        assert received == 2 * (nodes - 1) * regions.row_nbytes
        volumes.append(received)
    pairs = message_bytes(50_000, 2500, torch.bfloat16)
    assert volumes[0] < 1.1 * pairs
    assert max(volumes) < 2.1 * pairs


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("nodes", NODES)
def test_a_non_finite_element_reaches_every_node_and_no_residual(nodes: int, bad: float) -> None:
    grads = torch.randn(nodes, 600)
    grads[1, 599] = bad
    for applied, left, _ in exchange_once(nodes, grads, density=0.01):
        assert applied[599].isnan()
        assert left.isfinite().all()
