"""Run an iterable ahead of time in a thread."""

import threading
from collections.abc import Generator, Iterable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def prefetch(items: Iterable[T], depth: int, name: str) -> Generator[T, None, None]:
    """Yield `items` in order, prefetching up to `depth` of them. Exceptions are raised in order, too.

    The thread starts with the first next(). Closing the generator stops the thread after its current item, and closes
    `items` if that is a generator. Ctrl-C does not wait for the current item, which may wait for storage.
    """
    queue: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()  # ends with an exception or None
    free, stopped = threading.Semaphore(depth), threading.Event()

    def fill() -> None:
        try:
            for item in items:
                free.acquire()
                if stopped.is_set():
                    break
                queue.put((item,))
            if isinstance(items, Generator):
                items.close()
            queue.put(None)
        except BaseException as error:  # raised in the consumer
            queue.put(error)

    thread = threading.Thread(target=fill, name=f"lightning_sparse {name}", daemon=True)
    thread.start()
    interrupted = False
    try:
        while isinstance(got := queue.get(), tuple):
            free.release()
            yield got[0]
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        stopped.set()
        free.release()
        if not interrupted:
            thread.join()
    if got is not None:
        raise got
