"""Iterables for the Trainer: the batches of a rank, with a position that is saved and restored.

They are plain iterables, not DataLoaders, so Lightning neither replaces nor adds a sampler. Lightning calls

- iter() as a check: an iterator starts to work with its first next(),
- set_epoch() of ``batch_sampler.sampler``; an attribute ``sampler`` would make ``overfit_batches`` warn,
- len(): batches of a whole epoch, equal on all ranks. When resuming, Lightning adds the batches that are done,
- state_dict() and load_state_dict(): saved with the loops, loaded before the first batch of a resumed epoch.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import islice
from multiprocessing.util import Finalize
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.data.config import DataError, size_at
from lightning_sparse.data.decode import EXIT_PRIORITY
from lightning_sparse.data.pipeline.sampler import EpochSegment, Indices, Sampler
from lightning_sparse.messages import log

Share = Callable[[list[int], int], Iterator[int]]
"""Given all samples of an epoch in order, and how many all epochs before have: yields those of this rank."""


class BatchRequest(NamedTuple):
    """A request for one batch of this rank.

    indices: of the samples in the manifest, [B]. epoch: for random transforms. size: height and width of images; 0 for
    other samples. train: whether transforms are random.
    """

    indices: NDArray[np.int64]
    epoch: int
    size: int
    train: bool


class Pipeline(Protocol):
    """Makes batches of requests, in order and ahead of time.

    `prefetch_depth`: requests that it takes, at most, before it yields the batch of the first of them.
    """

    prefetch_depth: int

    def run(self, requests: Iterable[BatchRequest]) -> Generator[Any, None, None]:
        """Yield batches; of images: float32 [B, 3, size, size] and labels int64 [B].

        Work starts with the first next() and stops when the generator is closed.
        """

    def close(self) -> None: ...


def label_tensor(labels: Sequence[Any]) -> Tensor:
    """Return labels as they come from a store: int64, or float32 if one of them is not whole, [B] or [B, L]."""
    tensor = torch.from_numpy(np.array(labels))
    if tensor.ndim == 2 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    return tensor.float() if tensor.is_floating_point() else tensor


class Turn:
    """The open iterator of a split. There is at most one, because the loaders of a split share a pipeline."""

    def __init__(self) -> None:
        self._batches: Generator[Any, None, None] | None = None

    def begin(self, batches: Generator[Any, None, None]) -> None:
        self.end()
        self._batches = batches

    def end(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._batches = None

    def check(self, batches: Generator[Any, None, None]) -> None:
        """Raise DataError if the batches ended because another iterator began, or because the data was closed."""
        if batches is not self._batches:
            raise DataError(
                "this epoch cannot continue: another iterator over the same split has begun, or the DataModule was "
                "closed. In hooks of an epoch, use the batch that the hook receives, or a DataLoader of your own."
            )


class _Loader:
    def __init__(self, pipeline: Pipeline, with_indices: bool, turn: Turn | None) -> None:
        self._pipeline, self._with_indices, self._turn = pipeline, with_indices, turn or Turn()
        self._done = 0  # batches of this epoch that were handed out

    def _requests(self) -> Iterator[BatchRequest]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        indices: deque[Indices] = deque()  # of the batches that are made
        batches = self._pipeline.run(self._record_indices(indices))
        self._turn.begin(batches)
        try:
            for batch in batches:
                self._done += 1  # prefetched batches do not count: a resumed run makes them again
                own = indices.popleft()
                parts = (*batch, torch.from_numpy(own)) if self._with_indices else batch
                yield parts if len(parts) > 1 else parts[0]
            self._turn.check(batches)
        finally:
            batches.close()

    def _record_indices(self, indices: deque[Indices]) -> Iterator[BatchRequest]:
        for request in self._requests():
            indices.append(request.indices)
            yield request


class TrainLoader(_Loader):
    """Random batches of a rank, one epoch per iterator.

    Args:
        rank: node and device of this rank.
        sizes: image sizes by epoch; None for samples other than images.
        fingerprint: fingerprint of the manifest; the state of another data set is not restored.
        fixed: use the samples of epoch 0 in every epoch (for ``overfit_batches``).
        on_resume: called in ``set_epoch`` of a resumed epoch, with the number of its batches that are done. Only if a
            run with other ranks or batches saved the state, whose own count does not apply.
    """

    def __init__(
        self,
        sampler: Sampler,
        pipeline: Pipeline,
        *,
        rank: tuple[int, int] = (0, 0),
        sizes: dict[int, int] | None = None,
        fingerprint: str = "",
        fixed: bool = False,
        on_epoch: Callable[[int], None] = lambda epoch: None,
        on_resume: Callable[[int], None] = lambda done: None,
        with_indices: bool = False,
        turn: Turn | None = None,
    ) -> None:
        super().__init__(pipeline, with_indices, turn)
        self._sampler, self._rank, self._sizes = sampler, rank, sizes
        self._fingerprint, self._fixed, self._on_epoch, self._on_resume = fingerprint, fixed, on_epoch, on_resume
        self._epoch = 0
        self._before: tuple[EpochSegment, ...] = ()  # steps of this epoch that were done with other configs
        self._resumes = False  # the next iterator continues instead of starting over
        self._loaded: dict[str, Any] = {}
        self._corrected: int | None = None  # batches that are done, as this run counts them
        self._share: Share | None = None
        self.before_epoch: Callable[[int], None] = lambda _: None
        self.on_use: Callable[[TrainLoader], None] = lambda _: None  # called by ``set_epoch``
        self.batch_size = sampler.config.batch_size
        self.prefetch_depth = pipeline.prefetch_depth

    def set_share(self, share: Share) -> None:
        """Draw the samples that `share` yields in each epoch, for elastic nodes."""
        self._share = share
        # the number of batches is unknown, so a loader that resumes begins its epoch anew
        self._before, self._done, self._resumes, self._corrected = (), 0, False, None

    @property
    def batch_sampler(self) -> SimpleNamespace:
        # Lightning calls set_epoch() of its sampler
        return SimpleNamespace(sampler=self)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iterator. Lightning calls this; a custom training loop must, too."""
        self.before_epoch(epoch)
        self.on_use(self)
        if epoch != self._epoch:
            self._epoch, self._before, self._done, self._resumes = epoch, (), 0, False
        elif self._corrected is not None:  # now, when Lightning has restored its own count
            self._on_resume(self._corrected)
        self._corrected = None
        self._on_epoch(epoch)

    def __len__(self) -> int:
        if self._share is not None:
            raise TypeError("the number of batches depends on the nodes that will be there")
        return self._sampler.steps

    def _assigned_requests(self, share: Share) -> Iterator[BatchRequest]:
        epoch = self._epoch
        (shard,) = self._sampler.epoch(0 if self._fixed else epoch).shards  # of one node
        size = size_at(self._sizes, epoch)
        drawn = share(shard.order.tolist(), epoch * len(shard.order))
        # samples at the end that fill no batch are left out
        while len(batch := list(islice(drawn, self.batch_size))) == self.batch_size:
            yield BatchRequest(np.array(batch), epoch, size, True)

    def _requests(self) -> Iterator[BatchRequest]:
        if self._share is not None:
            self._done = 0
            return self._assigned_requests(self._share)
        if not self._resumes:
            self._before, self._done = (), 0
        self._resumes = False
        epoch = self._epoch
        size = size_at(self._sizes, epoch)
        plan = self._sampler.epoch(0 if self._fixed else epoch, self._before)
        steps = range(self._done, plan.steps)
        return (BatchRequest(plan.batch(step, *self._rank), epoch, size, True) for step in steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, the same on all ranks, as plain values."""
        done = self._done if self._share is None else 0
        segments = [segment.state_dict() for segment in (*self._before, EpochSegment(self._sampler.config, done))]
        return {"epoch": self._epoch, "segments": segments, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a run stopped, even with other nodes, another batch size or another shuffle."""
        if self._share is not None:
            self._epoch = state["epoch"]
            return
        if self._resumes and state == self._loaded:
            return  # by the DataModule and by Lightning
        self._loaded = state
        self._epoch, segments = state["epoch"], [EpochSegment.from_state(segment) for segment in state["segments"]]
        if state["fingerprint"] != self._fingerprint:
            log.warning("the data set has changed since the checkpoint was saved: restarting the epoch")
            segments = [EpochSegment(self._sampler.config, 0)]
        own = segments.pop().steps if segments[-1].config == self._sampler.config else 0
        self._before, self._done, self._resumes = tuple(segments), own, True
        if self._before or state["fingerprint"] != self._fingerprint:
            left = self._sampler.epoch(self._epoch, self._before).steps - own
            self._corrected = len(self) - left


class EvalLoader(_Loader):
    """Batches of a rank for evaluation, not shuffled. `batches` has the sample indices of each batch."""

    def __init__(
        self,
        batches: Sequence[Indices],
        pipeline: Pipeline,
        *,
        size: int = 0,
        with_indices: bool = False,
        turn: Turn | None = None,
    ) -> None:
        super().__init__(pipeline, with_indices, turn)
        self._indices, self._size = batches, size

    def __len__(self) -> int:
        return len(self._indices)

    def _requests(self) -> Iterator[BatchRequest]:
        for indices in self._indices:
            yield BatchRequest(indices, 0, self._size, False)


T = TypeVar("T")
R = TypeVar("R")
CLOSE_S = 1.0  # a generator that is closed waits this long for the current items
EXIT_S = 10.0  # a program that ends, which would abort otherwise


def prefetch(items: Iterable[T], depth: int, name: str) -> Generator[T, None, None]:
    """Yield `items` in order, prefetching up to `depth` of them in a thread."""
    return prefetch_map(lambda item: item, items, depth, name)


def prefetch_map(
    make: Callable[[T], R], items: Iterable[T], depth: int, name: str, threads: int = 1
) -> Generator[R, None, None]:
    """Yield ``make(item)`` in the order of `items`, made ahead of time. Exceptions are raised in order, too.

    Closing the generator stops its threads after their current items, and closes `items` if that is a generator.
    `depth` limits the results that are made, or being made, and not yielded yet.
    """
    ahead = _Ahead(make, items, depth, threads)
    workers = [
        threading.Thread(target=ahead.work, name=f"lightning_sparse {name}", daemon=True) for _ in range(threads)
    ]
    for worker in workers:
        worker.start()
        Finalize(worker, _end, (ahead.stop, weakref.ref(worker)), exitpriority=EXIT_PRIORITY)
    patience = CLOSE_S
    try:
        while (result := ahead.results.get()) is not None:
            made = result.result()
            ahead.free.release()
            yield made
    except KeyboardInterrupt:
        # Ctrl-C does not wait for the current items
        patience = 0.0
        raise
    finally:
        ahead.stop()
        end = time.monotonic() + patience
        for worker in set(workers) - {threading.current_thread()}:  # where garbage is collected in one of them
            worker.join(max(0.0, end - time.monotonic()))


class _Ahead(Generic[T, R]):
    """State that the threads of a generator share.

    results: in the order of the items; None at their end. free: results that may be made.
    """

    def __init__(self, make: Callable[[T], R], items: Iterable[T], depth: int, threads: int) -> None:
        self._make, self._items, self._iterator, self._threads = make, items, iter(items), threads
        self._turn = threading.Lock()  # items are taken by one thread at a time
        self._stopped = threading.Event()
        self.results: SimpleQueue[Future[R] | None] = SimpleQueue()
        self.free = threading.Semaphore(depth)

    def work(self) -> None:
        while (task := self._take()) is not None:
            item, result = task
            try:
                result.set_result(self._make(item))
            except BaseException as error:  # raised in the consumer
                result.set_exception(error)
            del task, item, result  # while waiting for the next one

    def _take(self) -> tuple[T, Future[R]] | None:
        self.free.acquire()
        result: Future[R] = Future()
        # under this lock, results keep the order of the items
        with self._turn:
            if self._stopped.is_set():
                if isinstance(self._items, Generator):
                    self._items.close()
                return None
            try:
                item = next(self._iterator)
            except StopIteration:
                self.results.put(None)
            except BaseException as error:
                result.set_exception(error)
                self.results.put(result)
            else:
                self.results.put(result)
                return item, result
            self.stop()
        return None

    def stop(self) -> None:
        self._stopped.set()
        # wake the threads that wait for a free place
        self.free.release(self._threads)


def _end(stop: Callable[[], None], thread: "weakref.ref[threading.Thread]") -> None:
    # None: the thread was collected, so it has ended
    if (alive := thread()) is not None:
        stop()
        alive.join(EXIT_S)
