"""``exchange="regional"`` and ``"dense16"``: no gradient is lost, ranks agree, and messages have the planned size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_sparse.exchange import ExchangeConfig, Shard, TensorSpec
from lightning_sparse.exchange.cost import PathChoice
from lightning_sparse.exchange.paths import Dense16, Regional
from lightning_sparse.kernels import message_bytes
from lightning_sparse.strategy import HierConfig, HierState, hier_hook
from lightning_sparse.topology import Topology
from tests.helpers.threads import Exchange, ThreadCommunicator, run_threads
from tests.strategy.test_threads import Bucket

# -- arithmetic --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(0, 300), st.data())
def test_regional_regions_hold_each_element_once(nodes: int, more: int, data: st.DataObject) -> None:
    shard = nodes + more
    total = data.draw(st.integers(1, shard))
    regions = Regional(TensorSpec(nodes, 1, shard), total, torch.bfloat16).regions
    places = [regions.place(node) for node in range(nodes)]
    assert [i for place in places for i in range(shard)[place]] == list(range(shard))
    for node, place in enumerate(places):
        assert 1 <= regions.pairs(node) <= place.stop - place.start
        assert regions.nbytes(node) <= regions.row_nbytes
    assert total <= sum(regions.pairs(node) for node in range(nodes)) < total + nodes


@pytest.mark.parametrize("path", ["sparse", "regional"])
def test_regional_volume_is_independent_of_the_number_of_nodes(path: str) -> None:
    shard, k = 10**7, 10**5
    received = []
    for nodes in (2, 4, 16, 64, 256):
        config = ExchangeConfig(exchange=path)  # type: ignore[arg-type]
        topology = Topology(tuple((rank,) for rank in range(nodes)), 0)
        chosen = PathChoice(config, topology, shard, lambda _: None).path(TensorSpec(nodes, 1, shard), 0.01)
        assert (chosen.name, chosen.sent) == (path, k)
        received.append(chosen.bytes())
    pairs = message_bytes(shard, k, torch.bfloat16)
    if path == "regional":
        assert max(received[:-1]) < 2.1 * pairs, "2 K pairs and a header per message"
        assert received[-1] < 2.2 * pairs
    else:
        assert received[-1] == 255 * pairs


# -- ranks as threads --------------------------------------------------------------------------------------------------


def exchange_once(nodes: int, grads: Tensor, density: float) -> list[tuple[Tensor, Tensor, int]]:
    """Run a round with one row of gradients per node. Return gradient, residual and received bytes per node."""

    def rank(topology: Topology, exchange: Exchange) -> tuple[Tensor, Tensor, int]:
        module = nn.Linear(grads.shape[1], 1, bias=False).to(grads.dtype)
        state = HierState(module, HierConfig(density=density, exchange="regional", warmup_epochs=0), topology)
        comm = state.exchange.communicator = CountingCommunicator(topology, exchange)
        for _ in range(2):  # until the layout is settled
            hier_hook(state, Bucket(torch.zeros_like(grads[0]), list(module.parameters())))  # type: ignore[arg-type]
        comm.received = 0
        bucket = Bucket(grads[topology.rank].clone(), list(module.parameters()))
        applied = hier_hook(state, bucket).value()  # type: ignore[arg-type]
        state.commit_round()
        (left,) = state.store.committed.values()
        return applied, left, comm.received

    return run_threads(rank, [[node] for node in range(nodes)])


class CountingCommunicator(ThreadCommunicator):
    """Counts the bytes received from other nodes."""

    received = 0

    def exchange(self, message_B: Tensor) -> Tensor:
        self.received += message_B.nbytes * (self.topology.num_nodes - 1)
        return super().exchange(message_B)

    def all_to_all(self, messages_MB: Tensor) -> Tensor:
        self.received += messages_MB[1:].nbytes
        return super().all_to_all(messages_MB)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nodes", [3, 4, 5])
def test_regional_applies_the_largest_sums_and_keeps_the_rest(nodes: int, dtype: torch.dtype) -> None:
    """Every node has a spike in every region. With one pair per region only the spikes are applied."""
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


def test_regional_received_bytes_equal_the_plan() -> None:
    volumes = []
    for nodes in (2, 4, 8):
        results = exchange_once(nodes, torch.randn(nodes, 50_000), density=0.05)
        (received,) = {received for _, _, received in results}
        regions = Regional(TensorSpec(nodes, 1, 50_000), 2500, torch.bfloat16).regions
        assert received == 2 * (nodes - 1) * regions.row_nbytes
        volumes.append(received)
    pairs = message_bytes(50_000, 2500, torch.bfloat16)
    assert volumes[0] < 1.1 * pairs
    assert max(volumes) < 2.1 * pairs


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("nodes", [3, 4, 5])
def test_regional_non_finite_element_reaches_every_node_and_no_residual(nodes: int, bad: float) -> None:
    grads = torch.randn(nodes, 600)
    grads[1, 599] = bad
    for applied, left, _ in exchange_once(nodes, grads, density=0.01):
        assert applied[599].isnan()
        assert left.isfinite().all()


# -- dense16: sends everything at half the bytes, sums in fp32, and keeps rounding errors ------------------------------

ONE = torch.ones(())


def exchange(grads_MS: Tensor, residuals_MS: Tensor) -> tuple[Tensor, Tensor, int]:
    """Run a round of all nodes in one process; return applied gradients, residuals and received bytes per node."""
    nodes, numel = grads_MS.shape
    rounded, left_MS = Dense16(TensorSpec(nodes, 1, numel)), torch.full_like(grads_MS, torch.nan)
    shards = [Shard(grads_MS[m].clone(), residuals_MS[m], left_MS[m], ONE) for m in range(nodes)]
    sent = [rounded.split(shard) for shard in shards]
    arrived = [torch.stack([rows[m] for rows in sent]) for m in range(nodes)]
    rows = torch.stack([rounded.merge(arrived[m], m, left_MS[m]) for m in range(nodes)])
    received = (nodes - 1) * (sent[0][0].nbytes + rows[0].nbytes)
    return rounded.apply(rows, shards[0]), left_MS, received


@given(st.integers(1, 7), st.integers(1, 40), st.integers(0, 10**6))
def test_dense16_applied_plus_residual_equals_the_sum(nodes: int, numel: int, seed: int) -> None:
    """Includes shards with fewer elements than nodes, so that some nodes own no element."""
    generator = torch.Generator().manual_seed(seed)
    grads, residuals = (torch.randn(nodes, numel, generator=generator) for _ in range(2))
    applied, left, received = exchange(grads, residuals)
    total = (grads.double() + residuals.double()).sum(0)
    torch.testing.assert_close(applied.double() + left.double().sum(0), total, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(applied.double(), total, rtol=1e-2, atol=1e-2 * nodes)
    assert received == Dense16(TensorSpec(nodes, 1, numel)).bytes()


def test_dense16_sums_in_fp32() -> None:
    """In bfloat16, 256 + 1 + ... stays 256, because its values are 2 apart there."""
    grads = torch.tensor([[256.0], [1.0], [1.0], [1.0], [1.0]])
    applied, left, _ = exchange(grads, torch.zeros_like(grads))
    assert applied.item() == 260.0
    assert not left.any()


def test_dense16_rounding_errors_are_sent_later() -> None:
    """0.1% of a value is less than bfloat16's precision, so without the residual it would never be sent."""
    grads = torch.full((3, 10), 1.001)
    residuals, applied = torch.zeros_like(grads), torch.zeros(10)
    for _ in range(200):
        now, residuals, _ = exchange(grads, residuals)
        applied += now
    torch.testing.assert_close(applied, torch.full((10,), 600.6), rtol=0, atol=0.05)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_dense16_non_finite_element_reaches_all_and_no_residual(bad: float) -> None:
    grads = torch.randn(3, 10)
    grads[1, 9] = bad
    applied, left, _ = exchange(grads, torch.zeros_like(grads))
    assert not applied[9].isfinite()
    assert applied[:9].isfinite().all()
    assert left.isfinite().all()
