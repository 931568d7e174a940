"""The order of samples: none is lost, repeated samples are counted, and (seed, epoch, step) determine each step."""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse.data.cache.store import owners
from lightning_sparse.data.config import SHUFFLES
from lightning_sparse.data.pipeline.sampler import (
    EpochPlan,
    EpochSegment,
    Sampler,
    SamplerConfig,
    assign,
    evaluation_batches,
    repeated,
)
from lightning_sparse.data.rng import bits, shuffled, uniform
from tests.data.fits import global_batch

configs = st.builds(
    SamplerConfig,
    batch_size=st.integers(1, 5),
    devices=st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple),
    shuffle=st.sampled_from(SHUFFLES),
    seed=st.integers(0, 2**40),
)
counts = st.integers(12, 90)


def sampler_of(count: int, config: SamplerConfig, classes: int = 5) -> Sampler:
    labels = np.arange(count) % classes
    return Sampler(np.arange(count), partial(owners, labels, seed=7), config)


def seen(plan: EpochPlan, first: int = 0, last: int | None = None) -> list[list[list[int]]]:
    """Return samples by step and rank."""
    steps = range(first, plan.steps if last is None else last)
    return [[each.tolist() for node in global_batch(plan, step) for each in node] for step in steps]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [sample for ranks in steps for rank in ranks for sample in rank]


# -- random bits -------------------------------------------------------------------------------------------------------


def test_random_bits_are_equal_in_all_versions() -> None:
    """Checkpoints rely on equal bits on all machines and with all versions of NumPy."""
    assert bits(0).tolist() == [0xE220A8397B1DCDAF]  # the first number of SplitMix64 seeded with 0
    assert bits(7, 1, [2, 3]).tolist() == [12751620290806497687, 1903218893931705413]
    assert shuffled(np.arange(10), 0, 0).tolist() == [6, 8, 3, 7, 5, 0, 2, 1, 4, 9]


def test_uniform_numbers_are_uniform_and_independent() -> None:
    drawn = uniform(3, np.arange(200)[:, None], np.arange(200))
    assert np.histogram(drawn, 10, (0, 1))[0].min() > 3700  # of 4000 expected
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(drawn[:, :-1].ravel(), drawn[:, 1:].ravel())[0, 1]) < 0.02


@given(st.sets(st.integers(0, 10**6), max_size=60), st.integers(0, 2**63), st.integers(0, 99))
def test_shuffling_keeps_all_values_and_ignores_their_order(values: set[int], seed: int, epoch: int) -> None:
    one = shuffled(np.array(sorted(values), np.int64), seed, epoch)
    other = shuffled(np.array(sorted(values, reverse=True), np.int64), seed, epoch)
    assert sorted(one.tolist()) == sorted(values)
    assert one.tolist() == other.tolist()


# -- an epoch ----------------------------------------------------------------------------------------------------------


@given(counts, configs, st.integers(0, 5))
def test_epoch_sees_each_sample_and_counts_repeated_samples(count: int, config: SamplerConfig, epoch: int) -> None:
    sampler = sampler_of(count, config)
    plan = sampler.epoch(epoch)
    steps = seen(plan)
    assert len(steps) == sampler.steps == sampler.epoch(epoch + 1).steps, "all epochs are equally long"
    assert {len(rank) for ranks in steps for rank in ranks} == {config.batch_size}, "all batches are full"
    times = Counter(flat(steps))
    assert set(times) == set(range(count)), "nothing is lost"
    assert sum(times.values()) - count == plan.num_repeated
    if config.shuffle == "global":
        assert plan.num_repeated < config.global_batch


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_epochs_differ_and_repeat_with_the_seed(shuffle: str) -> None:
    config = SamplerConfig(batch_size=4, devices=(2, 2), shuffle=shuffle)  # type: ignore[arg-type]
    first, again = (seen(sampler_of(96, config).epoch(0)) for _ in range(2))
    assert first == again
    assert first != seen(sampler_of(96, config).epoch(1))
    other = SamplerConfig(batch_size=4, devices=(2, 2), shuffle=shuffle, seed=1)  # type: ignore[arg-type]
    assert first != seen(sampler_of(96, other).epoch(0))


