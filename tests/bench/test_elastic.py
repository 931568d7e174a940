"""What the benchmark of nodes that come and go concludes from what they say."""

from typing import Any

import pytest

pytest.importorskip("torchft", reason="needs torchft")

from benchmarks.exchange.elastic import compared, lost


def said(step: int, time: float, token: str, digest: str) -> dict[str, Any]:
    return {"step": step, "time": time, "token": token, "digest": digest, "rounds_lost": 0}


def test_weights_of_one_name_must_have_one_digest() -> None:
    first = [said(1, 0.0, "a", "1"), said(2, 1.0, "b", "2"), said(3, 2.0, "c", "3")]
    second = [said(1, 0.0, "a", "1"), said(2, 1.0, "b", "other")]
    found = compared({0: first, 1: second})
    assert (found["rounds"], found["compared"], found["different"]) == (3, 2, 1)


def test_seconds_lost_are_those_beyond_usual_steps_of_a_node_that_went_on() -> None:
    times = [0.0, 1.0, 2.0, 8.0, 9.0, 10.0, 11.0]
    lines = [said(step, time, "", "") for step, time in enumerate(times)]
    found = lost({0: lines, 1: lines[:3]}, [(2.5, "kill", 1), (9.5, "start", 1)])
    assert found["step s"] == 1.0
    assert [each["seconds"] for each in found["lost"]] == [5.0, 0.0]
    assert len(lost({0: lines}, [(2.5, "kill", 1), (2.6, "start", 1)])["lost"]) == 1
