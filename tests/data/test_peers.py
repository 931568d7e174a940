"""Samples from the memory of another node, and refused clients. Servers are real processes on loopback."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from lightning_sparse.data import child
from lightning_sparse.data import peers as interface
from lightning_sparse.data.cache.store import Placement, SampleStore, new_run
from lightning_sparse.data.child import Child
from lightning_sparse.data.config import CorruptSampleError, DataError
from lightning_sparse.data.decode import Format
from lightning_sparse.data.peers import RESERVE, Keys, allow_connections, client, server
from lightning_sparse.data.sources.listing import load_or_list
from tests.data.programs import program
from tests.helpers.data import config_of, make_folder

Nodes = tuple[list[SampleStore], dict[int, str]]


def make_nodes(folder: Path, formats: tuple[Format, Format] = ("decoded", "decoded"), **more: Any) -> list[SampleStore]:
    run = new_run()
    stores = []
    for node in range(2):
        options = {"format": formats[node], "shuffle": "global", "peer_address": "127.0.0.1", **more}
        config = config_of(folder, folder.parent / f"node{node}", **options)
        stores.append(SampleStore(config, load_or_list(config, "train"), Placement(node, 2), run))
    return stores


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Start two nodes, of which node 1 serves."""
    stores = make_nodes(make_folder(tmp_path / "pictures"))
    endpoints = {1: stores[1].serve()}
    stores[0].connect(endpoints)
    yield stores, endpoints
    for store in stores:
        store.close()


def test_sample_of_another_node_comes_from_its_memory(nodes: Nodes) -> None:
    """This holds in the first epoch, too, so that only one node reads each file from storage."""
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
    assert counts.memory_samples == 6, "only the node's own samples"
    copy = pickle.loads(pickle.dumps(first))  # in a spawned worker
    copy.get(range(12))
    assert copy.counters().peer_samples == 6
    copy.close()


def test_server_resizes_images_to_the_short_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MIN_PAUSE_S", 0.1)
    first, second = make_nodes(make_folder(tmp_path / "pictures"), short_side=20)
    first.connect({1: second.serve()})
    owned = np.flatnonzero(first.owners == 1).tolist()
    samples = first.get(owned)
    while first.counters().peer_samples < len(owned):  # on a busy machine, the server first imports torch for too long
        samples = first.get(owned)
    for ours, theirs in zip(samples, second.get(owned), strict=True):
        assert min(ours.data.shape[:2]) == 20
        assert np.array_equal(ours.data, theirs.data)
    first.close()
    second.close()


def test_files_of_an_idle_or_ended_server_are_on_its_disk(nodes: Nodes) -> None:
    first, second = nodes[0]
    owned = np.flatnonzero(first.owners == 1).tolist()
    first.get(owned[:3])
    end = time.monotonic() + 60
    while second.disk.entries() < 3 and time.monotonic() < end:
        time.sleep(0.05)
    assert second.disk.entries() == 3
    first.get(owned[3:])
    second.end_serving()
    assert second.disk.entries() == 6


def test_peer_with_another_format_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = make_nodes(make_folder(tmp_path / "pictures"), formats=("jpeg", "decoded"))
    first.connect({1: second.serve()})
    assert [sample.data.ndim for sample in first.get(range(12))] == [1] * 12
    assert first.counters().peer_samples == 0
    assert "node 1 keeps samples as decoded, this node as jpeg" in caplog.text
    first.close()
    second.close()


def test_damaged_file_is_named_by_the_client(nodes: Nodes) -> None:
    first, _ = nodes[0]
    index = int(np.flatnonzero(first.owners == 1)[2])
    (Path(first.config.source) / first.manifest.paths[index]).write_bytes(b"no picture")
    with pytest.raises(CorruptSampleError, match=first.manifest.paths[index]):
        first.get(range(12))
    good = [i for i in range(12) if i != index]
    assert [sample.index for sample in first.get(good)] == good


