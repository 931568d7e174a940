"""The GPU session on a CPU: its parts run, a failed part does not stop the others, and each claim has a verdict."""

import json
import subprocess
import sys
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import session as gpu_session
from benchmarks.gpu.checks import gpu_tests
from benchmarks.gpu.steps import free_claims, link_claims
from benchmarks.gpu.trace import Lane, hidden
from benchmarks.gpu.waits import waits_raise
from benchmarks.gpu.ways import NO_OVERLAP, NONE, OVERLAP, UPDATES, times

ROOT = Path(__file__).resolve().parents[2]
METHODS = (NONE, NO_OVERLAP, OVERLAP, UPDATES)


OTHER_PARTS = """
import atexit, sys, time
atexit.register(print, 'a warning', file=sys.stderr)
name, folder = sys.argv[1:3]
if name == 'sync':
    print(open(folder + '/session.json').read())
    sys.exit(3)
print('RESULT {"claims": {"compiled": ["held", "cuda: compiled"], "overlap": ["held", "+1%"]}, "data": 7}', flush=True)
if name == 'gpt':
    time.sleep(60)
"""


@pytest.fixture
def other_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the parts: `sync` fails, `gpt` hangs after its first result, and all warn at exit, as NCCL does."""
    (tmp_path / "other_parts.py").write_text(OTHER_PARTS)
    monkeypatch.setattr(gpu_session, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_session, "PARTS_OF", "other_parts")


@pytest.mark.usefixtures("other_parts")
def test_failed_part_does_not_stop_others_and_late_output_hides_no_result(tmp_path: Path) -> None:
    gpu_session.session(tmp_path, ["build", "sync"], False, 1.0, {"commit": "none"})
    record = json.loads((tmp_path / "session.json").read_text())
    assert record["parts"]["build"]["claims"] == {"compiled": ["held", "cuda: compiled"]}
    assert record["parts"]["build"]["data"] == 7
    assert record["parts"]["sync"]["ended"] == "failed with 3"
    assert '"cuda: compiled"' in (tmp_path / "log.txt").read_text(), "written when the second part began"


@pytest.mark.usefixtures("other_parts")
def test_part_at_its_time_limit_keeps_its_results(tmp_path: Path) -> None:
    running, stopped = gpu_session.run("gpt", gpu_session.PARTS["gpt"], tmp_path, False, 5.0)
    assert running.ended == "running"
    assert running.claims["overlap"] == ("held", "+1%")
    assert stopped.ended == "stopped after 5 s"
    assert stopped.claims["overlap"] == ("held", "+1%")
    assert stopped.claims["updates"][0] == "not run"
    assert stopped.data == 7


@pytest.mark.usefixtures("other_parts")
def test_interrupted_session_has_written_the_first_result_of_a_part(tmp_path: Path) -> None:
    outcomes = gpu_session.run("gpt", gpu_session.PARTS["gpt"], tmp_path, False, 60.0)
    gpu_session.write(tmp_path, {"gpt": next(outcomes)}, {})
    outcomes.close()  # as Ctrl-C does; the process ends, too
    assert json.loads((tmp_path / "session.json").read_text())["parts"]["gpt"]["data"] == 7


def test_part_that_takes_too_long_has_claims_that_are_not_run(tmp_path: Path) -> None:
    (outcome,) = gpu_session.run("sync", gpu_session.PARTS["sync"], tmp_path, True, 0.5)
    assert outcome.ended == "stopped after 0 s"
    assert {verdict for verdict, _ in outcome.claims.values()} == {"not run"}


def test_session_starts_without_lightning() -> None:
    """A bare GPU machine may lack Lightning, and each part would need seconds to import it."""
    code = "import sys, benchmarks.gpu.session; print([name for name in sys.modules if 'lightning_fabric' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_default_parts_run_in_less_than_five_minutes() -> None:
    assert [name for name, part in gpu_session.PARTS.items() if part.by_default and part.seconds >= 300] == []


LAST = (1000.0, 1100.0)
"""The wait of the last step."""


def test_link_is_hidden_by_work_of_another_lane_only() -> None:
    work, link = Lane("stream 1", work=[(0, 100)]), Lane("stream 2", link=[(50, 150), LAST])
    assert hidden([work, link], 2) == 0.5
    assert hidden([work], 2) is None
    assert hidden([Lane("both", work=[(0, 50)], link=[(50, 150), LAST])], 2) == 0.0


def test_link_of_the_last_step_does_not_count() -> None:
    """Each step has two exchanges. The exchanges of the last step begin after all work."""
    work = Lane("stream 1", work=[(0, 400)])
    link = Lane("stream 2", link=[(0, 100), (150, 250), (400, 500), (550, 650)])
    assert hidden([work, link], 2) == 1.0


def test_times_wait_for_the_device_only_at_the_end_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    ways = [
        SimpleNamespace(name=each, step=partial(events.append, each), finish=partial(events.append, "wait"))
        for each in "ab"
    ]
    rows = times(ways, steps=2, turns=2)  # type: ignore[arg-type]
    assert events == ["a", "a", "wait", "b", "b", "wait"] * 2
    assert {name: row["fastest ms"] <= row["ms"] <= row["slowest ms"] for name, row in rows.items()} == {
        "a": True,
        "b": True,
    }


def test_step_claims_compare_with_the_step_without_an_exchange() -> None:
    free = {name: {"ms": ms} for name, ms in zip(METHODS, (100.0, 102.0, 109.0, 106.0), strict=True)}
    slow = {name: {"ms": ms} for name, ms in zip(METHODS, (100.0, 152.0, 130.0, 115.0), strict=True)}
    verdicts = {name: each[0] for name, each in (free_claims(free) | link_claims(free, slow, 50.0)).items()}
    assert verdicts == {
        "overlap": "held",
        "updates": "not held",
        "faster": "held",
        "hides": "held",
        "hides_updates": "held",
    }


def test_waits_raise_restores_the_mode_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sets the mode first, then warns that it is a prototype; pytest makes warnings errors."""
    modes: list[str | int] = [0]

    def set_mode(mode: str | int) -> None:
        modes.append(mode)
        warnings.warn("prototype", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(RuntimeError, match="a wait"), waits_raise():
        raise RuntimeError("a wait")
    assert modes == [0, "error", 0]


def test_gpu_tests_run_in_the_session_or_the_data_check() -> None:
    files = set((ROOT / "tests").rglob("test_*.py")) - {Path(__file__)}
    marked = {str(path.relative_to(ROOT)) for path in files if "mark.gpu" in path.read_text()}
    assert marked == {*gpu_tests(), "tests/data/test_gpu.py"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_session_parts_run_on_a_cpu(tmp_path: Path) -> None:
    # On a CPU, `loss_124M` trains the models of `loss`.
    parts = {name: part for name, part in gpu_session.PARTS.items() if name != "loss_124M"}
    words = ["--cpu", "--parts", *parts, "--minutes", "18"]
    command = [sys.executable, "-m", "benchmarks.gpu.session", str(tmp_path), *words]
    lines = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=1150, cwd=ROOT
    ).stdout.splitlines()
    record = json.loads((tmp_path / "session.json").read_text())
    assert {name: part["ended"] for name, part in record["parts"].items()} == dict.fromkeys(parts, "whole")
    assert {"hardware", "date", "versions", "commit", "command"} <= record.keys()
    claims = [name for part in parts.values() for name in part.claims]
    verdicts = Counter(line[:8].strip() for line in lines if line[:8].strip() in ("held", "not held", "not run"))
    assert verdicts.total() == len(claims)
    assert verdicts["not run"] == 8, (
        "the tests marked gpu, waits for a device, and losses that differ from those of the CPU"
    )
    assert (tmp_path / "session.md").read_text().count("\n| ") == len(claims) + len(parts) + 2
    assert {"gradients.json.gz", "updates.json.gz"} <= {path.name for path in tmp_path.iterdir()}