def test_local_shuffle_uses_samples_of_the_node() -> None:
    config = SamplerConfig(batch_size=4, devices=(1, 1, 1), shuffle="local")
    home = owners(np.arange(240) % 5, 3, seed=7)
    for epoch in range(2):
        plan = sampler_of(240, config).epoch(epoch)
        for node in range(3):
            used = np.concatenate([plan.batch(step, node, 0) for step in range(plan.steps)])
            assert set(np.flatnonzero(home == node)) == set(used)


def test_global_shuffle_reads_only_the_overflow_from_peers() -> None:
    config = SamplerConfig(batch_size=64, devices=(2, 2), shuffle="global")
    sampler = sampler_of(25_600, config)
    home = owners(np.arange(25_600) % 5, 2, seed=7)
    plan = sampler.epoch(0)
    abroad = sum(
        int((home[each] != node).sum())
        for step in range(plan.steps)
        for node, batches in enumerate(global_batch(plan, step))
        for each in batches
    )
    # A node's share of 256 draws deviates from 128 by 8 * sqrt(2 / pi) = 6.4 on average; half of it per node.
    assert 0.015 < abroad / 25_600 < 0.035


def test_devices_of_a_node_read_as_many_samples_from_other_nodes() -> None:
    """Otherwise, all devices would wait for the device that reads most."""
    config = SamplerConfig(batch_size=64, devices=(8,) * 4, shuffle="global")
    home = owners(np.arange(25_600) % 5, 4, seed=7)
    plan = sampler_of(25_600, config).epoch(0)
    for step in range(plan.steps):
        for node in range(4):
            abroad = [int((home[plan.batch(step, node, device)] != node).sum()) for device in range(8)]
            assert max(abroad) - min(abroad) <= 1


@given(st.integers(1, 40), st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 99))
def test_assign_gives_nodes_their_own_samples_first(seed: int, extra: list[int], draw: int) -> None:
    capacity = np.array(extra) + 1
    home = (bits(seed, draw, np.arange(capacity.sum())) % np.uint64(len(capacity))).astype(np.int64)
    nodes = assign(home, capacity)
    assert np.bincount(nodes, minlength=len(capacity)).tolist() == capacity.tolist()
    kept = [int(((nodes == node) & (home == node)).sum()) for node in range(len(capacity))]
    assert kept == [min(int((home == node).sum()), int(capacity[node])) for node in range(len(capacity))]


@pytest.mark.parametrize(
    ("devices", "digest"), [((3, 1, 2), "ae91995c103224c9"), ((2,) * 300, "146c94e91866413b")], ids=["3", "300"]
)
def test_batches_are_equal_in_all_versions(devices: tuple[int, ...], digest: str) -> None:
    """Checkpoints rely on it. Owners are stored in 8 bits for 3 nodes, and in 16 bits for 300."""
    plan = sampler_of(100_000, SamplerConfig(batch_size=70, devices=devices)).epoch(1)
    batches = np.concatenate([plan.batch(plan.steps - 2, node, 0) for node in (0, 1, len(devices) - 1)])
    assert hashlib.sha256(batches.astype("<i8").tobytes()).hexdigest().startswith(digest)


@pytest.mark.parametrize("skew", [0, 1], ids=["random", "a node is full early"])
def test_large_batch_is_assigned_as_single_samples(skew: int) -> None:
    """Most samples of a large batch are counted without sorting, unless a node is full early."""
    capacity = np.array([100, 300, 200])
    home = np.repeat(np.arange(3), capacity)[shuffled(np.arange(600), 3, 0)]
    home[:200] *= 1 - skew
    expected, left, over = home.copy(), capacity.copy(), []
    for position, node in enumerate(home.tolist()):
        left[node] -= 1
        if left[node] < 0:
            over.append(position)
    expected[over] = np.repeat(np.arange(3), left.clip(0))
    assert len(over) > 100 if skew else over == []
    assert assign(home, capacity).tolist() == expected.tolist()
    home[-40:] = 1  # the overflow of a draw is at the end
    assert np.bincount(assign(home, capacity)).tolist() == capacity.tolist()


