"""Labeled output of nodes: lines and progress bars."""

import io

import pytest

from lightning_sparse.lab import output
from lightning_sparse.lab.output import LabeledOutput

pytestmark = pytest.mark.timeout(60)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_labeled_and_not_mixed():
    stream = io.StringIO()
    labeled = LabeledOutput(stream)
    labeled.feed(0, 0, b"first ha")
    labeled.feed(1, 0, b"other\nand ")
    labeled.feed(0, 0, b"lf\n")
    labeled.feed(1, 0, b"more\r\n")
    labeled.feed(0, 0, b"ranks of a ")
    labeled.feed(0, 1, b"neither\n")
    labeled.feed(0, 0, b"node\n")
    assert stream.getvalue().splitlines() == [
        "[node 1] other",
        "[node 0] first half",
        "[node 1] and more",
        "[node 0] neither",
        "[node 0] ranks of a node",
    ]


def test_unfinished_line_is_kept_and_a_character_may_arrive_in_two_pieces():
    stream = io.StringIO()
    labeled = LabeledOutput(stream)
    for part in ("\u03c0\n".encode()[:1], "\u03c0\n".encode()[1:], b"killed in mid-sent"):
        labeled.feed(0, 0, part)
    labeled.finish(0)
    labeled.close()
    assert stream.getvalue() == "[node 0] \u03c0\n[node 0] killed in mid-sent\n"


def test_bars_in_a_file_are_written_rarely(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    labeled = LabeledOutput(stream)
    for percent in range(0, 100, 10):
        now[0] += 1.0
        labeled.feed(0, 0, f"\rEpoch 0: {percent}%".encode())
    labeled.feed(0, 0, b"\rEpoch 0: 100%\n")
    labeled.close()
    assert stream.getvalue() == "[node 0] Epoch 0: 0%\n[node 0] Epoch 0: 50%\n[node 0] Epoch 0: 100%\n"


def test_bar_on_a_terminal_stays_below_the_lines():
    stream = _Terminal()
    labeled = LabeledOutput(stream)
    clear = "\r\x1b[K"
    for node, data, shown in (
        (0, b"\r 50%", f"{clear}[node 0]  50%"),
        (1, b"loaded\n", f"{clear}[node 1] loaded\n[node 0]  50%"),
        (0, b"\r100%\n", f"{clear}[node 0] 100%"),
        (0, b"saved\n", f"{clear}[node 0] 100%\n[node 0] saved\n"),
    ):
        stream.truncate(0)
        stream.seek(0)
        labeled.feed(node, 0, data)
        assert stream.getvalue() == shown


def test_nested_bars_are_not_lines():
    stream = io.StringIO()
    labeled = LabeledOutput(stream)
    writes = [b"\rEpoch 0: 100%", b"\n", b"\rValidation: 50%", b"\x1b[A", b"\n\r            \x1b", b"[A"]
    for data in writes + [b"\rEpoch 0: 100%, acc=1", b"\n"]:
        labeled.feed(0, 0, data)
    assert stream.getvalue() == "[node 0] Epoch 0: 100%\n"
    labeled.feed(0, 0, b"done\n")
    assert stream.getvalue().splitlines()[1:] == ["[node 0] Epoch 0: 100%, acc=1", "[node 0] done"]


def test_bar_that_follows_another_bar_releases_its_line():
    stream = io.StringIO()
    labeled = LabeledOutput(stream)
    for data in (b"\rfirst: 100%", b"\n", b"\rsecond: 1%"):
        labeled.feed(0, 0, data)
    before = stream.getvalue()
    labeled.feed(0, 0, b"\rsecond: 2%")
    assert "100%" not in before.partition("\n")[2], "the second bar may be nested"
    assert stream.getvalue().splitlines()[-1] == "[node 0] first: 100%"
