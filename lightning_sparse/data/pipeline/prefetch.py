"""An iterable, produced ahead of time by a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")


def prefetch(items: Iterable[T], depth: int, name: str) -> Generator[T, None, None]:
    """`items` in their order, up to `depth` of them waiting; errors arrive in their place.

    The thread starts with the first next(), so an iterator that nobody uses costs nothing. Closing ends it, after the
    item that it is making, and closes `items` where that is a generator.
    """
    lane: _Lane[T] = _Lane(depth)
    thread = threading.Thread(target=lane.fill, args=(items,), name=f"lightning_sparse {name}", daemon=True)
    thread.start()
    try:
        while (item := lane.take()) is not None:
            yield item[0]
    finally:
        lane.stop()
        thread.join()
    if lane.error is not None:
        raise lane.error


class _Lane(deque[tuple[T]]):
    """What waits between the thread and who takes."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._ended = self._stopped = False

    def fill(self, items: Iterable[T]) -> None:
        try:
            for item in items:
                with self._changed:
                    self._changed.wait_for(lambda: len(self) < self.depth or self._stopped)
                    if self._stopped:
                        break
                    self.append((item,))
                    self._changed.notify_all()
            if isinstance(items, Generator):
                items.close()
        except BaseException as error:  # raised where the items are taken
            self.error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self) -> tuple[T] | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self) or self._ended)
            item = self.popleft() if self else None
            self._changed.notify_all()
            return item

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self.clear()
            self._changed.notify_all()
