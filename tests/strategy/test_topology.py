"""Nodes by name, the mesh, and ranks that were configured differently; on real ranks."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers "fake"

from lightning_sparse.topology import NODE_VARIABLE, device_type, discover
from tests.helpers.distributed import RanksFailed, run_ranks


def mesh() -> tuple[list[int], list[int], tuple[str, ...] | None]:
    found = discover(timeout=timedelta(seconds=60)).mesh
    assert found is not None
    node, device = found["node"], found["device"]
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=device.get_group())
    assert total == sum(device.mesh.tolist())
    return node.mesh.tolist(), device.mesh.tolist(), found.mesh_dim_names


def test_the_topology_is_a_mesh() -> None:
    for rank, (node, device, names) in enumerate(run_ranks(mesh, nodes=2, devices=2)):
        assert names == ("node", "device")
        assert node == [rank % 2, rank % 2 + 2]
        assert device == [rank // 2 * 2, rank // 2 * 2 + 1]


def named(by_option: bool) -> tuple[tuple[int, ...], ...]:
    name = f"rack{dist.get_rank() % 2}"
    if not by_option:
        os.environ[NODE_VARIABLE] = name
    nodes = discover(node_name=name if by_option else None).nodes
    dist.barrier()  # a rank that leaves at once fails those that still connect to it
    return nodes


@pytest.mark.parametrize("by_option", [True, False])
def test_a_node_can_be_named(by_option: bool) -> None:
    assert run_ranks(named, by_option, nodes=1, devices=4) == [((0, 2), (1, 3))] * 4


def configured(differs: bool) -> None:
    discover(config={"density": 0.02 if differs and dist.get_rank() == 2 else 0.01, "exchange": "auto"})
    dist.barrier()


def test_ranks_with_other_options_are_named_before_they_hang() -> None:
    run_ranks(configured, False, nodes=3, devices=1)
    with pytest.raises(RanksFailed) as failed:
        run_ranks(configured, True, nodes=3, devices=1)
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
def test_the_device_of_ranks_is_that_of_their_groups_backends(backend: str | None, device: str) -> None:
    """``fake`` in the place of NCCL. Without a name torch takes what there is, and calls it "undefined"."""
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        assert device_type(dist.get_backend_config()) == device
        assert discover(node_rank=0, local_rank=0).world_size == 1
    finally:
        dist.destroy_process_group()