def test_killed_peer_is_replaced_by_disk_and_storage(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = nodes[0]
    expected = [sample.data.tobytes() for sample in first.get(range(12))]
    monkeypatch.setattr(client, "DEAD_S", 0.5)
    monkeypatch.setattr(client, "PING_S", 0.1)
    server = second._tiers().server
    assert server is not None
    os.kill(server._child.process.pid, signal.SIGKILL)
    before = first.counters()
    for _ in range(2):
        assert [sample.data.tobytes() for sample in first.get(range(12))] == expected
    counts = first.counters() - before
    assert (counts.peer_samples, counts.memory_samples) == (0, 12)
    assert (counts.storage_samples, counts.disk_samples) == (6, 6)
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == ["node 1"]


@pytest.mark.slow
def test_busy_peer_stays_in_use(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers pings while all of its readers wait for a lock that another process holds."""
    monkeypatch.setattr(client, "DEAD_S", 1.0)
    monkeypatch.setattr(client, "PING_S", 0.1)
    first, second = nodes[0]
    hold = "import fcntl, os, sys, time; fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX);"
    hold += "print('held', flush=True); time.sleep(2.5)"
    with program(hold, f"/proc/{os.getpid()}/fd/{second._tiers().memory._segment.file}") as holder:
        holder.wait_for("held")
        foreign = np.flatnonzero(first.owners == 1).tolist()
        first.get(foreign)
    assert first.counters().peer_samples == len(foreign)


OWNER = """
import sys
from pathlib import Path
from tests.data.test_peers import make_nodes
stores = make_nodes(Path(sys.argv[1]))
print(stores[1].serve(), stores[1]._tiers().server._child.process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    make_folder(tmp_path / "pictures")
    with program(OWNER, tmp_path / "pictures") as owner:
        endpoint, pid = owner.line().split()
        assert endpoint.startswith("tcp://127.0.0.1:")
        owner.send(signal.SIGKILL)
        owner.wait()
        while os.path.exists(f"/proc/{pid}/exe"):
            time.sleep(0.02)


def test_threads_share_one_connection(nodes: Nodes) -> None:
    """With 16 nodes and 16 threads, one connection per thread would need hundreds of descriptors."""
    first = nodes[0][0]
    foreign = np.flatnonzero(first.owners == 1).tolist()
    first.get(foreign)
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: [sample.index for sample in first.get(foreign)], range(160)))
        assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert answers == [foreign] * 160
    assert first.counters().peer_samples == 161 * len(foreign)


def test_run_continues_with_too_many_open_files(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    first = nodes[0][0]
    foreign = np.flatnonzero(first.owners == 1).tolist()
    first.get(range(12))
    first.close()  # reopens with a new connection
    first._tiers()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # nothing else can be opened
    try:
        peers = first._tiers().peers
        assert peers is not None
        assert list(peers.fetch(foreign, first.owners[foreign])) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "node 1" in caplog.text
    assert "cannot be reached (Too many open files)" in caplog.text


def test_low_limit_of_open_files_is_raised_or_refused() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        allow_connections(500)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 500 + RESERVE
        with pytest.raises(DataError, match=r"open files for 9,000,000 connections.*ulimit -Hn.*shuffle='local'"):
            allow_connections(9_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_in_a_second(pid: int) -> float:
    before = cpu_seconds(pid)
    time.sleep(1)
    return cpu_seconds(pid) - before


def test_server_at_its_limit_idles_and_still_serves_its_clients(nodes: Nodes) -> None:
    (first, second), endpoints = nodes
    foreign = np.flatnonzero(first.owners == 1).tolist()
    first.get(foreign)
    server = second._tiers().server
    assert server is not None
    pid = server._child.process.pid
    limit = max(int(each) for each in os.listdir(f"/proc/{pid}/fd")) + 4
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
    host, _, port = endpoints[1].removeprefix("tcp://").rpartition(":")
    with ExitStack() as strangers:
        for _ in range(20):
            with suppress(ConnectionError):  # refused or reset once the server is at its limit
                strangers.enter_context(socket.create_connection((host, int(port)), timeout=5))
        assert any(cpu_in_a_second(pid) < 0.2 for _ in range(10)), "the server must idle after the handshakes"
        before_samples = first.counters().peer_samples
        first.get(foreign)
        assert first.counters().peer_samples == before_samples + len(foreign)
    keys = Keys.of(first._run)
    for _ in range(20):  # new clients are served again
        answer = ask(endpoints[1], (keys.server_public, keys.client_public, keys.client_secret))
        if answer:
            break
    assert answer[0] == b"have"


# -- unknown clients ---------------------------------------------------------------------------------------------------


def ask(endpoint: str, keys: tuple[bytes, bytes, bytes] | None) -> list[bytes]:
    """Return the answer within a second to a client with these keys (server's public, own public, own secret)."""
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


def test_unknown_client_gets_no_sample(nodes: Nodes) -> None:
    stores, endpoints = nodes
    keys = Keys.of(stores[0]._run)
    own = zmq.curve_keypair()
    assert ask(endpoints[1], (keys.server_public, keys.client_public, keys.client_secret))[0] == b"have"
    other = Keys.of(new_run())
    strangers = [
        None,
        (keys.server_public, *own),  # knows the server, but the server does not know it
        (own[0], keys.client_public, keys.client_secret),
        (other.server_public, other.client_public, other.client_secret),
    ]
    with ThreadPoolExecutor(len(strangers)) as pool:
        assert list(pool.map(partial(ask, endpoints[1]), strangers)) == [[]] * len(strangers)
    host, _, port = endpoints[1].removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(b"GET / HTTP/1.0\r\n\r\n" * 20)
        raw.settimeout(1)
        try:
            received = raw.recv(1 << 16)
        except (TimeoutError, ConnectionError):
            received = b""
        assert len(received) < 128  # a greeting without a sample
    assert stores[0].get([int(np.flatnonzero(stores[0].owners == 1)[0])])  # it still serves
    with socket.socket() as probe:  # the same port is free on another address of this machine
        probe.bind(("127.0.0.2", int(port)))


def test_peer_server_uses_the_given_port_range(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        folder = make_folder(tmp_path / "pictures", per_class=1)
        for ports in ((port, min(port + 20, 65535)), (port, port)):
            config = config_of(folder, peer_address="127.0.0.1", peer_ports=ports)
            store = SampleStore(config, load_or_list(config, "train"), Placement(0, 2))
            if ports[0] < ports[1]:
                assert ports[0] < int(store.serve().rpartition(":")[2]) <= ports[1]
            else:
                with pytest.raises(DataError, match=rf"none of the ports {port} to {port} .*wider range in peer_ports"):
                    store.serve()
            store.close()


def test_master_with_a_loopback_name_uses_the_interface_towards_other_nodes() -> None:
    """Debian's hosts file gives a machine's own name the address 127.0.1.1."""
    assert interface.reachable("127.0.1.1", ["127.0.1.1", "127.0.1.1"]) == "127.0.1.1"  # all nodes on one machine
    assert interface.reachable("10.0.0.1", ["127.0.1.1"]) == "10.0.0.1"
    own = interface._address_towards("198.51.100.7")  # by the default route
    if own == "127.0.0.1":
        pytest.skip("this machine has no route to others")
    assert interface.reachable("127.0.1.1", ["127.0.1.1", "198.51.100.7"]) == own


def test_node_address_follows_the_interface_settings(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_server_that_hangs_while_it_starts_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never reads, and the parent sends more data than the socket holds."""
    (tmp_path / "hang.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(server, "START_S", 1.0)
    monkeypatch.setattr(server, "Child", lambda _: Child(tmp_path / "hang.py"))
    with pytest.raises(RuntimeError, match="did not start on 127.0.0.1"):
        server.PeerServer(np.zeros(4 << 20), b"run", "127.0.0.1")  # type: ignore[arg-type]


def test_child_that_ends_late_leaves_no_zombie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hang.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(child, "END_S", 0.0)
    late = Child(tmp_path / "hang.py")
    late.end(0.0)
    until = time.monotonic() + 60
    while Path(f"/proc/{late.process.pid}").exists():
        assert time.monotonic() < until, "the child is still there, at least as a zombie"
        time.sleep(0.02)
