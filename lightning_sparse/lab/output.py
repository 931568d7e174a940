r"""What the nodes print, labelled and line by line.

Lines of different nodes never mix: a line is written when its end arrives. A progress bar has no line ends, it returns
the carriage and writes over itself; on a terminal it stays one line at the bottom, redrawn after each line that passes
above it, and in a file it becomes a line every `BAR_S` seconds, so that a log neither floods nor falls silent.

Example, bytes read from two nodes and what a file gets::

    node 0: b"\rEpoch 0:  50%"      node 1: b"loaded\n"      node 0: b"\rEpoch 0: 100%\n"
    [node 0] Epoch 0:  50%
    [node 1] loaded
    [node 0] Epoch 0: 100%
"""

from __future__ import annotations

import re
import time
from typing import TextIO

BAR_S = 5.0
# cursor moves of nested bars make no sense inside a labelled line; colours stay
CURSOR_MOVES = re.compile(r"\x1b\[\d*[ABCDGHJKsu]")


class LabelledOutput:
    """Writes to `stream`; feed it the bytes of each node as they come."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._partial: dict[tuple[int, int], bytes] = {}
        self._last_line: dict[tuple[int, int], str] = {}
        self._bar = ""  # what stands at the bottom of the terminal
        self._bar_source = (-1, -1)
        self._bar_written = -BAR_S

    def feed(self, node: int, rank: int, data: bytes) -> None:
        """data: what a local rank of a node has written."""
        source = (node, rank)
        *lines, tail = (self._partial.get(source, b"") + data).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            self._line(source, _text(line), bar=b"\r" in line)
        self._partial[source] = tail
        if b"\r" in tail:
            self._progress(source, _text(tail))
            self._partial[source] = b"\r" + tail.rpartition(b"\r")[2]

    def finish(self, node: int) -> None:
        """Write what a node that has ended left without a line end."""
        for source in [source for source in self._partial if source[0] == node]:
            tail = _text(self._partial.pop(source))
            if tail:
                self._line(source, tail)

    def close(self) -> None:
        for node in {node for node, _ in self._partial}:
            self.finish(node)
        if self._bar:
            self._write("\n")
            self._bar = ""

    def _line(self, source: tuple[int, int], text: str, bar: bool = False) -> None:
        line = f"[node {source[0]}] {text}".rstrip()
        if bar and (not text or line == self._last_line.get(source)):
            return  # nested bars end lines only to move the cursor
        self._last_line[source] = line
        if self._bar and source == self._bar_source:
            self._bar = ""  # the bar itself came to its end
            self._write("\r\x1b[K")
        self._write(f"\r\x1b[K{line}\n{self._bar}" if self._bar else f"{line}\n")

    def _progress(self, source: tuple[int, int], text: str) -> None:
        if not text:
            return
        if self._terminal:
            self._bar, self._bar_source = f"[node {source[0]}] {text}", source
            self._write(f"\r\x1b[K{self._bar}")
        elif time.monotonic() - self._bar_written >= BAR_S:
            self._bar_written = time.monotonic()
            self._line(source, text, bar=True)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _text(raw: bytes) -> str:
    """What a terminal would show of a line: the text after the last carriage return that is followed by any."""
    decoded = CURSOR_MOVES.sub("", raw.decode(errors="replace"))
    shown = [part for part in decoded.split("\r") if part.strip()]
    return shown[-1].rstrip() if shown else ""
