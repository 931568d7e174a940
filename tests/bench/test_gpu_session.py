"""The GPU session on a CPU: its parts run, a failed part does not stop the others, and each claim has a verdict."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.gpu import session as gpu_session

ROOT = Path(__file__).resolve().parents[2]


def test_failed_part_stops_no_other_and_late_output_hides_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL warns at exit. Results are on disk before the next part begins."""
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


def test_part_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    outcome = gpu_session.run("sync", gpu_session.PARTS["sync"], tmp_path, True, 0.5)
    assert outcome.ended == "stopped after 0 s"
    assert {verdict for verdict, _ in outcome.claims.values()} == {"not run"}


def test_link_is_hidden_by_work_of_another_lane_only() -> None:
    from benchmarks.gpu.trace import Lane, hidden

    work, link = Lane("stream 1", work=[(0, 100)]), Lane("stream 2", link=[(50, 150)])
    assert hidden([work, link]) == 0.5
    assert hidden([work]) is None
    assert hidden([Lane("both", work=[(0, 50)], link=[(50, 150)])]) == 0.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_parts_run_on_a_cpu(tmp_path: Path) -> None:
    parts = gpu_session.PARTS
    words = ["--cpu", "--parts", *parts, "--minutes", "9"]
    command = [sys.executable, "-m", "benchmarks.gpu.session", str(tmp_path), *words]
    lines = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=550, cwd=ROOT
    ).stdout.splitlines()
    record = json.loads((tmp_path / "session.json").read_text())
    assert {name: part["ended"] for name, part in record["parts"].items()} == dict.fromkeys(parts, "whole")
    assert {"hardware", "date", "versions", "commit", "command"} <= record.keys()
    claims = [name for part in parts.values() for name in part.claims]
    verdicts = Counter(line[:8].strip() for line in lines if line[:8].strip() in ("held", "not held", "not run"))
    assert verdicts.total() == len(claims)
    assert verdicts["not run"] == 7, "the tests marked gpu, and waits for a device"
    assert (tmp_path / "session.md").read_text().count("\n| ") == len(claims) + len(parts) + 2
    assert {"backward.json.gz", "updates.json.gz"} <= {path.name for path in tmp_path.iterdir()}
