"""The loaders, with a pipeline that makes no batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightning_sparse.data.config import DataError
from lightning_sparse.data.pipeline.images import Batch
from lightning_sparse.data.pipeline.loader import BatchRequest, EvalLoader, TrainLoader, Turn
from lightning_sparse.data.pipeline.sampler import EpochSegment, Sampler, SamplerConfig
from lightning_sparse.elastic.sampling import sampler_of

CONFIG = SamplerConfig(batch_size=4)


class Echo:
    """Returns the size as the image and the indices as labels. Reads two requests ahead, as real pipelines do."""

    prefetch_depth = 2

    def __init__(self) -> None:
        self.begun = self.ended = 0

    def run(self, requests: Iterable[BatchRequest]) -> Generator[Batch, None, None]:
        self.begun += 1
        waiting: list[BatchRequest] = []
        try:
            for request in requests:
                waiting.append(request)
                if len(waiting) > 2:
                    yield self.batch(waiting.pop(0))
            yield from map(self.batch, waiting)
        finally:
            self.ended += 1

    def batch(self, request: BatchRequest) -> Batch:
        return torch.tensor([request.size, request.epoch]), torch.from_numpy(request.indices)

    def close(self) -> None: ...


def loader(config: SamplerConfig = CONFIG, count: int = 22, **options: Any) -> TrainLoader:
    sampler = Sampler(np.arange(count), lambda nodes: np.arange(count) % nodes, config)
    return TrainLoader(sampler, Echo(), **{"sizes": {0: 8, 2: 16}, "fingerprint": "same", **options})


def samples(batches: Iterable[Batch]) -> list[list[int]]:
    return [labels.tolist() for _, labels in batches]


def test_loader_epoch_follows_set_epoch_and_iterators_are_complete() -> None:
    one = loader()
    assert len(one) == 6
    zero = samples(one)
    assert len(zero) == 6
    assert samples(one) == zero, "the same epoch again"
    one.batch_sampler.sampler.set_epoch(1)  # as Lightning calls it
    assert samples(one) != zero
    one.set_epoch(0)
    assert samples(one) == zero
    assert not hasattr(one, "sampler"), "Lightning would warn about a sampler that it cannot replace"


def test_second_iterator_of_a_split_ends_the_first_with_an_error() -> None:
    turn = Turn()
    one, other = loader(turn=turn), loader(turn=turn)
    batches = iter(one)
    next(batches)
    assert len(other) == 6
    iter(other)
    next(batches)  # a loader that is not iterated changes nothing
    next(iter(other))
    with pytest.raises(DataError, match="another iterator over the same split has begun"):
        next(batches)
    assert len(samples(one)) == 6


def test_loader_with_fixed_samples_still_changes_sizes_by_epoch() -> None:
    fixed = loader(fixed=True)
    zero = samples(fixed)
    fixed.set_epoch(3)
    batches = list(fixed)
    assert samples(batches) == zero
    assert batches[0][0].tolist() == [16, 3]


def test_new_iterator_ends_the_old_iterator() -> None:
    turn = Turn()
    one = loader(turn=turn)
    pipeline: Any = one._pipeline
    iter(one)
    assert pipeline.begun == 0
    old = iter(one)
    next(old)
    new = iter(one)
    next(new)
    assert (pipeline.begun, pipeline.ended) == (2, 1)
    turn.end()
    assert pipeline.ended == 2
    with pytest.raises(DataError, match="the DataModule was closed"):
        next(new)


@pytest.mark.parametrize("done", [0, 1, 4, 6])
def test_state_counts_used_batches(done: int) -> None:
    whole = loader()
    whole.set_epoch(1)
    expected = samples(whole)
    stopped = loader()
    stopped.set_epoch(1)
    batches = iter(stopped)
    for _ in range(done):
        next(batches)
    state = stopped.state_dict()
    for resumed in (loader(), loader()):
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state, "before its first batch"
        resumed.set_epoch(1)
        assert len(resumed) == 6
        assert samples(resumed) == expected[done:]
        assert samples(resumed) == expected, "the next iterator is complete"
        resumed.load_state_dict(state)
        resumed.set_epoch(2)
        assert len(samples(resumed)) == 6, "the state was of another epoch"


def test_state_of_other_batches_is_converted_and_saved() -> None:
    stopped = loader()
    batches = iter(stopped)
    first = samples([next(batches), next(batches)])
    told: list[int] = []
    moved = loader(SamplerConfig(batch_size=2), on_resume=told.append)
    moved.load_state_dict(stopped.state_dict())
    moved.set_epoch(0)
    assert told == [4], "two batches of four samples are four batches of two samples"
    assert len(moved) == 11
    batches = iter(moved)
    second = samples([next(batches) for _ in range(3)])
    again = loader(on_resume=told.append)
    again.load_state_dict(moved.state_dict())
    again.set_epoch(0)
    again.set_epoch(0)
    assert told == [4, 6 - 2]
    third = samples(again)
    seen = [sample for part in (first, second, third) for each in part for sample in each]
    assert sorted(seen[:22]) == list(range(22))


def test_state_of_another_data_set_restarts_the_epoch(caplog: pytest.LogCaptureFixture) -> None:
    stopped = loader()
    next(iter(stopped))
    told: list[int] = []
    other = loader(fingerprint="another", on_resume=told.append)
    with caplog.at_level(logging.WARNING, "lightning_sparse"):
        other.load_state_dict(stopped.state_dict())
        other.load_state_dict(stopped.state_dict())
    other.set_epoch(0)
    assert len(caplog.records) == 1
    assert "the data set has changed since the checkpoint was saved" in caplog.text
    assert told == [0]
    assert len(samples(other)) == 6


def test_evaluation_loader_repeats_its_batches() -> None:
    batches = [np.array([1, 2]), np.array([3])]
    one = EvalLoader(batches, Echo(), size=16)
    assert len(one) == 2
    assert samples(one) == samples(one) == [[1, 2], [3]]


def test_loaders_of_elastic_nodes_share_an_epoch_and_restart_it() -> None:
    def every_second(place: int) -> Callable[[list[int], int], Iterator[int]]:
        return lambda order, before: (each for at, each in enumerate(order, before) if at % 2 == place)

    whole = [each for batch in samples(loader()) for each in batch][:22]
    one, other = loader(), loader()
    assert sampler_of(one) is one, "elastic nodes recognize a loader by its attributes"
    for place, each in enumerate((one, other)):
        each.load_state_dict({"epoch": 0, "segments": [EpochSegment(CONFIG, 3).state_dict()], "fingerprint": "same"})
        each.set_share(every_second(place))
        with pytest.raises(TypeError, match="depends on the nodes"):
            len(each)
    assert [samples(one), samples(other)] == [in_fours(whole[0::2]), in_fours(whole[1::2])]
    assert one.state_dict()["segments"][0]["steps"] == 0, "an unshared loader can load this state"
    one.load_state_dict({**one.state_dict(), "epoch": 1})
    begun, sizes = samples(one), {int(size[1]) for size, _ in one}
    assert begun != in_fours(whole[0::2])
    assert sizes == {1}, "the epoch that was loaded"


def in_fours(indices: list[int]) -> list[list[int]]:
    return [indices[at : at + 4] for at in range(0, len(indices) // 4 * 4, 4)]
