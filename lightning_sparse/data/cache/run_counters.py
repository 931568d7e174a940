"""What the processes of a run share on a node, for each split: their counts, and the topics that the run has logged.

It is a segment of the run alone, beside those of samples, which runs share: see `shared_memory`.

=================== ============= ==================================================
part of the segment size          contents
=================== ============= ==================================================
header              4096          int64 each: number of processes; from 64 on, topics
counters            256 x 16 x 8  one row per process
=================== ============= ==================================================
"""

import contextlib
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lightning_sparse.data.cache import shared_memory
from lightning_sparse.data.cache.counts import NAMES
from lightning_sparse.data.cache.shared_memory import Segment

_PROCESSES, _TOPICS = 0, 64
_ROWS, _ROW = 256, 16
_SIZE = 4096 + _ROWS * _ROW * 8
assert len(NAMES) <= _ROW


class RunCounters:
    """The counters of a run, node and split. Each process of the run opens them once.

    Attributes:
        row: int64 [len(NAMES)], the counters of this process.
        is_first: whether no other process of the run had opened them.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._header = np.frombuffer(segment.map, np.int64, 512)
        self._rows = np.frombuffer(segment.map, np.int64, _ROWS * _ROW, offset=4096).reshape(_ROWS, _ROW)
        with segment.locked():
            row = int(self._header[_PROCESSES])
            self._header[_PROCESSES] += 1
        self.is_first = row == 0
        self.row = self._rows[min(row, _ROWS - 1), : len(NAMES)]  # from the 256th process on, less exact: shared

    def rows(self) -> npt.NDArray[np.int64]:
        """Return the counters of all processes, also of those that have ended, int64 [processes, len(NAMES)]."""
        return self._rows[: int(self._header[_PROCESSES]), : len(NAMES)].copy()

    def claim_topic(self, topic: str) -> bool:
        """Return True for the first process of the run on this node that asks for this topic, to log it once."""
        number = zlib.crc32(topic.encode()) + 1
        with self._segment.locked():
            logged = self._header[_TOPICS:]
            if number in logged or 0 not in logged:
                return False
            logged[int(np.argmin(logged != 0))] = number
            return True

    def close(self) -> None:
        """Release the segment; the last process of the run removes it."""
        self._segment.close()


def open_counters(folders: Sequence[Path], name: str) -> RunCounters:
    """Attach the segment `name` in one of the folders, or create it in the first one with enough memory.

    Raises:
        OSError: if no folder has enough memory.
    """
    for folder in folders:
        if (segment := shared_memory.attach(folder / name)) is not None:
            return RunCounters(segment)
    *preferred, last = folders
    for folder in preferred:
        with contextlib.suppress(OSError):
            return _create(folder / name)
    return _create(last / name)


def _create(path: Path) -> RunCounters:
    return RunCounters(shared_memory.create(path, _SIZE, lambda file: os.posix_fallocate(file, 0, _SIZE)))
