"""Samples from the memory of another node, and who does not get them. Servers are real processes on loopback."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from lightning_sparse.data.cache.manifest import load_or_list
from lightning_sparse.data.cache.placement import Placement
from lightning_sparse.data.cache.store import SampleStore, new_run
from lightning_sparse.data.config import CacheConfig, CorruptSampleError
from lightning_sparse.data.peers import client, interface
from lightning_sparse.data.peers.protocol import Keys
from lightning_sparse.data.sample import Format
from tests.data.small import make_folder

Nodes = tuple[list[SampleStore], dict[int, str]]


def make_nodes(folder: Path, formats: tuple[Format, Format] = ("decoded", "decoded")) -> list[SampleStore]:
    run = new_run()
    stores = []
    for node in range(2):
        config = CacheConfig(
            source=str(folder),
            cache_dir=str(folder.parent / f"node{node}"),
            memory_gb=0.01,
            format=formats[node],
            shuffle="global",
            peer_address="127.0.0.1",
        )
        stores.append(SampleStore(config, load_or_list(config, "train", quiet=True), Placement(node, 2), run))
    return stores


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Two nodes, of which node 1 serves."""
    stores = make_nodes(make_folder(tmp_path / "pictures"))
    endpoints = {1: stores[1].serve()}
    stores[0].connect(endpoints)
    yield stores, endpoints
    for store in stores:
        store.close()


def test_a_foreign_sample_comes_from_its_owner(nodes: Nodes) -> None:
    """Also in the first epoch, so that each file is read from storage by one node only."""
    stores, _ = nodes
    first, second = stores
    samples = first.get(range(12))
    assert (first.counters().peer_samples, first.counters().storage_samples) == (6, 6)
    assert second.node_counters().storage_samples == 6
    for ours, theirs in zip(samples, second.get(range(12)), strict=True):
        assert np.array_equal(ours.data, theirs.data)
        assert ours[1:] == theirs[1:]
    first.get(range(12))
    assert (first.counters().peer_samples, first.counters().memory_samples) == (12, 6)
    counts = second.node_counters()
    assert (counts.storage_samples, counts.served_samples) == (12, 6)
    assert counts.memory_samples == 6  # its own: what it served is not among its hits


def test_a_spawned_worker_knows_the_peers(nodes: Nodes) -> None:
    copy = pickle.loads(pickle.dumps(nodes[0][0]))
    copy.get(range(12))
    assert copy.counters().peer_samples == 6
    copy.close()


def test_a_peer_with_another_format_is_of_no_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = make_nodes(make_folder(tmp_path / "pictures"), formats=("jpeg", "decoded"))
    first.connect({1: second.serve()})
    assert [sample.data.ndim for sample in first.get(range(12))] == [1] * 12
    assert first.counters().peer_samples == 0
    assert "node 1 keeps samples as decoded, this node as jpeg" in caplog.text
    first.close()
    second.close()


def test_a_damaged_file_is_named_by_who_asked(nodes: Nodes) -> None:
    first, _ = nodes[0]
    index = int(np.flatnonzero(first.owners == 1)[2])
    (Path(first.config.source) / first.manifest.paths[index]).write_bytes(b"no picture")
    with pytest.raises(CorruptSampleError, match=first.manifest.paths[index]):
        first.get(range(12))
    good = [i for i in range(12) if i != index]
    assert [sample.index for sample in first.get(good)] == good


def test_a_killed_peer_is_replaced_by_disk_and_storage(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "DEAD_S", 0.5)
    monkeypatch.setattr(client, "PING_S", 0.1)
    first, second = nodes[0]
    expected = [sample.data.tobytes() for sample in first.get(range(12))]
    server = second._tiers().server
    assert server is not None
    os.kill(server._process.pid, signal.SIGKILL)
    before = first.counters()
    for _ in range(2):
        assert [sample.data.tobytes() for sample in first.get(range(12))] == expected
    counts = first.counters() - before
    assert (counts.peer_samples, counts.memory_samples) == (0, 12)
    assert (counts.storage_samples, counts.disk_samples) == (6, 6)
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == ["node 1"]


