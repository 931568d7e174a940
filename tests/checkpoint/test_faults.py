"""Faults of checkpoints on 2 x 2 ranks: a rank is killed, a byte is damaged, a file is lost, a disk is full.

No run continues from wrong weights, and no rank waits for a rank that has failed.
"""

import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from lightning_sparse.checkpoint.side_files import CHECKPOINT_KEY
from tests.helpers.distributed import groups_of_its_own, run_ranks
from tests.helpers.lines import Lines, raised
from tests.helpers.training import Case, flat, load_loop, loop_of, module_of, save_loop, train_loop
from tests.strategy.kills import PACKAGE, Kill, damaged_copies, fit_on, patience, whole_and_killed
from tests.strategy.trainers import lightning_of

MANY: dict[str, Any] = {"nodes": 2, "devices": 2, "timeout": 250}
STEPS = 14


def fit(folder: str, kill: Kill | None, case: Case, steps: int = STEPS, every: int = 1) -> Any:
    """Train from the last checkpoint, if any, and save after each step."""
    strategy = case.strategy(PACKAGE, timeout=patience(kill))
    return fit_on(folder, strategy, module_of(case), kill, every, max_steps=steps, precision=case.precision)


# -- a killed rank -----------------------------------------------------------------------------------------------------


def ends_with(folder: str, kill: Kill | None, case: Case) -> Tensor:
    return flat(fit(folder, kill, case).lightning_module, buffers=True).clone()


FILES = ["before its side file", "after its side file", "before the main file", "after the main file"]
# A case -> the points of a save, and the ranks to kill there.
KILLED: list[tuple[Case, list[tuple[str, int]]]] = [
    (Case("hier", "trainer", "file", precision="16-mixed"), [("in a step", 3), *zip(FILES, (1, 2, 0, 0), strict=True)]),
    (Case("fsdp-gradients", "trainer", "file"), [(FILES[0], 2), (FILES[2], 0)]),
    (
        Case("local", "trainer", "folder", {"sync_every": 3, "step_ahead": 0.5}),
        [("in a step", 3), ("meta.pt", 2), ("meta.pt", 0), ("its name", 0), ("the old one goes", 0)],
    ),
    (Case("fsdp-updates", "trainer", "folder"), [(FILES[0], 3), ("meta.pt", 0), ("the old one goes", 0)]),
]


@pytest.mark.parametrize(
    ("case", "points"),
    [
        (
            Case("local", "trainer", "file", {"exchange": "regional", "sync_every": 3, "delay": 2}, "64-true"),
            [(FILES[0], 3)],
        ),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in KILLED),
    ],
    ids=str,
)
def test_run_killed_at_each_point_of_a_save_resumes_bit_identically(
    case: Case, points: list[tuple[str, int]], tmp_path: Path
) -> None:
    """Each kill happens at another point, in a later step."""
    kills = [Kill(point, rank, 2 * number + 3) for number, (point, rank) in enumerate(points)]
    for whole, other in whole_and_killed(ends_with, tmp_path, kills, case, **MANY):
        assert torch.equal(whole, other)
    if case.form == "folder":
        assert [each.name for each in sorted(tmp_path.iterdir())] == ["last.ckpt", "whole"]


# -- a damaged byte ----------------------------------------------------------------------------------------------------

TRAINERS = [
    Case("hier", "trainer", "file"),
    Case("local", "trainer", "folder"),
    Case("fsdp-updates", "trainer", "file"),
    Case("fsdp-gradients", "trainer", "folder"),
]
DAMAGED = [
    *TRAINERS,
    Case("hier", "trainer", "folder"),
    Case("local", "trainer", "file"),
    Case("fsdp-updates", "trainer", "folder"),
    Case("local", "loop", "folder"),
    Case("fsdp-updates", "loop", "folder"),
]


def damaged(folder: str, case: Case) -> list[str]:
    """Return the outcome of each damaged byte: an error, or the weights of the undamaged checkpoint."""
    path = Path(folder) / "saved"
    path.mkdir(parents=True, exist_ok=True)
    saver = fit(str(path), None, case, 3, every=0)
    saver.save_checkpoint(path / "last.ckpt")
    expected = flat(saver.lightning_module)
    other = Case(case.kind, case.host, case.form, seed=5)

    def load(copy: Path) -> Tensor:
        with groups_of_its_own():
            return flat(fit(str(copy), None, other, 3, every=0).lightning_module)

    return [outcome(load, copy, expected) for copy in damaged_copies(path, Path(folder), str(case))]


