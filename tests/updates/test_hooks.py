"""Every hook of a user sees the global weights, except within a training batch, and may change them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.updates.hook_programs import Program, play_all, program

MORE = int(os.environ.get("HOOK_PROGRAMS", 40))  # programs of the slow test


def check(seed: int, ranks: list[tuple[dict[str, Any], dict[str, Any] | None]]) -> None:
    given = program(seed)
    for ours, due in ranks:
        assert ours["error"] == "", (seed, given)
        if due is not None:
            same_as_ddp(seed, given, ours, due)
    end_unlike = any(act.hook == "on_train_end" and not act.alike for act in given.acts)
    (first, _), *others = ranks
    for other, _ in others:
        assert [where for where, _ in other["seen"]] == [where for where, _ in first["seen"]], (seed, given)
        for (where, one), (_, another) in zip(first["seen"], other["seen"], strict=True):
            if not where.startswith("after") and all(act.alike for act in given.acts):
                assert torch.equal(one, another), (seed, where, given)
        assert end_unlike or torch.equal(first["weights"], other["weights"]), (seed, given)


def same_as_ddp(seed: int, given: Program, ours: dict[str, Any], due: dict[str, Any]) -> None:
    assert [where for where, _ in ours["seen"]] == [where for where, _ in due["seen"]], (seed, given)
    pairs = [*zip(ours["seen"], due["seen"], strict=True), (("end", ours["weights"]), ("end", due["weights"]))]
    for number, ((where, one), (_, other)) in enumerate(pairs):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), (seed, number, where, (one - other).abs().max(), given)


@pytest.mark.parametrize(
    ("nodes", "devices", "begin", "count"),
    [(2, 1, 0, 12), (2, 2, 100, 6), pytest.param(2, 1, 1000, MORE, marks=pytest.mark.slow)],
)
def test_random_hooks_give_the_result_of_ddp(nodes: int, devices: int, begin: int, count: int, tmp_path: Path) -> None:
    seeds = range(begin, begin + count)
    many: dict[str, Any] = {"nodes": nodes, "devices": devices, "timeout": 60 + 5 * count, "init": False}
    everyone = run_ranks(play_all, seeds, str(tmp_path), **many)
    for seed, ranks in zip(seeds, zip(*everyone, strict=True), strict=True):
        check(seed, list(ranks))
