"""The part `trace`: how long another stream works while the link carries gradients or updates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.claims import NOT_RUN, Claims, Part, Result, verdict
from benchmarks.gpu.models import FULL, SMALL, batches_of
from benchmarks.gpu.trace import hidden, lanes_of, length, record
from benchmarks.gpu.ways import NONE, OVERLAP, UPDATES, Way, begin, settle, times

TRACED = 6
"""Steps of a trace."""
SHARE = 0.3
"""Time on the link, as a share of a step."""
CASES = {"gradients": (OVERLAP, "resnet50"), "updates": (UPDATES, "gpt")}
"""Method and model. A GPT's largest gradient (embedding) is ready last and cannot overlap."""


def trace(folder: Path, device: torch.device) -> Iterator[Result]:
    """Trace steps without a wait of the host between them."""
    begin(device)
    cuda = device.type == "cuda"
    ddp = {} if cuda else {"bucket_cap_mb": 0.2}
    data, claims = {}, Claims()
    for name, (method, model) in CASES.items():
        task = (FULL if cuda else SMALL)[model]
        batches = batches_of(task, device)
        plain, way = (Way(each, task, batches, ddp=ddp) for each in (NONE, method))
        settle([plain, way])
        plain_ms = times([plain], TRACED, 3)[NONE]["ms"]
        way.communicator.gbps = 8e-9 * way.received / (1e-3 * SHARE * plain_ms)
        lanes = lanes_of(record(way, TRACED, folder / f"{name}.json.gz"))
        way.close()
        share = hidden(lanes, TRACED)
        claims[name] = (NOT_RUN, "no link in the trace") if share is None else verdict(share >= 0.7, f"{share:.0%}")
        data[name] = {lane.name: length(lane.work) for lane in lanes}
        yield claims, data


TRACE = Part(
    trace,
    75,
    {name: f"while the link carries {name}, another stream works 70% of the time or more" for name in CASES},
)