def damaged_loop(folder: str, case: Case) -> list[str]:
    with loop_of(case) as (model, optimizer, engine):
        train_loop(model, optimizer, engine, 0, 3)
        save_loop(model, engine, f"{folder}/saved")
        expected = flat(model)

        def load(copy: Path) -> Tensor:
            load_loop(model, engine, str(copy))
            return flat(model)

        copies = damaged_copies(Path(folder) / "saved", Path(folder), str(case))
        return [outcome(load, copy, expected) for copy in copies]


def outcome(load: Any, copy: Path, expected: Tensor) -> str:
    try:
        found = load(copy)
    except (Exception, CheckpointException) as error:  # torch's CheckpointException is no Exception
        return f"{type(error).__name__}: {error}"
    return "same" if torch.equal(found, expected) else "wrong weights"


@pytest.mark.slow
@pytest.mark.parametrize("case", DAMAGED, ids=str)
def test_damaged_byte_is_an_error_on_all_ranks_or_harmless(case: Case, tmp_path: Path) -> None:
    outcomes, init = (damaged_loop, True) if case.host == "loop" else (damaged, False)
    everyone = run_ranks(outcomes, str(tmp_path), case, init=init, **MANY)
    for found in zip(*everyone, strict=True):
        assert "wrong weights" not in found
        assert len({each == "same" for each in found}) == 1, "all ranks continue, or none"
    errors = [each for found in everyone for each in found if each != "same"]
    if case.form == "folder":  # most bytes have a checksum
        assert all("is damaged" in each or "CheckpointException" in each for each in errors)
        assert len(errors) > 5 * len(everyone)


# -- a full disk -------------------------------------------------------------------------------------------------------


def on_full_disks(folder: str, cases: list[Case]) -> list[tuple[str, bool]]:
    return [on_a_full_disk(f"{folder}/{number}", case) for number, case in enumerate(cases)]


def on_a_full_disk(folder: str, case: Case) -> tuple[str, bool]:
    """Limit the files of rank 1 to 512 bytes. Return the error, and whether the last save is unchanged."""
    t = fit(folder, None, case, 3)
    path = Path(folder) / "last.ckpt"
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    before = [each.read_bytes() for each in files]
    t.strategy.barrier()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if t.global_rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    said = raised(t.save_checkpoint, path)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    t.strategy.barrier()
    return said, before == [each.read_bytes() for each in files]


def test_full_disk_of_one_rank_fails_all_and_keeps_the_last_save(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(on_full_disks, str(tmp_path), TRAINERS, init=False, **MANY)):
        for case, (said, kept) in zip(TRAINERS, found, strict=True):
            assert "could not write" in said or (said and rank == 1), (case, rank, said)
            assert kept, case


# -- states removed by a hook ------------------------------------------------------------------------------------------

FILE_CASES = [Case(kind, "trainer", "file") for kind in ("hier", "local", "fsdp-updates")]


def without_states(folder: str, case: Case, rank: int) -> tuple[bool, list[str], bool, list[str]]:
    """Save after `rank` (-1: all ranks) has removed the optimizer states, as `on_save_checkpoint` may do.

    Return whether the file has metadata of side files, the names of the side files, whether the weights equal the
    weights of a whole save, and the log lines.
    """

    class Remover(lightning_of(PACKAGE).Callback):  # type: ignore[misc]
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            if rank not in (-1, trainer.global_rank):
                return
            if trainer.global_rank == 0:
                del checkpoint["optimizer_states"]
            else:
                checkpoint.clear()

    lines, path = Lines(), Path(folder) / f"{case.kind}{rank}.ckpt"
    t = fit(folder, None, case, 3, every=0)
    t.save_checkpoint(path)
    before = torch.load(path)["state_dict"]
    t.strategy.barrier()
    t.callbacks.append(Remover())
    t.save_checkpoint(path)
    t.strategy.barrier()
    file = torch.load(path)
    sides = sorted(side.name for side in path.parent.glob(f"{path.name}.residual/*/*"))
    same = all(torch.equal(value, file["state_dict"][name]) for name, value in before.items())
    return CHECKPOINT_KEY in file, sides, same, list(lines.lines)


