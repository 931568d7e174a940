"""Code that needs no ranks: configuration, schedule, layout, residuals, topology, cost."""

import dataclasses
import itertools
from collections import Counter
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_sparse.engine import Engine
from lightning_sparse.exchange import CommStats, Path, TensorSpec
from lightning_sparse.exchange.communicator import Stopwatch
from lightning_sparse.exchange.cost import PathChoice
from lightning_sparse.exchange.paths import PATHS, ExchangeName, num_selected
from lightning_sparse.exchange.rates import Link, Rates
from lightning_sparse.gradients import HierConfig, HierState
from lightning_sparse.gradients.config import Warmup
from lightning_sparse.gradients.groups import Layout, ParamGroup, group_of, refuse_sparse_gradients
from lightning_sparse.gradients.residual import Entry, ResidualStore
from lightning_sparse.kernels import message_bytes
from lightning_sparse.sharding import parameter_names
from lightning_sparse.strategy.callback import table
from lightning_sparse.topology import RankInfo, Topology, nodes_from_places

groups = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(
    lambda numels: ParamGroup(tuple(f"p{i}" for i in range(len(numels))), tuple(numels))
)


# -- topology ----------------------------------------------------------------------------------------------------------


@given(st.permutations([(n, f"host{n}", d) for n in range(3) for d in range(4)]))
def test_nodes_are_found_in_any_rank_order(places: list[tuple[int, str, int]]) -> None:
    nodes = nodes_from_places(places)
    assert sorted(rank for node in nodes for rank in node) == list(range(12))
    for m, node in enumerate(nodes):
        assert [places[rank] for rank in node] == [(m, f"host{m}", d) for d in range(4)]


def test_equal_local_ranks_are_ordered_by_global_rank() -> None:
    assert nodes_from_places([(0, "a", 0), (1, "b", 0), (2, "c", 0)]) == ((0,), (1,), (2,))
    assert nodes_from_places([(0, "a", 0), (0, "a", 0)]) == ((0, 1),)


def test_hosts_with_equal_node_rank_are_different_nodes() -> None:
    assert nodes_from_places([(0, "a", 0), (0, "b", 0)]) == ((0,), (1,))


@pytest.mark.parametrize(
    ("nodes", "kind"),
    [
        (((0,),), "one rank"),
        (((0, 1),), "one node"),
        (((0, 1), (2,)), "unequal nodes"),
        (((0, 2), (1, 3)), "hierarchical"),
        (((0,), (1,)), "hierarchical"),
    ],
)
def test_topology_describes_its_nodes_and_kind(nodes: tuple[tuple[int, ...], ...], kind: str) -> None:
    topology = Topology(nodes, rank=0)
    assert topology.kind == kind
    assert f"{len(nodes)} node(s)" in topology.describe()


@pytest.mark.parametrize(("nodes", "rank"), [(((0, 1), (1, 2)), 0), (((0, 2),), 0), ((), 0), (((0, 1),), 2)])
def test_topology_with_invalid_ranks_is_refused(nodes: tuple[tuple[int, ...], ...], rank: int) -> None:
    with pytest.raises(ValueError, match="nodes"):
        Topology(nodes, rank)


