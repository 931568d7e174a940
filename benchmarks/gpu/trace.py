"""A trace of the profiler as lanes over time: when each CUDA stream works, or each thread on a CPU."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cluster import LINK
from benchmarks.gpu.ways import Way

GAP = 20.0  # microseconds between two kernels, which leave no idle lane
ON_DEVICE, ON_HOST = ("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op", "user_annotation")
Span = tuple[float, float]
"""Begin and end in microseconds."""


@dataclass
class Lane:
    """The work of one stream or thread.

    Attributes:
        work: everything except the link, without short gaps.
        link: each wait for the link between nodes.
    """

    name: str
    work: list[Span] = field(default_factory=list)
    link: list[Span] = field(default_factory=list)


def record(way: Way, steps: int, file: Path) -> dict[str, Any]:
    """Profile some steps, and write the trace for chrome://tracing or Perfetto, compressed.

    On a GPU, the trace has no operators of the host, because recording them would slow down the host.
    """
    kinds = torch.profiler.ProfilerActivity
    on_cuda = way.device.type == "cuda"
    every_thread = None if on_cuda else torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[kinds.CUDA if on_cuda else kinds.CPU], experimental_config=every_thread
    ) as profiled:
        for _ in range(steps):
            way.step()
        way.finish()
    profiled.export_chrome_trace(str(file))
    trace: dict[str, Any] = json.loads(gzip.decompress(file.read_bytes()))
    return trace


def lanes_of(trace: dict[str, Any]) -> list[Lane]:
    """Return the lanes, in the order in which they begin to work."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kinds = ON_DEVICE if any(event.get("cat") in ON_DEVICE for event in events) else ON_HOST
    found: dict[Any, Lane] = {}
    for event in sorted((each for each in events if each.get("cat") in kinds), key=lambda each: each["ts"]):
        lane = found.setdefault(event["tid"], Lane(f"{'stream' if kinds == ON_DEVICE else 'thread'} {event['tid']}"))
        is_link = event["name"] == LINK or "spin_kernel" in event["name"]
        spans = lane.link if is_link else lane.work
        spans.append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    for lane in found.values():
        lane.work = united(lane.work)
    return list(found.values())


def united(spans: Iterable[Span]) -> list[Span]:
    """Join intervals that overlap or have short gaps.

    >>> united([(0, 20), (10, 30), (40, 50), (90, 91)])
    [(0, 50), (90, 91)]
    """
    result: list[Span] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1] + GAP:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def hidden(lanes: Sequence[Lane], steps: int) -> float | None:
    """Return the fraction of the link's time in which another lane works; None without a link.

    The waits of the last of these equal steps do not count, because no later step can hide them.
    """
    waits = sorted(span for lane in lanes for span in lane.link)
    link = united(waits[: len(waits) * (steps - 1) // steps])
    work = united(span for lane in lanes if not lane.link for span in lane.work)
    common = [(max(a, c), min(b, d)) for a, b in link for c, d in work if max(a, c) < min(b, d)]
    return length(common) / length(link) if link else None
