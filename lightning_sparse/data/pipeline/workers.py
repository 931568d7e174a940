"""Batches through user functions, in the worker processes of a DataLoader.

User functions draw from the generators of Python, numpy and torch, which are global to a process: in threads they would
disturb each other and the training. A worker seeds them for each sample from (seed, epoch, index), so a sample does not
depend on the number of workers or ranks, or on earlier samples.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_sparse.data.config import DataError, SampleOptions
from lightning_sparse.data.decode import EXIT_PRIORITY, ReplacingReader, Sample
from lightning_sparse.data.pipeline.loader import BatchRequest, label_tensor, prefetch
from lightning_sparse.data.rng import bits
from lightning_sparse.messages import log

_SEED_OFFSET = 0x5EED_0F_5A39  # so that transforms and the order of samples are independent
_PREFETCH = 2  # batches per worker
_PARENT_S = 1.0  # between looks at whether the training process is alive
_END_S = 5.0  # for the end of a worker
_START_S = 30.0  # for the start of all workers
_STARTS = 3  # attempts
_NO_MEMORY = "decode ran out of memory: use fewer workers or smaller samples, or raise the limit (ulimit -v)."
_ATTEMPTS = 100  # samples that are tried in place of one that cannot be decoded


class WorkerPipeline:
    """Makes batches in worker processes; 0 workers: in the calling process. `pin` uses pinned memory."""

    def __init__(self, store: ReplacingReader, options: SampleOptions, *, workers: int, pin: bool) -> None:
        self._current = _Current()
        # not an Event, whose set() waits for each process that waits for it, for ever if one was killed
        self._closed, self._closing = multiprocessing.Pipe(duplex=False)
        self._started, self._starting = multiprocessing.Pipe(duplex=False)
        self._loader: DataLoader[Any] | None = DataLoader(
            _Batches(store, options),
            sampler=self._current,
            batch_size=None,  # the data set makes whole batches
            num_workers=workers,
            prefetch_factor=_PREFETCH if workers else None,
            persistent_workers=workers > 0,
            pin_memory=pin,
            worker_init_fn=partial(_watch, store, self._closed, self._starting),
            generator=torch.Generator(),  # the global one is the training's
        )
        self._depth = _PREFETCH * max(1, workers)
        self.prefetch_depth = self._depth + _PREFETCH * workers + 1
        # workers that outlive the tiers of a program that ends would leave its memory behind
        Finalize(self, _close, (weakref.ref(self),), exitpriority=EXIT_PRIORITY)

    def run(self, requests: Iterable[BatchRequest]) -> Generator[tuple[Any, ...], None, None]:
        """Yield (samples,), or (samples, labels) if there are labels, in the order of requests."""
        assert self._loader is not None  # not closed
        try:
            if self._loader._iterator is None and self._loader.num_workers:
                self._start_workers(self._loader)
            # in a thread: finding the samples of a step takes milliseconds if there are a thousand ranks
            with contextlib.closing(prefetch(requests, self._depth, "order")) as ordered:
                self._current.requests = ordered
                for batch in self._loader:
                    if isinstance(batch, Exception):
                        raise batch
                    yield batch
        except (RuntimeError, OSError, EOFError) as error:
            if not _is_loss(error):
                raise
            self.close()
            raise DataError(
                f"a worker process that makes batches has ended ({error}). Look for its error in the log."
            ) from error

    def _start_workers(self, loader: DataLoader[Any]) -> None:
        # Start the workers before they get requests. A forked worker may hang before it reaches Python code: before
        # Python 3.11.10, fork() may copy a lock that another thread holds, such as Gloo's
        # (https://github.com/python/cpython/issues/112275). Start again then.
        self._current.requests = ()
        for _ in range(_STARTS):
            try:
                iterator = iter(loader)
            except OSError as error:
                raise DataError(
                    f"{loader.num_workers} process(es) that make batches cannot start ({error}). They need processes, "
                    "open files and a writable /dev/shm: raise the limits of the job, or set workers=0."
                ) from error
            assert isinstance(iterator, _MultiProcessingDataLoaderIter)
            until, running = time.monotonic() + _START_S, 0
            waited: list[Any] = [self._started, *(worker.sentinel for worker in iterator._workers)]
            while running < loader.num_workers and (ready := wait(waited, max(0.0, until - time.monotonic()))):
                if self._started not in ready:
                    _unwatch(iterator)
                    lost = next(worker for worker in iterator._workers if worker.sentinel in ready)
                    raise EOFError(f"process {lost.pid} ended with exit code {lost.exitcode} while it started")
                self._started.recv_bytes()
                running += 1
            if running == loader.num_workers:
                return
            log.warning(
                "%d of %d processes that make batches hung while they started: starting them again. To avoid this, "
                "update Python to 3.11.10 or later, or set workers=0",
                loader.num_workers - running,
                loader.num_workers,
            )
            _unwatch(iterator)
            for worker in iterator._workers:
                worker.kill()
            iterator._shutdown_workers()
            while self._started.poll():
                self._started.recv_bytes()
            loader._iterator = None
        raise DataError(
            f"the processes that make batches hung {_STARTS} times while they started: update Python to 3.11.10 or "
            "later, or set workers=0."
        )

    def close(self) -> None:
        """End the workers. Waits for them, so that the training process closes the memory tier last."""
        loader, self._loader = self._loader, None
        iterator = None if loader is None else loader._iterator
        workers = iterator._workers if isinstance(iterator, _MultiProcessingDataLoaderIter) else []
        for _ in range(2):  # where a worker was killed, torch's handler of SIGCHLD raises here, once
            with contextlib.suppress(RuntimeError):
                self._closing.send_bytes(b"")  # nobody reads it, so that all see it
                if isinstance(iterator, _MultiProcessingDataLoaderIter):
                    iterator._shutdown_workers()
                for worker in workers:
                    worker.join(_END_S)
                break
        for worker in workers:
            if worker.exitcode not in (None, 0, -signal.SIGTERM):
                log.error("%s", _loss(worker.pid, worker.exitcode))


class _Current:
    """The requests of the current run, as the sampler of a DataLoader, whose workers serve many runs."""

    requests: Iterable[BatchRequest] = ()

    def __iter__(self) -> Iterator[BatchRequest]:
        return iter(self.requests)


class _Batches(Dataset[Any]):
    """Makes the batch of a request. A worker has a copy, whose store opens the tiers itself."""

    def __init__(self, store: ReplacingReader, options: SampleOptions) -> None:
        self._store, self._options = store, options

    def __getitem__(self, request: BatchRequest) -> Any:
        try:
            return self._make(request)
        except DataError as error:  # the DataLoader would raise a RuntimeError with its text
            return error

    def _make(self, request: BatchRequest) -> tuple[Any, ...]:
        options, made, labels = self._options, [], []
        transform = options.transform if request.train else options.eval_transform
        with _own_generators():
            for sample in self._store.get(request.indices.tolist()):
                value, label = self._decoded(sample, request.epoch)
                made.append(value if transform is None else transform(value))
                labels.append(label)
        batch = (options.collate or default_collate)(made)
        return (batch, label_tensor(labels)) if np.size(labels) else (batch,)

    def _decoded(self, sample: Sample, epoch: int) -> tuple[Any, Any]:
        requested, reason = sample.index, ""
        for _ in range(_ATTEMPTS):
            _seed(int(bits(self._options.seed + _SEED_OFFSET, epoch, sample.index)[0]))
            try:
                return self._options.decode(sample.data.tobytes()), sample.label
            except MemoryError as error:
                raise DataError(_NO_MEMORY) from error  # not the fault of the file
            except Exception as error:
                reason = f"decode raised {type(error).__name__}: {error}"
                sample = self._store.replacement(requested, sample.index, reason)
        raise DataError(f"decode failed on {_ATTEMPTS} samples in a row, which it cannot read: {reason}")


def _close(pipeline: weakref.ref[WorkerPipeline]) -> None:
    if (alive := pipeline()) is not None:
        alive.close()


def _unwatch(iterator: _MultiProcessingDataLoaderIter) -> None:
    # Otherwise, torch's handler of SIGCHLD raises for each worker that ends, at any place in the code.
    torch._C._remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False


def _is_loss(error: Exception) -> bool:
    # errors that a worker raises have its traceback; errors of the DataLoader for a lost worker have none
    text = str(error)
    unreachable = isinstance(error, (OSError, EOFError))  # a batch is fetched from the process that made it
    return "Traceback" not in text and (unreachable or "DataLoader worker (pid" in text)


def _loss(pid: int | None, status: int) -> str:
    if status == -signal.SIGKILL:
        return (
            f"process {pid}, which made batches, was killed, mostly because the node or the job ran out of memory: use "
            "fewer workers, smaller batches or a lower memory_gb."
        )
    return (
        f"process {pid}, which made batches, ended with status {status} inside decode, transform or collate: with "
        "workers=0 they run in the training process, where a debugger sees them."
    )


def _watch(store: ReplacingReader, closed: Connection, starting: Connection, _: int) -> None:
    starting.send_bytes(b"x")
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and not closed.poll(_PARENT_S):
            pass
        # end its waits for storage: the worker must end, or the training process is gone
        store.interrupt()

    threading.Thread(target=watch, name="lightning_sparse watch", daemon=True).start()


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number % 2**63)  # torch.manual_seed would queue a call for CUDA each time


@contextlib.contextmanager
def _own_generators() -> Iterator[None]:
    # the training uses the global generators if there are no workers
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