def test_named_nodes_override_hosts() -> None:
    """Two hosts of a rack may form one node, and one host may hold two nodes."""
    rack = [RankInfo(rank // 2, f"host{rank // 2}", rank % 2, f"rack{rank // 4}") for rank in range(8)]
    assert nodes_from_places(rack) == ((0, 1, 2, 3), (4, 5, 6, 7))
    split = [RankInfo(0, "host", rank, "ab"[rank % 2]) for rank in range(4)]
    assert nodes_from_places(split) == ((0, 2), (1, 3))
    with pytest.raises(ValueError, match=r"rank\(s\) 1, 2 do not name their node"):
        nodes_from_places([RankInfo(0, "host", 0, "a"), RankInfo(0, "host", 1), (0, "host", 2)])


# -- configuration and schedule ----------------------------------------------------------------------------------------


@given(st.floats(1e-4, 1.0), st.integers(0, 5))
def test_warm_up_falls_to_the_density_and_stays(density: float, epochs: int) -> None:
    warmup = Warmup(epochs=epochs)
    densities = [warmup.density(density, epoch, 10**6) for epoch in range(epochs + 3)]
    assert densities == sorted(densities, reverse=True)
    assert densities[epochs:] == [density] * 3
    assert all(0 < each <= 1 for each in densities)


@given(st.floats(1e-4, 1.0), st.integers(0, 40), st.integers(0, 5))
def test_warm_up_in_rounds_ends_in_a_run_of_one_epoch(density: float, rounds: int, epochs: int) -> None:
    densities = [Warmup(rounds=rounds).density(density, 0, index) for index in range(rounds + 3)]
    assert densities == sorted(densities, reverse=True)
    assert densities[rounds:] == [density] * 3
    both = Warmup(epochs, rounds)
    assert both.density(density, epochs, 0) == both.density(density, 0, rounds) == density, "the earlier end counts"
    assert Warmup().density(density, 0, 0) == density


def test_default_warm_up_is_the_smaller_of_epochs_and_a_share_of_the_run() -> None:
    assert Warmup.default(1000) == Warmup(4, 50)
    assert Warmup.default(float("inf")) == Warmup.default(-1) == Warmup(4, None)
    assert Warmup.default(1000).describe() == ("density warm-up ends at round 50 or epoch 4, whichever comes first")
    assert Warmup().describe() == Warmup(0, 8).describe() == ""


@given(st.floats(1e-6, 1.0), st.integers(1, 10**7))
def test_k_is_the_density_of_the_shard_rounded_up(density: float, numel: int) -> None:
    k = num_selected(density, numel)
    assert 1 <= k <= numel
    assert density * numel <= k < density * numel + 1


# -- cost --------------------------------------------------------------------------------------------------------------


DTYPES = ("float32", "bfloat16", "2bit")
BYTES_ONLY = Rates.of_link(1.0, 1)
HOST = Rates(Link(1e-4, 8e-9), Link(1e-5, 1e-10), add=2e-10, select=1e-9, scatter=4e-9, fill=4e-10, cast=1e-9)


def test_rates_too_high_to_measure_are_described_as_such() -> None:
    said = [dataclasses.replace(HOST, select=select).describe(1) for select in (1e-9, 0.0)]
    assert [each.rpartition(", ")[2] for each in said] == [
        "selection at 1 G elements/s",
        "selection at no measurable cost",
    ]


def _choice(nodes: int, devices: int, rates: Rates, **options: Any) -> PathChoice:
    ranks = iter(range(nodes * devices))
    topology = Topology(tuple(tuple(itertools.islice(ranks, devices)) for _ in range(nodes)), 0)
    choice = PathChoice(HierConfig(**options), topology, 10**6, lambda _: None)
    choice.rates = rates
    return choice


def _path(nodes: int, devices: int, numel: int, rates: Rates = BYTES_ONLY, **options: Any) -> Path:
    choice = _choice(nodes, devices, rates, **options)
    return choice.path(choice.work(numel, torch.float32), choice.config.density)


def test_sparse_wins_while_density_is_below_the_bound_of_pairs() -> None:
    """16 nodes, fp32 gradients: dense receives 7.5 bytes per element, dense16 receives 3.75.

    Pairs of 5, 3 or 1.25 bytes make it 75, 45 or 19 * density. Sparse must win by a margin.
    """
    densities = (0.01, 0.07, 0.08, 0.17, 0.2)
    paths = {dtype: [_path(16, 1, 10**6, density=d, value_dtype=dtype).name for d in densities] for dtype in DTYPES}
    assert paths["bfloat16"] == ["sparse", "sparse", "dense16", "dense16", "dense16"]
    assert paths["float32"] == ["sparse", "sparse", "sparse", "dense", "dense"]
    assert paths["2bit"] == ["sparse", "sparse", "sparse", "sparse", "dense16"]


def test_tiny_group_is_reduced_densely() -> None:
    assert _path(2, 1, 1).name == "dense"
    assert _path(4, 1, 300, HOST).name == "sparse"
    slow_to_begin = dataclasses.replace(HOST, inter=Link(1e-4, 8e-9), select=1e-6, cast=1e-6)
    assert _path(4, 1, 10_000, slow_to_begin).name == "dense"


def test_fast_network_uses_dense_rounds() -> None:
    fast = dataclasses.replace(HOST, inter=Link(1e-5, 1e-10))
    assert _path(4, 2, 10**7, HOST).name == "sparse"
    assert _path(4, 2, 10**7, fast).name == "flat", "the network inside the node is too slow to save time"
    slow_inside = dataclasses.replace(HOST, intra=HOST.inter)
    assert _path(4, 2, 10**7, dataclasses.replace(slow_inside, select=1e-6, cast=1e-6)).name == "flat"
    assert _path(4, 2, 10**7, dataclasses.replace(HOST, select=1e-6, cast=1e-6)).name == "dense"


def test_dense16_is_chosen_only_if_rounding_is_allowed_and_faster() -> None:
    slow_selection = dataclasses.replace(HOST, select=1e-5)
    assert _path(4, 2, 10**6, slow_selection).name == "dense16"
    assert _path(4, 2, 10**6, slow_selection, value_dtype="float32").name == "dense"
    assert _path(4, 2, 10**6, dataclasses.replace(slow_selection, cast=1e-5)).name == "dense"
    assert _choice(2, 2, slow_selection).path(TensorSpec(2, 2, 10**6), 0.01, exact=True).name == "dense"


def test_exchange_given_by_the_user_is_kept() -> None:
    fast = dataclasses.replace(HOST, inter=Link(1e-5, 1e-10))
    assert _path(4, 2, 10**7, fast, exchange="sparse").name == "sparse"
    assert _path(4, 2, 10**7, HOST, exchange="dense").name == "dense"
    given = _choice(4, 2, HOST, exchange="sparse")
    given.forbid_sparse = True
    assert given.path(TensorSpec(4, 2, 10**7), 0.01).name == "sparse", "objections apply to 'auto' only"


def test_auto_with_an_adaptive_optimizer_is_dense() -> None:
    choice = _choice(4, 2, HOST)
    assert choice.path(TensorSpec(4, 2, 10**7), 0.01).name == "sparse"
    choice.forbid_sparse = True
    assert choice.path(TensorSpec(4, 2, 10**7), 0.01).name == "dense16"


def test_fixed_cost_of_calls_decides_for_small_shards() -> None:
    """25 MB on 8 devices are 0.8 M elements per device, so the fixed cost of a call dominates."""
    fast = Rates(Link(1e-5, 2e-10), Link(5e-6, 1e-11), select=1e-11, fill=1e-11, cast=1e-10)
    calls = dataclasses.replace(fast, select_call=1e-3, cast_call=1e-3)
    small, large = TensorSpec(4, 8, 6_553_600), TensorSpec(4, 8, 6_553_600_000)
    assert _choice(4, 8, fast).path(small, 0.01).name == "sparse"
    assert _choice(4, 8, calls).path(small, 0.01).name == "dense"
    assert _choice(4, 8, calls).path(large, 0.01).name == "sparse"


def _of(name: str, work: TensorSpec, density: float = 0.01) -> Path:
    (kind,) = (each for each in PATHS if each.name == name)
    path = kind.of(work, density, torch.bfloat16)
    assert path is not None
    return path


def test_predicted_times_equal_times_calculated_by_hand() -> None:
    work = TensorSpec(num_nodes=4, num_devices=2, numel=2000)
    inside = 2 * (1e-5 + 4000e-10) + 4000 * 2e-10
    assert _of("dense", work).seconds(HOST) == pytest.approx(inside + 6e-4 + 6000 * 8e-9 + 3000 * 2e-10)
    assert _of("dense16", work).seconds(HOST) == pytest.approx(inside + 6e-4 + 3000 * 8e-9 + 1000 * 1e-9)
    assert _of("flat", work).seconds(HOST) == pytest.approx(14e-4 + 7000 * 8e-9 + 7000 * 2e-10)
    message = message_bytes(1000, 10, torch.bfloat16)
    expected = inside + 3e-4 + 3 * message * 8e-9 + 1000 * (1e-9 + 4e-10) + 40 * 4e-9
    assert _of("sparse", work).seconds(HOST) == pytest.approx(expected)

    row = message_bytes(250, 3, torch.bfloat16)
    expected = inside + 6e-4 + 6 * row * 8e-9 + 1250 * (1e-9 + 4e-10) + 24 * 4e-9
    assert _of("regional", work).seconds(HOST) == pytest.approx(expected)


@pytest.mark.parametrize("name", [kind.name for kind in PATHS])
def test_seconds_between_nodes_are_the_network_share_of_a_round(name: str) -> None:
    """Without time inside the node and on the host, only the time between nodes remains."""
    rates = Rates(HOST.inter, Link(0.0, 0.0), add=0.0)
    path = _of(name, TensorSpec(4, 2, 2000))
    assert path.seconds_between(rates) == pytest.approx(path.seconds(rates))


def test_number_of_applied_entries_per_path() -> None:
    applied = {name: _of(name, TensorSpec(16, 1, 10_000)).applied for name in ("sparse", "regional", "dense")}
    assert applied == {"sparse": 1600, "regional": 100, "dense": 10_000}


def test_exchange_options_match_the_paths() -> None:
    assert set(get_args(ExchangeName)) == {"auto", *(kind.name for kind in PATHS if kind.reduces_shards)}


def test_rates_survive_a_checkpoint() -> None:
    assert Rates.from_list(HOST.to_list()) == HOST


@pytest.mark.parametrize("gbps", [0, -1.0, float("inf"), float("nan"), True, "1"])
def test_invalid_inter_gbps_is_refused(gbps: object) -> None:
    with pytest.raises(ValueError, match="inter_gbps=.* must be a number above 0"):
        HierConfig(inter_gbps=gbps)  # type: ignore[arg-type]


@pytest.mark.parametrize("exchange", [each for each in get_args(ExchangeName) if each != "auto"])
def test_inter_gbps_with_a_fixed_exchange_is_refused(exchange: Any) -> None:
    with pytest.raises(ValueError, match=f"exchange='{exchange}'. Omit inter_gbps"):
        HierConfig(exchange=exchange, inter_gbps=1.0)


# -- layout ------------------------------------------------------------------------------------------------------------


@given(groups, st.integers(1, 5))
def test_shards_of_all_devices_hold_each_element_once(group: ParamGroup, devices: int) -> None:
    shard = group.shard_numel(devices)
    flat = torch.full((devices * shard,), -1.0)
    for device in range(devices):
        for name, here, there in group.shard_slices(group.names, device, devices):
            flat[device * shard :][here] = torch.arange(group.numel, dtype=torch.float32)[group.slices[name]][there]
    assert torch.equal(flat[: group.numel], torch.arange(group.numel, dtype=torch.float32))


def test_layout_settles_after_two_equal_rounds() -> None:
    a, b, c = (ParamGroup((name,), (1,)) for name in "abc")
    layout, settled = Layout(), []
    for round_groups in ([a, b], [b, a], [b, a], [b, a], [c], [b, a]):
        for group in round_groups:
            layout.record(group)
        settled.append(layout.end_round())
    assert settled == [False, False, True, False, False, False]
    assert layout.settled == (b, a)


def test_big_bucket_is_split_into_the_settled_groups() -> None:
    ab, cd = ParamGroup(("a", "b"), (1, 2)), ParamGroup(("c", "d"), (3, 4))
    layout = Layout()
    layout.fix((ab, cd))
    assert layout.groups_in(ParamGroup(("d", "c", "b", "a"), (4, 3, 2, 1))) == (ab, cd)
    assert layout.groups_in(ab) == (ab,)
    odd = ParamGroup(("a", "b", "c"), (1, 2, 3))
    assert layout.groups_in(odd) == (odd,), "a group that is split cannot be used"


def test_parameter_of_another_module_is_refused() -> None:
    with pytest.raises(ValueError, match="the module that DistributedDataParallel wraps"):
        group_of(list(nn.Linear(2, 2).parameters()), parameter_names(nn.Linear(2, 2)))


def test_sparse_attribute_of_other_modules_is_ignored() -> None:
    attention = nn.Linear(2, 2)
    attention.sparse = True  # type: ignore[assignment]
    refuse_sparse_gradients(attention)


def test_sparse_embeddings_are_refused() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(4, 2, sparse=True)})
    with pytest.raises(ValueError, match=r"embedding\(s\) words: sparse=True.*Use sparse=False"):
        HierState(model, HierConfig(), Topology(((0,),), 0))