def test_global_batches_do_not_depend_on_the_number_of_nodes() -> None:
    configs = [SamplerConfig(batch_size=16 // (n * d), devices=(d,) * n) for n, d in [(1, 1), (2, 2), (4, 1), (1, 4)]]
    sequences = [[sorted(sum(ranks, [])) for ranks in seen(sampler_of(203, config).epoch(2))] for config in configs]
    assert all(each == sequences[0] for each in sequences)


# -- resuming ----------------------------------------------------------------------------------------------------------


@given(counts, configs, st.integers(0, 5), st.data())
def test_resumed_epoch_gives_the_rest(count: int, config: SamplerConfig, epoch: int, data: st.DataObject) -> None:
    sampler = sampler_of(count, config)
    whole = sampler.epoch(epoch)
    done = data.draw(st.integers(0, whole.steps))
    rest = sampler.epoch(epoch, [EpochSegment(config, done)])
    assert rest.steps == whole.steps - done
    assert seen(rest) == seen(whole, done)


@given(counts, st.lists(configs, min_size=2, max_size=3), st.data())
def test_epoch_resumed_on_other_nodes_gives_the_rest(
    count: int, chain: list[SamplerConfig], data: st.DataObject
) -> None:
    """The run may move several times within one epoch."""
    segments: list[EpochSegment] = []
    times: Counter[int] = Counter()
    num_repeated = 0
    for position, config in enumerate(chain):
        plan = sampler_of(count, config).epoch(1, segments)
        last = position == len(chain) - 1
        steps = plan.steps if last else data.draw(st.integers(0, max(0, plan.steps - 1)))
        times.update(flat(seen(plan, 0, steps)))
        segments.append(EpochSegment(config, steps))
        num_repeated += plan.num_repeated
    assert set(times) == set(range(count)), "nothing is lost"
    assert sum(times.values()) <= count + num_repeated


def test_segment_survives_a_checkpoint() -> None:
    segment = EpochSegment(SamplerConfig(batch_size=3, devices=(2, 1), shuffle="local", seed=5), 9)
    state = segment.state_dict()
    assert EpochSegment.from_state(state) == segment
    options = {"batch_size": 3, "devices": [2, 1], "shuffle": "local", "seed": 5}
    assert state == {"layout": options, "steps": 9}


# -- evaluation --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 90), configs, st.booleans())
def test_evaluation_any_count_sees_each_sample_once(count: int, config: SamplerConfig, pairs: bool) -> None:
    home = owners(np.arange(count) % 5, config.num_nodes, seed=7)
    batches = [
        [each.tolist() for each in evaluation_batches(np.arange(count), home, config, node, device, pairs=pairs)]
        for node, devices in enumerate(config.devices)
        for device in range(devices)
    ]
    assert len({len(each) for each in batches}) == 1
    largest = max(2, config.batch_size) if pairs else config.batch_size
    assert all(0 < len(batch) <= largest for each in batches for batch in each)
    times = Counter(sample for each in batches for batch in each for sample in batch)
    ranks = sum(config.devices)
    assert set(times) == set(range(count))
    twice = 0 if pairs else repeated(count, config)
    assert sorted(times.values()) == [1] * (count - twice) + [2] * twice if count >= ranks else [ranks] * count
    assert max(times.values()) <= (2 if twice else 1) or count < ranks


def test_evaluation_rank_without_a_sample_for_the_last_batch_moves_one() -> None:
    """Two of four ranks have 33 samples in batches of 32, and the other two ranks have 32."""
    config, home = SamplerConfig(batch_size=32, devices=(2, 2)), np.arange(130) % 2
    ranks = [(node, device) for node in range(2) for device in range(2)]
    batches = [evaluation_batches(np.arange(130), home, config, *rank, pairs=True) for rank in ranks]
    sizes = sorted([len(batch) for batch in each] for each in batches)
    assert sizes == [[31, 1], [31, 1], [32, 1], [32, 1]]


# -- errors ---------------------------------------------------------------------------------------------------


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 sample\(s\) are too few for 3 nodes"):
        sampler_of(2, SamplerConfig(batch_size=1, devices=(1, 1, 1)))
