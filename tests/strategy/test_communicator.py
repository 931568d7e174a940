"""Messages between nodes arrive whole and in node order, for any number of nodes and any order of ranks.

Also: how ranks are assigned to nodes, and the options of the process groups.
"""

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers "fake"

from lightning_sparse import topology as topology_module
from lightning_sparse.exchange import CommunicationError
from lightning_sparse.strategy import HierCommunicator
from lightning_sparse.topology import NODE_VARIABLE, Topology, device_type, discover, with_groups
from tests.helpers.distributed import RanksFailed, RunRanks, run_ranks

PLACEMENTS = {
    "two": [[0], [1]],
    "three, interleaved": [[0, 3], [1, 4], [2, 5]],
    "five, in any order": [[3], [0], [4], [1], [2]],
}
ROUNDS, SIZES = 3, (1_001, 300_001)  # bytes of one call, and of several calls


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("nodes", PLACEMENTS.values(), ids=PLACEMENTS)
def test_messages_arrive_complete_in_node_order(ranks: RunRanks, nodes: list[list[int]], nbytes: int) -> None:
    for place, rounds in enumerate(ranks(travel, nbytes, placement=nodes)):
        node, device = next((m, node.index(place)) for m, node in enumerate(nodes) if place in node)
        for number, (gathered, turned) in enumerate(rounds):
            assert gathered == [text(peer[device], number, None) for peer in nodes]
            assert turned == [text(peer[device], number, node) for peer in nodes]


def travel(nbytes: int) -> list[tuple[list[str], list[str]]]:
    """No barrier separates the rounds, so the message of an early rank must not count for another round."""
    comm = HierCommunicator(discover())
    rank, nodes = dist.get_rank(), comm.topology.num_nodes
    rounds = []
    for number in range(ROUNDS):
        gathered = comm.exchange(message(text(rank, number, None), nbytes))
        turned = comm.all_to_all(torch.stack([message(text(rank, number, to), nbytes) for to in range(nodes)]))
        rounds.append(([read(row) for row in gathered], [read(row) for row in turned]))
    return rounds


def sum_between_nodes() -> list[float]:
    mine = torch.tensor([float(dist.get_rank())])
    HierCommunicator(discover()).all_reduce(mine)
    return mine.tolist()


def test_sum_between_nodes_of_a_single_node_keeps_the_values_of_each_device(ranks: RunRanks) -> None:
    """The values are shards, which differ between devices."""
    assert ranks(sum_between_nodes, nodes=1, devices=2) == [[0.0], [1.0]]


def text(rank: int, number: int, to: int | None) -> str:
    return f"rank {rank}, round {number}, to {to}"


