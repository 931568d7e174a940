"""What sums a fit up: times that no host waits for, and the table."""

from collections import Counter
from typing import Any

import pytest
import torch

from lightning_sparse.exchange import CommStats
from lightning_sparse.exchange.host import Stopwatch
from lightning_sparse.strategy.callback import table


class Events:
    """Stands for a CUDA stream: events are passed only when the device gets there."""

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
                assert self.query(), "an event that was not passed has no time, and to ask would wait"
                assert end.query(), "an event that was not passed has no time, and to ask would wait"
                return 1000.0 * (end.place - self.place)

        return Event()


def test_events_are_read_once_the_device_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    events, watch, device = Events(), Stopwatch(), torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "Event", events)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    for _ in range(3):
        with watch.running(device):
            pass
    assert watch.seconds() == 0
    events.passed = 5  # the third stretch is under way
    assert watch.seconds() == 2
    events.passed = 6
    assert watch.seconds() == 3
    assert not watch._open


def test_a_stretch_that_raises_does_not_count() -> None:
    watch = Stopwatch()
    with pytest.raises(RuntimeError), watch.running(torch.device("cpu")):
        raise RuntimeError
    assert watch.seconds() == 0


def test_a_fit_is_counted_without_what_came_before() -> None:
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
        "what one device exchanged with other nodes, in 2 rounds, dense ones at the start and the end of fit included:",
        "  received a round    0.000 MB; plain DDP 0.000 MB, 100.0 times the bytes",
        "  paths               100.0% sparse (share of entries)",
        "  density             1.00% sent, at most 2.00% applied",
        "  between nodes       250.0 ms a round, waiting for other nodes included",
        "  not sent yet        norm 3, 2.0 times that of the gradient",
    ]
