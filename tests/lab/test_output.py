"""What of the nodes' output gets through, and how. Pure."""

import io

import pytest

from lightning_sparse.lab import output
from lightning_sparse.lab.output import LabelledOutput

pytestmark = pytest.mark.timeout(60)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_labelled_and_never_mixed():
    stream = io.StringIO()
    labelled = LabelledOutput(stream)
    labelled.feed(0, 0, b"first ha")
    labelled.feed(1, 0, b"other\nand ")
    labelled.feed(0, 0, b"lf\n")
    labelled.feed(1, 0, b"more\r\n")
    labelled.feed(0, 0, b"ranks of a ")
    labelled.feed(0, 1, b"neither\n")
    labelled.feed(0, 0, b"node\n")
    assert stream.getvalue().splitlines() == [
        "[node 1] other",
        "[node 0] first half",
        "[node 1] and more",
        "[node 0] neither",
        "[node 0] ranks of a node",
    ]


def test_lines_that_repeat_and_empty_ones_are_kept():
    stream = io.StringIO()
    LabelledOutput(stream).feed(0, 0, b"again\n\nagain\nagain\n")
    assert stream.getvalue() == "[node 0] again\n[node 0]\n[node 0] again\n[node 0] again\n"


def test_last_words_without_a_line_end_are_kept():
    stream = io.StringIO()
    labelled = LabelledOutput(stream)
    labelled.feed(0, 0, b"killed in mid-sent")
    labelled.finish(0)
    labelled.close()
    assert stream.getvalue() == "[node 0] killed in mid-sent\n"


def test_a_character_may_arrive_in_two_pieces():
    stream = io.StringIO()
    labelled = LabelledOutput(stream)
    labelled.feed(0, 0, "caf\u00e9\n".encode()[:4])
    labelled.feed(0, 0, "caf\u00e9\n".encode()[4:])
    assert stream.getvalue() == "[node 0] caf\u00e9\n"


def test_bars_in_a_file_are_thinned_out(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    labelled = LabelledOutput(stream)
    for percent in range(0, 100, 10):
        now[0] += 1.0
        labelled.feed(0, 0, f"\rEpoch 0: {percent}%".encode())
    labelled.feed(0, 0, b"\rEpoch 0: 100%\n")
    assert stream.getvalue() == "[node 0] Epoch 0: 0%\n[node 0] Epoch 0: 50%\n[node 0] Epoch 0: 100%\n"


def test_a_bar_stays_below_the_lines_on_a_terminal():
    stream = _Terminal()
    labelled = LabelledOutput(stream)
    labelled.feed(0, 0, b"\r 50%")
    labelled.feed(1, 0, b"loaded\n")
    labelled.feed(0, 0, b"\r100%\n")
    clear = "\r\x1b[K"
    assert stream.getvalue() == (f"{clear}[node 0]  50%{clear}[node 1] loaded\n[node 0]  50%{clear}[node 0] 100%\n")


def test_nested_bars_leave_no_empty_lines():
    stream = io.StringIO()
    labelled = LabelledOutput(stream)
    labelled.feed(0, 0, b"\rEpoch 0: 100%\n\rValidation: 50%\x1b[A\n\r            \x1b[A\rEpoch 0: 100%, acc=1\n")
    assert stream.getvalue() == "[node 0] Epoch 0: 100%\n[node 0] Validation: 50%\n[node 0] Epoch 0: 100%, acc=1\n"