# -- residuals ---------------------------------------------------------------------------------------------------------


@given(groups, st.integers(1, 4), st.data())
def test_discarded_gradient_keeps_its_residual(group: ParamGroup, devices: int, data: st.DataObject) -> None:
    discarded = data.draw(st.sets(st.sampled_from(group.names)))
    before_is_zero, after_is_zero = data.draw(st.booleans()), data.draw(st.booleans())
    for device in range(devices):
        store = ResidualStore(device, devices)
        shard = group.shard_numel(devices)
        if not before_is_zero:
            store.entries[group] = Entry(torch.full((shard,), 1.0))
        store.propose(group, None if after_is_zero else torch.full((shard,), 2.0))
        copy = store.committed_copy(frozenset(discarded))
        staged = store.entries[group].proposed
        assert staged is None or (staged == 2.0).all(), "a checkpoint changes nothing"
        store.commit(frozenset(discarded))
        held = store.committed.get(group, torch.zeros(shard))
        assert torch.equal(held, copy.committed.get(group, torch.zeros(shard)))
        for name in group.names:
            expected = (not before_is_zero) * 1.0 if name in discarded else (not after_is_zero) * 2.0
            for _, here, _ in group.shard_slices([name], device, devices):
                assert (held[here] == expected).all()


def test_residual_follows_its_parameters_into_new_groups() -> None:
    """With one device per node gathering is the identity. A parameter that no new group contains stays parked."""
    store = ResidualStore(0, 1)
    store.propose(ParamGroup(("a", "b", "frozen"), (2, 3, 1)), torch.arange(6.0))
    store.commit(frozenset())
    cpu = torch.device("cpu")
    for names, numels in [(("b", "c"), (3, 2)), (("a",), (2,))]:
        store.regroup(ParamGroup(names, numels), lambda shard: shard, cpu)
    held = {group.names: shard.tolist() for group, shard in store.committed.items()}
    assert held == {("b", "c"): [2.0, 3.0, 4.0, 0.0, 0.0], ("a",): [0.0, 1.0]}
    assert store.by_name["frozen"].tolist() == [5.0]


