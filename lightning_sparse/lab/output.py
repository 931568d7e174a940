r"""The output of the nodes, labeled and line-buffered.

A line is written once it is complete, so lines of different ranks do not interleave. On a terminal, a progress bar
stays at the bottom, redrawn below each new line; a file gets one line of it every `BAR_S` seconds. Example, bytes from
two nodes and the resulting file::

    node 0: b"\rEpoch 0:  50%"      node 1: b"loaded\n"      node 0: b"\rEpoch 0: 100%\ndone\n"
    [node 0] Epoch 0:  50%
    [node 1] loaded
    [node 0] Epoch 0: 100%
    [node 0] done
"""

from __future__ import annotations

import codecs
import re
import shutil
import time
from dataclasses import dataclass, field
from typing import TextIO

BAR_S = 5.0
CONTROLS = re.compile(r"(\r\n|\n|\r|\x1b\[\d*[A-HJKsu])")  # line ends and cursor moves; colors are text
CUT_OFF = re.compile(r"(\x1b(\[\d*)?)$")  # an incomplete cursor move


@dataclass
class _Row:
    """An incomplete line. `bar`: it contains a carriage return."""

    text: str = ""
    bar: bool = False
    returned: bool = False

    def write(self, text: str) -> None:
        behind_bar = self.bar and not self.returned  # a log line; the bar is redrawn below it
        self.text = text if self.returned or behind_bar else self.text + text
        self.bar, self.returned = self.bar and not behind_bar, False


@dataclass
class _Source:
    """One rank, or the launcher of a node."""

    label: str
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    unread: str = ""
    row: _Row = field(default_factory=_Row)
    # Nested bars move down with a line end and back up with a cursor move. A bar that ends its line is therefore held
    # until the rank's next output shows whether the bar is nested. A second carriage return or line end means that it
    # is not.
    held: _Row | None = None
    last_line: str = ""


class LabeledOutput:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._sources: dict[tuple[int, int], _Source] = {}
        self._bar = ""  # the bar at the bottom of the terminal
        self._bar_written = -BAR_S

    def feed(self, node: int, rank: int, data: bytes) -> None:
        source = self._sources.setdefault((node, rank), _Source(f"[node {node}]"))
        text = source.unread + source.decoder.decode(data)
        source.unread = match.group() if (match := CUT_OFF.search(text)) else ""
        progress = ""
        for token in CONTROLS.split(text.removesuffix(source.unread)):
            if not token:
                continue
            if not CONTROLS.fullmatch(token):
                source.row.write(token)
                progress = token if source.row.bar and token.strip() else progress
            elif token == "\r":
                if source.row.bar:
                    self._release(source)
                source.row.bar = source.row.returned = True
            elif token.endswith("\n"):
                self._end_row(source)
            elif token.endswith("A") and source.held is not None:
                source.row, source.held = source.held, None  # the line end was part of a nested bar
        if progress:
            self._progress(source, progress)

    def finish(self, node: int) -> None:
        for key, source in self._sources.items():
            if key[0] == node:
                for row in (source.held, source.row):
                    if row is not None and row.text:
                        self._line(source, row.text, bar=row.bar)
                source.held, source.row = None, _Row()

    def close(self) -> None:
        for node in {node for node, _ in self._sources}:
            self.finish(node)
        if self._bar:
            self._write("\n")
            self._bar = ""

    def _release(self, source: _Source) -> None:
        if source.held is not None:
            self._line(source, source.held.text, bar=True)
            source.held = None

    def _end_row(self, source: _Source) -> None:
        self._release(source)
        if source.row.bar:
            source.held = source.row
        else:
            self._line(source, source.row.text)
        source.row = _Row()

    def _line(self, source: _Source, text: str, bar: bool = False) -> None:
        line = f"{source.label} {text}".rstrip()
        if bar and line in (source.label, source.last_line):
            return
        source.last_line = line
        if bar and self._bar:
            self._bar = ""  # this line ends the bar
            self._write("\r\x1b[K")
        self._write(f"\r\x1b[K{line}\n{self._bar}" if self._bar else f"{line}\n")

    def _progress(self, source: _Source, text: str) -> None:
        if self._terminal:
            columns = shutil.get_terminal_size().columns - 1  # a bar that wraps cannot be overwritten
            self._bar = f"{source.label} {text}".rstrip()[:columns]
            self._write(f"\r\x1b[K{self._bar}")
        elif time.monotonic() - self._bar_written >= BAR_S:
            self._bar_written = time.monotonic()
            self._line(source, text, bar=True)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
