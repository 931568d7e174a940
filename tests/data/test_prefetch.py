"""Results made ahead of time in threads: in order, and not more than requested."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from lightning_sparse.data.pipeline import loader as prefetch_module
from lightning_sparse.data.pipeline.loader import prefetch, prefetch_map


def test_prefetch_keeps_order_and_depth_and_passes_errors() -> None:
    produced: list[int] = []

    def items() -> Iterator[int]:
        for item in range(6):
            produced.append(item)
            yield item
        raise KeyError("the end")

    lane = prefetch(items(), 2, "test")
    assert produced == []
    assert next(lane) == 0
    time.sleep(0.05)
    assert len(produced) <= 4, "more results are made than may wait"
    got: list[int] = []
    with pytest.raises(KeyError, match="the end"):
        got.extend(lane)
    assert got == [1, 2, 3, 4, 5]


def test_prefetch_map_keeps_the_order_of_results_and_errors() -> None:
    begun = threading.Barrier(3, timeout=30)

    def make(item: int) -> int:
        if item < 3:
            begun.wait()  # all three at the same time
            time.sleep(0.02 * (3 - item))
        if item == 7:
            raise KeyError(item)
        return 10 * item

    made = prefetch_map(make, range(100), 4, "test", threads=3)
    assert [next(made) for _ in range(7)] == [0, 10, 20, 30, 40, 50, 60]
    with pytest.raises(KeyError, match="7"):
        next(made)


def test_closing_does_not_wait_for_a_slow_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, storage hangs. The thread ends once storage answers."""
    monkeypatch.setattr(prefetch_module, "CLOSE_S", 0.05)
    hangs, thread = threading.Event(), set(threading.enumerate())
    made = prefetch_map(lambda item: item or hangs.wait(60), [1, 0], 2, "test")
    assert next(made) == 1
    made.close()
    (left,) = set(threading.enumerate()) - thread
    hangs.set()
    left.join(30)
    assert not left.is_alive()


def test_closing_closes_the_inner_iterator() -> None:
    closed: list[str] = []

    def items() -> Iterator[int]:
        try:
            yield from range(10**9)
        finally:
            closed.append("inner")

    lane = prefetch(prefetch(items(), 1, "inner"), 1, "outer")
    assert next(lane) == 0
    lane.close()
    assert closed == ["inner"]