# -- the summary of a fit: times without waiting, and the table --------------------------------------------------------


class Events:
    """Stands in for a CUDA stream whose events are passed only when the device reaches them."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []
        self.passed = 0

    def __call__(self, enable_timing: bool) -> Any:
        assert enable_timing
        stream = self

        class Event:
            place: int

            def record(self, _: object) -> None:
                stream.recorded.append(self)
                self.place = len(stream.recorded)

            def synchronize(self) -> None:
                assert self.query(), "the host would wait"

            def query(self) -> bool:
                return self.place <= stream.passed

            def elapsed_time(self, end: Any) -> float:
                assert self.query(), "reading the time of a pending event would wait"
                assert end.query(), "reading the time of a pending event would wait"
                return 1000.0 * (end.place - self.place)

        return Event()


def test_stopwatch_reads_only_events_that_the_device_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    events, watch, device = Events(), Stopwatch(), torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "Event", events)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    for _ in range(3):
        with watch.running(device):
            pass
    assert watch.seconds() == 0
    events.passed = 5  # the third interval is being measured
    assert watch.seconds() == 2
    events.passed = 6
    assert watch.seconds() == 3
    assert not watch._open


def test_stopwatch_interval_that_raises_is_not_counted() -> None:
    watch = Stopwatch()
    with pytest.raises(RuntimeError), watch.running(torch.device("cpu")):
        raise RuntimeError
    assert watch.seconds() == 0


def test_stats_of_a_fit_exclude_earlier_rounds() -> None:
    stats = CommStats()
    stats.record("dense", sent=100, applied=100, total=100, nbytes=300, dense_nbytes=400)
    stats.end_round()
    before = CommStats(**{**vars(stats), "paths": Counter(stats.paths)})
    for _ in range(2):
        stats.record("sparse", sent=1, applied=2, total=100, nbytes=4, dense_nbytes=400)
        stats.end_round()
    late = stats.since(before)
    assert (late.rounds, late.bytes_between_nodes, late.dense_equivalent_bytes) == (2, 8, 800)
    assert late.paths == {"sparse": 200}
    assert table(late, 0.5, unsent=3.0, ratio=2.0).splitlines() == [
        "traffic of one device with other nodes, in 2 steps, dense exchanges at start and end included:",
        "  received per step   4 B; plain DDP 400 B, 100.0 times the bytes",
        "  paths               100.0% sparse (share of entries)",
        "  density             1.00% sent, at most 2.00% applied",
        "  between nodes       250.0 ms per step, waiting for other nodes included",
        "  not sent yet        norm 3, 2.0 times that of the gradient",
    ]


def test_deprecated_names_of_an_engine_call_the_new_ones() -> None:
    engine = Mock()
    Engine.end(engine)
    Engine.shared_weights(engine)
    engine.close.assert_called_once_with()
    engine.global_weights.assert_called_once_with()