@pytest.mark.parametrize("rank", [0, 1, -1])
def test_states_removed_on_some_ranks_before_a_save_do_not_hang_it(rank: int, tmp_path: Path) -> None:
    everyone = run_ranks(save_without_states, str(tmp_path), FILE_CASES, rank, init=False, **MANY)
    for found in everyone:
        for case, (has_metadata, sides, same, lines) in zip(FILE_CASES, found, strict=True):
            assert same, case
            assert has_metadata == (rank == 1), case
            assert sides == ([f"rank0000{other}.pt" for other in (0, 2, 3)] if rank == 1 else []), case
            assert not any("not share this folder" in line for line in lines), case


def save_without_states(folder: str, cases: list[Case], rank: int) -> list[Any]:
    return [without_states(folder, case, rank) for case in cases]


# -- a lost file -------------------------------------------------------------------------------------------------------


def global_weights_in(side_file: dict[str, Any]) -> Tensor:
    """Return the first piece of the global weights."""
    piece: Tensor = next(value for name, value in side_file.items() if name.startswith("shared/"))
    return piece


def truncate(side: Path) -> None:
    side.write_bytes(side.read_bytes()[:100])


def exchange_with_another_save(side: Path) -> None:
    torch.save({**torch.load(side), "save_id": "older"}, side)


def zero(side: Path) -> None:
    """Zero 64 bytes inside a tensor, which torch.load reads without an error."""
    content = bytearray(side.read_bytes())
    place = content.index(global_weights_in(torch.load(side)).numpy().tobytes())
    content[place : place + 64] = bytes(64)
    side.write_bytes(content)


def change_weights(side: Path) -> None:
    content = torch.load(side)
    global_weights_in(content).add_(1e-7)
    torch.save(content, side)


HIER, LOCAL = Case("hier", "trainer", "file"), Case("local", "trainer", "file", {"sync_every": 2})
LOST: dict[str, tuple[Case, Any]] = {
    "missing": (HIER, Path.unlink),
    "truncated": (HIER, truncate),
    "of another save": (HIER, exchange_with_another_save),
    "missing updates": (LOCAL, Path.unlink),
    "zeroed updates": (LOCAL, zero),
    "other weights": (LOCAL, change_weights),
}


def without_the_file_of_rank_3(folder: str) -> dict[str, tuple[str, list[str], int, Tensor]]:
    """Return for each loss the error, the log lines, the number of rounds and the weights of a resumed run."""
    found: dict[str, tuple[str, list[str], int, Tensor]] = {}
    for case in (HIER, LOCAL):
        fit(f"{folder}/{case.kind}", None, case, 5)
    for name, (case, lose) in LOST.items():
        copy = f"{folder}/{name}"
        if torch.distributed.get_rank() == 0:
            shutil.copytree(f"{folder}/{case.kind}", copy)
            (side,) = Path(copy).glob("last.ckpt.residual/*/rank00003.pt")
            lose(side)
        torch.distributed.barrier()
        lines, ended = Lines(), []
        said = raised(lambda copy=copy, case=case, ended=ended: ended.append(fit(copy, None, case, 8, every=0)))
        t = ended[0] if ended else None
        weights = flat(t.lightning_module).clone() if t else torch.zeros(0)
        found[name] = said, list(lines.lines), t.strategy.engine.rounds if t else 0, weights
    return found


def test_lost_side_file_of_one_rank_never_mixes_states(tmp_path: Path) -> None:
    """With gradients, one warning is logged and the rank starts with a zero residual.

    With updates, all ranks continue from the weights. Files with different global weights are an error on all ranks.
    """
    everyone = run_ranks(without_the_file_of_rank_3, str(tmp_path), init=False, **MANY)
    for name, (case, _) in LOST.items():
        found = [each[name] for each in everyone]
        if name == "other weights":
            assert all("nodes have different global weights after" in said for said, *_ in found)
            continue
        assert all(torch.equal(each[3], found[0][3]) for each in found), name
        assert {each[2] for each in found} == {8 if case is HIER else 3}, name
        warned = [[line for line in each[1] if "rank 3: no readable residual" in line] for each in found]
        assert case is LOCAL or [len(each) for each in warned] == [0, 0, 0, 1], name