def message(said: str, nbytes: int) -> torch.Tensor:
    """Repeat the text up to `nbytes`."""
    data = (said + ";").encode()
    return torch.frombuffer(bytearray((data * (nbytes // len(data) + 1))[:nbytes]), dtype=torch.uint8)


def read(row_B: torch.Tensor) -> str:
    """Return the text of a message, or "damaged" if the message does not repeat one text."""
    said = bytes(row_B[:100].tolist()).split(b";")[0].decode()
    return said if torch.equal(row_B, message(said, row_B.numel())) else f"damaged: {said}"


def test_groups_have_the_given_timeout_and_a_mesh() -> None:
    """NCCL's watchdog logs the group names."""
    for rank, (named, (node, device, names)) in enumerate(run_ranks(groups_and_mesh, nodes=2, devices=2)):
        assert names == ("node", "device")
        assert node == [rank % 2, rank % 2 + 2]
        assert device == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert named == {
            "intra": ("lightning_sparse: inside the node", 77.0),
            "inter": ("lightning_sparse: between nodes", 77.0),
            "intra_gather": ("lightning_sparse: inside the node, at the end", 77.0),
            "world": ("lightning_sparse: all ranks", 77.0),
        }


def groups_and_mesh() -> tuple[dict[str, tuple[str, float]], tuple[list[int], list[int], tuple[str, ...] | None]]:
    return groups_of_a_rank(), mesh()


def groups_of_a_rank() -> dict[str, tuple[str, float]]:
    topology = discover(timeout=timedelta(seconds=77))
    found = {}
    for name in ("intra", "inter", "intra_gather", "world"):
        group = getattr(topology, name)
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        found[name] = (group.group_desc, timeout.total_seconds())
    dist.barrier()  # otherwise a rank could exit while the others still connect to it
    return found


def test_backend_error_names_the_step() -> None:
    """The test raises the error that NCCL raises under TORCH_NCCL_BLOCKING_WAIT=1."""
    comm = HierCommunicator(Topology(((0,), (1,)), 0))
    comm.error_context = "in round 17, bucket 0"
    gone = dist.DistBackendError("NCCL timeout")
    with (
        patch.object(dist, "all_reduce", side_effect=gone),
        pytest.raises(
            CommunicationError, match=r"all-reduce between nodes \(ranks 0, 1\) failed in round 17"
        ) as failed,
    ):
        comm.all_reduce(torch.zeros(4))
    assert failed.value.__cause__ is gone


# -- named nodes, the mesh, and ranks with different options -----------------------------------------------------------


def mesh() -> tuple[list[int], list[int], tuple[str, ...] | None]:
    found = discover(timeout=timedelta(seconds=60)).mesh_of_axes("node", "device")
    assert found is not None
    node, device = found["node"], found["device"]
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=device.get_group())
    assert total == sum(device.mesh.tolist())
    return node.mesh.tolist(), device.mesh.tolist(), found.mesh_dim_names


def named() -> list[tuple[tuple[int, ...], ...]]:
    """Return the nodes named by an option, and by the environment."""
    name = f"rack{dist.get_rank() % 2}"
    by_option = discover(node_name=name).nodes
    os.environ[NODE_VARIABLE] = name
    by_environment = discover().nodes
    dist.barrier()  # otherwise a rank could exit while the others still connect to it
    return [by_option, by_environment]


def test_nodes_are_named_by_option_or_environment() -> None:
    assert run_ranks(named, nodes=1, devices=4) == [[((0, 2), (1, 3))] * 2] * 4


def configured() -> None:
    discover(config={"density": 0.01, "exchange": "auto"})
    dist.barrier()
    discover(config={"density": 0.02 if dist.get_rank() == 2 else 0.01, "exchange": "auto"})


def test_ranks_with_different_options_fail_before_a_collective() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(configured, nodes=3, devices=1)
    for said in failed.value.raised.values():
        assert "ranks differ in their options: rank 2 has density=0.02, rank 0 has 0.01" in said
    assert failed.value.raised.keys() == {0, 1, 2}


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        (None, "cuda" if torch.cuda.is_available() else "cpu"),
        ("gloo", "cpu"),
        ("cpu:gloo,cuda:fake", "cuda"),
        ("fake", "cuda"),
    ],
)
def test_device_type_follows_the_backends(backend: str | None, device: str) -> None:
    """``fake`` stands in for NCCL. Without a name torch takes the available backends and calls them "undefined"."""
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        assert device_type(dist.get_backend_config()) == device
        assert discover(node_rank=0, local_rank=0).world_size == 1
    finally:
        dist.destroy_process_group()


def groups_made(
    monkeypatch: pytest.MonkeyPatch, backend: str, bound: bool, timeout: timedelta | None
) -> dict[str, dict[str, Any]]:
    """Return the arguments of all calls that create groups, by group description."""
    made: dict[str, dict[str, Any]] = {}

    def record(*_: Any, **options: Any) -> None:
        made[options["group_desc"].removeprefix("lightning_sparse: ")] = options

    world = SimpleNamespace(bound_device_id=torch.device("cuda:0") if bound else None)
    if "nccl" in backend:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.cga_cluster_size = 2
        world._get_backend = {torch.device("cuda"): SimpleNamespace(options=options)}.__getitem__
    asked: dict[str, Any] = {"new_group": record, "split_group": record, "group": SimpleNamespace(WORLD=world)}
    config = "cpu:gloo,cuda:gloo" if backend == "gloo" else "cuda:nccl" if backend == "nccl" else backend
    known = {"get_rank": 0, "get_world_size": 4, "get_backend": backend, "get_backend_config": config}
    answers = {name: lambda value=value: value for name, value in known.items()}
    monkeypatch.setattr(topology_module, "dist", SimpleNamespace(**asked, **answers))
    with_groups(((0, 1), (2, 3)), timeout=timeout)
    return made


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch without NCCL")
@pytest.mark.parametrize("timeout", [None, timedelta(seconds=7)])
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_group_between_nodes_uses_few_blocks_and_keeps_other_options(
    backend: str, bound: bool, timeout: timedelta | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    made = groups_made(monkeypatch, backend, bound, timeout)
    options = made["between nodes"].pop("pg_options")
    assert options.config.max_ctas == topology_module.MAX_CTAS == 4
    assert options.is_high_priority_stream
    assert options.config.cga_cluster_size == 2
    assert options._timeout == (timeout or dist.constants.default_pg_nccl_timeout), "torch warns of another timeout"
    assert made["between nodes"].get("backend") == (None if backend == "nccl" else "nccl"), "Gloo refuses the options"
    assert {"inside the node", "between nodes", "inside the node, at the end"} <= made.keys()
    assert not any("pg_options" in each for each in made.values()), "groups inside a node have no limit"
    assert {each["timeout"] for each in made.values()} == {timeout}


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl", "undefined", "nccl"])
def test_nccl_options_are_set_only_for_nccl(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's NCCL_MAX_CTAS takes precedence."""
    monkeypatch.setenv("NCCL_MAX_CTAS", "16" if "nccl" in backend else "")
    made = groups_made(monkeypatch, backend, False, None)
    assert len(made) >= 3
    assert not any("pg_options" in each for each in made.values())
