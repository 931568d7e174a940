"""The GPU session, without a GPU: its parts run, a part that fails does not stop the others, each claim has a verdict.

What a GPU would say is not looked at.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def session(folder: Path, *words: str) -> tuple[list[str], dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.gpu.session", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=550, cwd=ROOT)
    record: dict[str, Any] = json.loads((folder / "session.json").read_text())
    return done.stdout.splitlines(), record


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="no part fails for want of a GPU")
def test_a_part_that_fails_stops_no_other(tmp_path: Path) -> None:
    """Without a GPU all of them do: each claim says so."""
    lines, record = session(tmp_path, "--parts", "sync", "build", "--minutes", "1")
    assert record["parts"]["sync"]["ended"] == "failed with 1"
    said = [line for line in lines if line.startswith("not run")]
    assert len(said) == 7
    assert all("failed with 1: " in line for line in said), "with the error's own words"
    assert "===== build: failed" in (tmp_path / "log.txt").read_text()


def test_what_is_printed_when_a_process_ends_hides_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL warns there, for one; and what a part found is on disk before the next one begins."""
    from benchmarks.gpu import session as gpu_session

    (tmp_path / "other_parts.py").write_text(
        "import sys, atexit; atexit.register(print, 'a warning', file=sys.stderr)\n"
        "if sys.argv[1] == 'sync': print(open(sys.argv[2] + '/session.json').read()); sys.exit(3)\n"
        """print('RESULT {"claims": {"compiled": ["held", "cuda: compiled"]}, "data": 7}')"""
    )
    monkeypatch.setattr(gpu_session, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_session, "PARTS_OF", "other_parts")
    gpu_session.session(tmp_path, ["build", "sync"], False, 1.0, {"commit": "none"})
    record = json.loads((tmp_path / "session.json").read_text())
    assert record["parts"]["build"]["claims"] == {"compiled": ["held", "cuda: compiled"]}
    assert record["parts"]["build"]["data"] == 7
    assert record["parts"]["sync"]["ended"] == "failed with 3"
    assert '"cuda: compiled"' in (tmp_path / "log.txt").read_text(), "written when the second part began"


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    from benchmarks.gpu import session as gpu_session

    outcome = gpu_session.run("sync", gpu_session.PARTS["sync"], tmp_path, True, 0.5)
    assert outcome.ended == "stopped after 0 s"
    assert {verdict for verdict, _ in outcome.claims.values()} == {"not run"}
    assert outcome.seconds < 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_parts_run_on_a_processor(tmp_path: Path) -> None:
    from benchmarks.gpu import session as gpu_session

    lines, record = session(tmp_path, "--cpu", "--parts", *gpu_session.PARTS, "--minutes", "9")
    assert {name: part["ended"] for name, part in record["parts"].items()} == dict.fromkeys(gpu_session.PARTS, "whole")
    assert {"hardware", "date", "versions", "commit", "command"} <= record.keys()
    claims = [name for part in gpu_session.PARTS.values() for name in part.claims]
    verdicts = Counter(line[:8].strip() for line in lines if line[:8].strip() in ("held", "not held", "not run"))
    assert verdicts.total() == len(claims)
    assert verdicts["not run"] == 7, "the tests marked gpu, and waits for a device"
    assert (tmp_path / "session.md").read_text().count("\n| ") == len(claims) + len(gpu_session.PARTS) + 2
    steps = record["parts"]["gpt"]["data"]["with a link of half a step"]
    assert set(steps) == {"no exchange", "at once", "lanes", "updates"}
    assert {"backward.json.gz", "updates.json.gz"} <= {path.name for path in tmp_path.iterdir()}


def test_the_models_have_the_sizes_they_are_named_for() -> None:
    from benchmarks.gpu import models as gpu_models

    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in task.build().parameters()) for name, task in gpu_models.FULL.items()}
    assert sizes == {"resnet50": 25_557_032, "gpt": 124_439_808}


def test_what_hides_is_told_from_what_does_not() -> None:
    from benchmarks.gpu.trace import Lane, hidden

    work, link = Lane("stream 1", work=[(0, 100)]), Lane("stream 2", link=[(50, 150)])
    assert hidden([work, link]) == 0.5
    assert hidden([work]) is None
    assert hidden([Lane("both", work=[(0, 50)], link=[(50, 150)])]) == 0.0, "a lane does not hide its own link"
