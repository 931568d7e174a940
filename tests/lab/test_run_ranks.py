"""`run_ranks` returns results in order, sets the environment of each rank, and distinguishes three failures."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from tests.helpers.distributed import RanksFailed, run_ranks

pytestmark = pytest.mark.timeout(120)


def _environment(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def _raise_on(rank: int) -> None:
    print(f"rank {os.environ['RANK']} was here", flush=True)
    if dist.get_rank() == rank:
        raise RuntimeError("no such shard")
    time.sleep(60)


def _kill_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _wait_for_nobody(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def _unpicklable() -> object:
    return lambda: None


def test_run_ranks_sets_the_environment_of_each_rank():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
    results = run_ranks(_environment, *names, placement=[[0, 2], [1]], init=False)
    assert results == [["0", "3", "0", "2", "0", "0"], ["1", "3", "0", "1", "1", "1"], ["2", "3", "1", "2", "0", "0"]]


def test_run_ranks_error_has_the_rank_and_its_traceback():
    with pytest.raises(RanksFailed, match="no such shard") as caught:
        run_ranks(_raise_on, 1, nodes=1, devices=2, grace_s=1.0)
    assert list(caught.value.raised) == [1]
    assert "_raise_on" in caught.value.raised[1]
    assert "rank 1 was here" in caught.value.raised[1]
    assert not caught.value.killed
    assert not caught.value.hung
    assert caught.value.stopped == [0]


def test_run_ranks_killed_rank_has_the_signal():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_kill_on, 0, nodes=2, devices=1)
    assert caught.value.killed[0].startswith("SIGKILL")
    assert not caught.value.hung


@pytest.mark.slow
def test_run_ranks_hung_rank_has_its_stack():
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_wait_for_nobody, 1, nodes=1, devices=2, timeout=6)
    assert list(caught.value.hung) == [1]
    assert "_wait_for_nobody" in caught.value.hung[1]
    assert not caught.value.raised
    assert not caught.value.killed


def test_result_that_cannot_be_pickled_is_raised():
    with pytest.raises(RanksFailed, match="pickle") as caught:
        run_ranks(_unpicklable, nodes=1, devices=1)
    assert list(caught.value.raised) == [0]
