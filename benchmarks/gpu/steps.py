"""The parts `resnet50` and `gpt`: the time of a training step on two nodes of one device each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.claims import Claims, Part, Result, verdict
from benchmarks.gpu.models import FULL, SMALL, batches_of
from benchmarks.gpu.second_passes import counted
from benchmarks.gpu.ways import NO_OVERLAP, NONE, OVERLAP, UPDATES, Times, Way, begin, settle, times

STEPS, TURNS = 12, 5
SHARE = 0.5
"""Time on the slow link, as a share of a step."""


def step(model: str, folder: Path, device: torch.device) -> Iterator[Result]:
    """Time a step without a link, count second passes of the selection, and time a step with a slow link."""
    cuda = device.type == "cuda"
    task, ddp = (FULL, {}) if cuda else (SMALL, {"bucket_cap_mb": 0.2})
    steps, turns = (STEPS, TURNS) if cuda else (4, 3)
    begin(device)
    batches = batches_of(task[model], device)
    ways = [Way(name, task[model], batches, ddp=ddp) for name in (NONE, NO_OVERLAP, OVERLAP, UPDATES)]
    settle(ways)
    free = times(ways, steps, turns)
    show(f"{model}, without a link", free)
    received, link_ms = ways[2].received, SHARE * free[NONE]["ms"]
    claims, data = free_claims(free), {"received bytes": received, "without a link": free, "link ms": link_ms}
    yield claims, data
    counts = second_passes(ways[2:], steps)
    claims, data = {**claims, **second_pass_claims(counts)}, {**data, "second passes": counts}
    yield claims, data
    for way in ways:
        way.communicator.gbps = 8e-9 * received / (1e-3 * link_ms)
    slow = times(ways, steps, turns)
    show(f"{model}, with a link of {link_ms:.2f} ms per step", slow)
    for way in ways:
        way.close()
    yield {**claims, **link_claims(free, slow, link_ms)}, {**data, "with a link": slow}


def show(title: str, rows: Times) -> None:
    print(f"\n{title}")
    for name, row in rows.items():
        spread = f"{row['fastest ms']:.2f} to {row['slowest ms']:.2f}"
        print(f"  {name:22} {row['ms']:9.2f} ms ({spread}), queued after {row['host ms']:8.2f} ms", flush=True)


def second_passes(ways: Sequence[Way], steps: int) -> dict[str, tuple[int, int]]:
    """Return the number of second passes and of selections of each method, in steps that are not timed."""
    counts = {}
    for way in ways:
        with counted() as found:
            for _ in range(steps):
                way.step()
            way.finish()
        counts[way.name] = (sum(bool(each) for each in found), len(found))
    return counts


def second_pass_claims(counts: dict[str, tuple[int, int]]) -> Claims:
    number = "; ".join(f"{name}: {some} of {all_}" for name, (some, all_) in counts.items())
    seldom = all(20 * some <= all_ for some, all_ in counts.values())
    return {"second_passes": verdict(seldom, f"second passes of selections: {number}")}


def added(rows: Times, name: str) -> float:
    """Return the milliseconds per step that an exchange adds."""
    return rows[name]["ms"] - rows[NONE]["ms"]


def free_claims(free: Times) -> Claims:
    """Return the claims about steps without a link."""

    def adds(name: str, most: float) -> tuple[str, str]:
        share = added(free, name) / free[NONE]["ms"]
        return verdict(share <= most, f"{share:+.1%}")

    return {"overlap": adds(OVERLAP, 0.10), "updates": adds(UPDATES, 0.05)}


def link_claims(free: Times, slow: Times, link_ms: float) -> Claims:
    """Return the claims about steps with a link that takes a given time per step."""

    def hides(name: str, most: float) -> tuple[str, str]:
        visible = added(slow, name) - added(free, name)
        return verdict(visible <= most * link_ms, f"{visible:.2f} ms of {link_ms:.2f} ms remain visible")

    overlap, none = slow[OVERLAP]["ms"], slow[NO_OVERLAP]["ms"]
    return {
        "faster": verdict(overlap <= none, f"{overlap:.2f} ms, without overlap {none:.2f} ms"),
        "hides": hides(OVERLAP, 0.5),
        "hides_updates": hides(UPDATES, 0.2),
    }


CLAIMS = {
    "overlap": "exchanging gradients with overlap adds at most 10% to a step without a link",
    "updates": "exchanging updates adds at most 5% to a step without a link",
    "second_passes": "at most one selection in 20 needs a second pass",
    "faster": "if the link takes half a step, steps with overlap are no slower than steps without overlap",
    "hides": "overlap hides at least half of the link time of gradients",
    "hides_updates": "the next step hides at least 80% of the link time of updates",
}
RESNET50 = Part(partial(step, "resnet50"), 120, CLAIMS)
GPT = Part(partial(step, "gpt"), 120, CLAIMS)
