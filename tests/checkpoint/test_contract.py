"""A resumed run equals the uninterrupted run, for each strategy, host and form of checkpoint.

The run resumes on the same cluster, on another cluster, and on one node.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import RunRanks, run_ranks
from tests.helpers.lines import raised
from tests.helpers.training import Case, Look, Trained, flat, load_loop, loop_of, save_loop, train, train_loop

SAVED, STEPS = 5, 9  # DDP's buckets settle in the first steps
# Each kind on each host, in each form that the host supports.
CASES = [
    Case("hier", "trainer", "file"),
    Case("hier", "trainer", "folder", precision="16-mixed"),
    Case("hier", "fabric", "file"),
    Case("hier", "loop", "folder"),
    Case("momentum", "trainer", "file"),
    Case("momentum", "fabric", "file"),
    Case("momentum", "loop", "folder"),
    Case("local", "trainer", "file", {"sync_every": 3, "delay": 2, "step_ahead": 0.5, "outer_lr": 1.5}),
    Case("local", "trainer", "folder"),
    Case("local", "fabric", "file", {"step_ahead": 0.4}),
    Case("local", "loop", "folder", {"exchange": "regional", "shard_optimizer": False}),
    Case("fsdp-updates", "trainer", "file", {"step_ahead": 0.5}),
    Case("fsdp-updates", "trainer", "folder"),
    Case("fsdp-updates", "fabric", "folder"),
    Case("fsdp-updates", "loop", "folder"),
    Case("fsdp-gradients", "trainer", "folder"),
    Case("fsdp-gradients", "fabric", "file"),
    Case("fsdp-gradients", "loop", "folder"),
]
# More states of an engine, on the same cluster only, because `look` cannot show changes between two exchanges.
MORE = [
    Case("local", "loop", "folder", {"sync_every": 4, "delay": 0}, "bf16-true"),
    Case("local", "trainer", "file", {"value_dtype": "bfloat16"}, "16-mixed"),
    Case("hier", "trainer", "file", {"exclude": "vectors", "exchange": "regional"}),
    Case("fsdp-updates", "trainer", "file", {"exchange": "dense16", "sync_every": 2}, "bf16-true"),
    Case("local", "trainer", "folder", {"exchange": "dense16"}, "bf16-mixed"),
    Case("fsdp-updates", "trainer", "folder", {"sync_every": 4, "delay": 0}),
    Case("local", "fabric", "file", {"sync_every": 3, "step_ahead": 1.0}, "64-true"),
]
ALL = CASES + MORE


def path_of(folder: str, number: int) -> str:
    return f"{folder}/{number}.ckpt-{SAVED}"


def whole_and_resumed(folder: str, cases: list[Case]) -> list[tuple[Trained, Trained]]:
    pairs = []
    for number, case in enumerate(cases):
        path = path_of(folder, number)
        whole = train(case, STEPS, save=(SAVED, path), look_at=[SAVED])
        other = Case(case.kind, case.host, case.form, case.options, case.precision, seed=1)
        pairs.append((whole, train(other, STEPS, start=path, look_at=[SAVED])))
    return pairs


def saved(folder: str, cases: list[Case]) -> list[Look]:
    return [
        train(case, SAVED + 2, save=(SAVED, path_of(folder, number)), look_at=[SAVED]).looks[SAVED]
        for number, case in enumerate(cases)
    ]


def resumed(folder: str, cases: list[Case]) -> list[Look]:
    return [
        train(case, SAVED + 2, start=path_of(folder, number), look_at=[SAVED]).looks[SAVED]
        for number, case in enumerate(cases)
    ]


IN_THE_BACKGROUND = ("hier", "local", "fsdp-updates", "fsdp-gradients")


def saved_in_the_background(folder: str) -> list[str]:
    """Return the kinds of loops that do not resume bit-identically if they are saved during the training."""
    return [kind for kind in IN_THE_BACKGROUND if not resumes(Case(kind, "loop", "folder"), f"{folder}/{kind}")]


def resumes(case: Case, folder: str) -> bool:
    with loop_of(case) as (model, optimizer, engine):
        train_loop(model, optimizer, engine, 0, SAVED)
        future = save_loop(model, engine, folder, background=True)
        train_loop(model, optimizer, engine, SAVED, STEPS)
        future.result()
        whole = flat(model).clone()
    with loop_of(replace(case, seed=1)) as (model, optimizer, engine):
        train_loop(model, optimizer, engine, 0, 1)
        load_loop(model, engine, folder)
        train_loop(model, optimizer, engine, SAVED, STEPS)
        return torch.equal(whole, flat(model))


def resumed_with_other_groups(folder: str) -> str:
    with loop_of(Case("local", "loop", "folder")) as (model, optimizer, engine):
        train_loop(model, optimizer, engine, 0, 2)
        save_loop(model, engine, folder)
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})
        return raised(load_loop, model, engine, folder)


def test_loop_saved_in_the_background_resumes_bit_identically(ranks: RunRanks, tmp_path: Path) -> None:
    assert ranks(saved_in_the_background, str(tmp_path), nodes=2, devices=1, timeout=100) == [[], []]


def test_loop_with_other_parameter_groups_is_refused(ranks: RunRanks, tmp_path: Path) -> None:
    for said in ranks(resumed_with_other_groups, str(tmp_path), nodes=2, devices=1, timeout=100):
        assert "optimizer 0 was saved with 1 parameter group(s), and has 2 now" in said


Pairs = list[list[tuple[Trained, Trained]]]
Looks = list[list[Look]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("contract"))


@pytest.fixture(scope="module")
def pairs(folder: str) -> Pairs:
    """Return the results of each case by rank: the uninterrupted run, and the run resumed by new objects."""
    return run_ranks(whole_and_resumed, folder, ALL, nodes=2, devices=2, timeout=250)


@pytest.fixture(scope="module")
def elsewhere(folder: str, pairs: Pairs) -> Looks:
    return run_ranks(resumed, folder, CASES, nodes=3, devices=1, timeout=200)


@pytest.fixture(scope="module")
def alone(folder: str, pairs: Pairs) -> Looks:
    return run_ranks(resumed, folder, CASES, nodes=1, devices=2, timeout=200)


def every(cases: list[Case]) -> Any:
    return pytest.mark.parametrize("number", range(len(cases)), ids=[str(each) for each in cases])


@every(ALL)
def test_resume_on_the_same_cluster_is_bit_identical(pairs: Pairs, number: int) -> None:
    for each in pairs:
        whole, resumed = each[number]
        assert torch.equal(whole.weights, resumed.weights)
        assert whole.rounds == resumed.rounds == STEPS
        assert torch.equal(whole.looks[SAVED].pending, resumed.looks[SAVED].pending)
        assert whole.looks[SAVED].pending.any()


@every(ALL)
def test_global_weights_are_equal_on_all_ranks(pairs: Pairs, number: int) -> None:
    everyone = [each[number][0].looks[SAVED].weights for each in pairs]
    assert all(torch.equal(each, everyone[0]) for each in everyone)


@every(CASES)
def test_resume_on_another_cluster_keeps_weights_pending_mean_and_optimizer(
    pairs: Pairs, elsewhere: Looks, number: int
) -> None:
    check_resumed(CASES[number], pairs[0][number][0].looks[SAVED], [each[number] for each in elsewhere])


def check_resumed(case: Case, before: Look, ranks: list[Look]) -> None:
    """Optimizers continue with the state of the first node."""
    for after in ranks:
        assert torch.equal(before.weights, after.weights)
        torch.testing.assert_close(before.pending, after.pending, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(before.moments, after.moments)
        assert before.moments.any() or case.kind == "momentum" or case.host == "loop"


@pytest.mark.slow
def test_resume_on_more_nodes_of_two_devices_keeps_weights_pending_mean_and_optimizer(tmp_path: Path) -> None:
    """One case of each kind and form; hosts share the code that maps a checkpoint to other nodes."""
    cases = list({(case.kind, case.form): case for case in reversed(CASES)}.values())
    before = run_ranks(saved, str(tmp_path), cases, nodes=2, devices=2, timeout=200)[0]
    after = run_ranks(resumed, str(tmp_path), cases, nodes=3, devices=2, timeout=200)
    for number, case in enumerate(cases):
        check_resumed(case, before[number], [each[number] for each in after])


@every(CASES)
def test_resume_on_one_node_applies_pending_updates(pairs: Pairs, alone: Looks, number: int) -> None:
    """test_gradients.py checks pending gradients, which are added to the next gradient."""
    before = pairs[0][number][0].looks[SAVED]
    for after in (each[number] for each in alone):
        expected = before.weights.double()
        if not CASES[number].sends_gradients:
            expected = expected - before.pending
        torch.testing.assert_close(after.weights.double(), expected, rtol=1e-6, atol=1e-7)
        if CASES[number].host != "loop":
            torch.testing.assert_close(before.moments, after.moments)


# -- a checkpoint of one node ------------------------------------------------------------------------------------------

ONE_NODE = [case for case in CASES if case.host != "loop"]  # a loop saves its optimizer itself


def trained_on_one_node(folder: str) -> list[Trained]:
    return [
        train(case, STEPS, save=(SAVED, path_of(folder, number)), look_at=[SAVED])
        for number, case in enumerate(ONE_NODE)
    ]


def resumed_on_two_nodes(folder: str) -> list[Trained]:
    return [train(case, STEPS, start=path_of(folder, number), look_at=[SAVED]) for number, case in enumerate(ONE_NODE)]


@pytest.mark.slow
def test_resume_of_one_node_on_two_nodes_starts_with_nothing_pending(tmp_path: Path) -> None:
    one = run_ranks(trained_on_one_node, str(tmp_path), nodes=1, devices=2, timeout=200)
    two = run_ranks(resumed_on_two_nodes, str(tmp_path), nodes=2, devices=1, timeout=200)
    for number in range(len(ONE_NODE)):
        for after in (each[number] for each in two):
            assert torch.equal(one[0][number].looks[SAVED].weights, after.looks[SAVED].weights)
            assert not after.looks[SAVED].pending.any()
            assert after.rounds > 0
