"""Make things of items ahead of time, in threads.

Threads may wait for storage, or be inside torch or DALI. So whoever stops them waits for their current item, but not
for ever, and a program that ends stops them before Python does: Python unwinds a daemon thread that comes back from
native code after the end, and C++ answers that with abort(). Until then, stores end the reads that threads wait for.
"""

import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Generic, TypeVar

from lightning_sparse.data.sample import EXIT_PRIORITY

T = TypeVar("T")
R = TypeVar("R")
CLOSE_S = 1.0  # a generator that is closed waits this long for the current items
EXIT_S = 10.0  # a program that ends, which would abort otherwise


def prefetch(items: Iterable[T], depth: int, name: str) -> Generator[T, None, None]:
    """Yield `items` in order, prefetching up to `depth` of them in a thread. As `prefetch_map`."""
    return prefetch_map(lambda item: item, items, depth, name)


def prefetch_map(
    make: Callable[[T], R], items: Iterable[T], depth: int, name: str, threads: int = 1
) -> Generator[R, None, None]:
    """Yield ``make(item)`` in the order of `items`, made ahead of time. Exceptions are raised in order, too.

    Threads start with the first next(). Closing the generator stops them after their current items, and closes `items`
    if that is a generator. Ctrl-C does not wait for the current items.

    Args:
        depth: results that are made, or being made, and not yielded yet.
        threads: number of items that are made at the same time.
    """
    ahead = _Ahead(make, items, depth, threads)
    workers = [
        threading.Thread(target=ahead.work, name=f"lightning_sparse {name}", daemon=True) for _ in range(threads)
    ]
    for each in workers:
        each.start()
        Finalize(each, _end, (ahead.stop, weakref.ref(each)), exitpriority=EXIT_PRIORITY)
    patience = CLOSE_S
    try:
        while (result := ahead.results.get()) is not None:
            made = result.result()
            ahead.free.release()
            yield made
    except KeyboardInterrupt:
        patience = 0.0
        raise
    finally:
        ahead.stop()
        end = time.monotonic() + patience
        for each in set(workers) - {threading.current_thread()}:  # where garbage is collected in one of them
            each.join(max(0.0, end - time.monotonic()))


class _Ahead(Generic[T, R]):
    """What the threads of a generator share.

    Attributes:
        results: in the order of the items; None at their end.
        free: results that may be made.
    """

    def __init__(self, make: Callable[[T], R], items: Iterable[T], depth: int, threads: int) -> None:
        self._make, self._items, self._iterator, self._threads = make, items, iter(items), threads
        self._turn = threading.Lock()  # items are taken by one thread at a time
        self._stopped = threading.Event()
        self.results: SimpleQueue[Future[R] | None] = SimpleQueue()
        self.free = threading.Semaphore(depth)

    def work(self) -> None:
        """Take items and make results of them, until there are none, or `stop`."""
        while (taken := self._take()) is not None:
            item, result = taken
            try:
                result.set_result(self._make(item))
            except BaseException as error:  # raised in the consumer
                result.set_exception(error)
            del taken, item, result  # while waiting for the next one

    def _take(self) -> tuple[T, Future[R]] | None:
        """Return the next item, and where its result goes; None if there is none."""
        self.free.acquire()
        result: Future[R] = Future()
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
        """End the threads after their current items."""
        self._stopped.set()
        self.free.release(self._threads)


def _end(stop: Callable[[], None], thread: "weakref.ref[threading.Thread]") -> None:
    """Called when the program ends; or when the thread is collected, which has ended then."""
    if (alive := thread()) is not None:
        stop()
        alive.join(EXIT_S)