@pytest.mark.slow
def test_a_busy_peer_is_not_taken_for_dead(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers pings while all of its readers wait: here for a lock that another process holds."""
    monkeypatch.setattr(client, "DEAD_S", 1.0)
    monkeypatch.setattr(client, "PING_S", 0.1)
    first, second = nodes[0]
    hold = "import fcntl, os, struct, sys, time; f = os.open(sys.argv[1], os.O_RDWR);"
    hold += "fcntl.fcntl(f, fcntl.F_OFD_SETLKW, struct.pack('hhqqi', fcntl.F_WRLCK, 0, 0, 1, 0));"
    hold += "print('held', flush=True); time.sleep(2.5)"
    path = str(second._tiers().memory.path)
    with subprocess.Popen([sys.executable, "-c", hold, path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        foreign = np.flatnonzero(first.owners == 1).tolist()
        first.get(foreign)
    assert first.counters().peer_samples == len(foreign)


def test_the_server_ends_with_who_started_it(tmp_path: Path) -> None:
    make_folder(tmp_path / "pictures")
    code = f"""
import os, sys
from pathlib import Path
from tests.data.test_peers import make_nodes
stores = make_nodes(Path({str(tmp_path / "pictures")!r}))
print(stores[1].serve(), stores[1]._tiers().server._process.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        endpoint, pid = owner.stdout.readline().split()
        assert endpoint.startswith("tcp://127.0.0.1:")
        owner.kill()
        owner.wait()
        deadline = time.monotonic() + 20
        while os.path.exists(f"/proc/{pid}/exe") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not os.path.exists(f"/proc/{pid}/exe")


# ----------------------------------------------------------------------------------------------------- strangers


def ask(endpoint: str, keys: tuple[bytes, bytes, bytes] | None) -> list[bytes]:
    """What a client with these keys (server's public, own public, own secret) is answered within a second."""
    context = zmq.Context()
    try:
        with context.socket(zmq.DEALER) as client:
            client.linger = 0
            if keys is not None:
                client.curve_serverkey, client.curve_publickey, client.curve_secretkey = keys
            client.connect(endpoint)
            client.send_multipart([b"get", b"12345678", np.arange(2).tobytes()])
            return client.recv_multipart() if client.poll(1000) else []
    finally:
        context.destroy(linger=0)


def test_a_stranger_gets_nothing(nodes: Nodes) -> None:
    stores, endpoints = nodes
    keys = Keys.of(stores[0]._run)
    own = zmq.curve_keypair()
    assert ask(endpoints[1], (keys.server_public, keys.client_public, keys.client_secret))[0] == b"have"
    assert ask(endpoints[1], None) == []
    assert ask(endpoints[1], (keys.server_public, *own)) == []  # knows the server, is not known to it
    assert ask(endpoints[1], (own[0], keys.client_public, keys.client_secret)) == []
    other = Keys.of(new_run())
    assert ask(endpoints[1], (other.server_public, other.client_public, other.client_secret)) == []
    host, _, port = endpoints[1].removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(b"GET / HTTP/1.0\r\n\r\n" * 20)
        raw.settimeout(1)
        try:
            received = raw.recv(1 << 16)
        except (TimeoutError, ConnectionError):
            received = b""
        assert len(received) < 128  # a greeting, no sample
    assert stores[0].get([int(np.flatnonzero(stores[0].owners == 1)[0])])  # it still serves


def test_only_the_given_interface_is_bound(nodes: Nodes) -> None:
    _, endpoints = nodes
    port = int(endpoints[1].rpartition(":")[2])
    with socket.socket() as probe:  # the same port is free on another address of this machine
        probe.bind(("127.0.0.2", port))


def test_an_interface_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    assert interface.node_address(loopback) == "127.0.0.1"
    assert interface.node_address("::1") == "::1"
    with pytest.raises(ValueError, match="neither an IP address nor an interface"):
        interface.node_address("nowhere7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback)
    assert interface.node_address(None) == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert interface.node_address(None) in ("127.0.0.1", "::1")
