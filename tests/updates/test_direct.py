"""Connections between nodes: no proxy, the node's own address, resumed downloads, and errors that name the cause."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchft", reason="needs torchft")

from lightning_sparse.elastic import updates as elastic
from lightning_sparse.elastic.direct import is_loopback, own_address
from lightning_sparse.elastic.lighthouse import Lighthouse, Member, NodeStatus, _store_on, read_quorum
from lightning_sparse.elastic.quorum import quorum_of
from lightning_sparse.elastic.rounds import _process_group
from lightning_sparse.elastic.snapshots import Download, Entry, Receiver, Snapshot, SnapshotServer
from lightning_sparse.elastic.wait import Wait

WEIGHTS, BIAS = torch.arange(30_011, dtype=torch.float32), torch.arange(7, dtype=torch.bfloat16)
TENSORS = [("weights", WEIGHTS), ("empty", torch.empty(0)), ("bias", BIAS)]


class Stored(Receiver):
    """Stores the first `wanted` tensors."""

    def __init__(self, wanted: int = len(TENSORS)) -> None:
        self.wanted, self.tensors = wanted, dict[str, torch.Tensor]()

    def begin(self, head: Any, layout: Sequence[Entry]) -> int:
        self.head = head
        return self.wanted

    def take(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor


@pytest.fixture
def server() -> Iterator[SnapshotServer]:
    server = SnapshotServer("127.0.0.1")
    server.offer(["name"], Snapshot({"step": 3}, TENSORS))
    yield server
    server.close()


@pytest.fixture
def through_a_dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)


@contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Call `serve` in a thread for each connection. Yields the address."""

    def accept() -> None:
        while True:
            try:
                client = listens.accept()[0]
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listens:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listens.getsockname()[1]}"


@contextmanager
def relay(address: str, cut_after: int, pause: float) -> Iterator[tuple[str, list[int]]]:
    """Relay connections to an address. The first response pauses after `cut_after` bytes.

    If `pause` is negative, the connection is cut instead. Yields the new address, and the number of bytes relayed per
    connection.
    """
    host, port = address.removeprefix("http://").split(":")
    passed = list[int]()

    def serve(client: socket.socket) -> None:
        place = len(passed)
        passed.append(0)
        # the download may have ended during the pause
        with suppress(ConnectionError), client, socket.create_connection((host, int(port))) as peer:
            peer.sendall(client.recv(65536))
            while chunk := peer.recv(4096):
                if place == 0 and passed[place] <= cut_after < passed[place] + len(chunk):
                    if pause < 0:
                        return
                    time.sleep(pause)
                client.sendall(chunk)
                passed[place] += len(chunk)

    with serving(serve) as relayed:
        yield relayed, passed


def received(download: Download[Stored], pause: float) -> None:
    while not download.advance(1.0, pause):  # limited by the test's timeout
        pass
    assert download.receiver.head == {"step": 3}
    assert download.receiver.tensors.keys() == dict(TENSORS).keys()
    assert all(torch.equal(download.receiver.tensors[name], each) for name, each in TENSORS)


def test_download_with_cut_connection_resumes_where_it_stopped(server: SnapshotServer) -> None:
    with relay(server.address, 50_001, -1) as (address, passed):
        received(Download(address, "name", Stored), pause=5.0)
        assert len(passed) == 2
        assert passed[1] < WEIGHTS.nbytes - passed[0] + 4096, "only the rest is downloaded"


def test_download_that_pauses_continues(server: SnapshotServer) -> None:
    with relay(server.address, 50_001, 1.5) as (address, passed):
        received(Download(address, "name", Stored), pause=30.0)
        assert len(passed) == 1


def test_download_that_returned_after_a_pause_resumes_in_the_next_call(server: SnapshotServer) -> None:
    with relay(server.address, 50_001, 600.0) as (address, passed):
        download = Download(address, "name", Stored)
        received(download, pause=0.2)
        assert passed[1] < WEIGHTS.nbytes


def test_download_ends_after_the_wanted_tensors(server: SnapshotServer) -> None:
    download = Download(server.address, "name", lambda: Stored(wanted=1))
    assert download.advance(5.0, 5.0)
    assert download.receiver.tensors.keys() == {"weights"}


class Strict(Stored):
    """Accepts only a head that has a "step"."""

    def begin(self, head: Any, layout: Sequence[Entry]) -> int:
        return super().begin({"step": head["step"] + 0}, layout)


def stream_of(head: Any) -> bytes:
    return b"".join(Snapshot(head, TENSORS).read(0))


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 7 + b"\x40" + b"x" * 64,
        b"\x7f" * 200,
        os.urandom(5000),
        stream_of({"step": 3}) + b"more",
        stream_of({}),
        stream_of(["step"]),
        stream_of({"step": "x"}),
    ],
    ids=len,
)
@pytest.mark.parametrize("has_length", [True, False])
def test_download_of_garbage_raises_an_error_with_the_address(garbage: bytes, has_length: bool) -> None:
    length = b"Content-Length: %d\r\n" % len(garbage) if has_length else b""

    def answer(client: socket.socket) -> None:
        with client:
            client.recv(4096)
            client.sendall(b"HTTP/1.0 200 OK\r\n%b\r\n%b" % (length, garbage))

    with serving(answer) as address, pytest.raises(RuntimeError, match=f"{address} sent no snapshot"):
        Download(address, "name", Strict).advance(5.0, 5.0)


@pytest.mark.parametrize("begin", [b"", b"short"], ids=len)
def test_download_that_has_only_begun_waits_for_the_rest(begin: bytes) -> None:
    def answer(client: socket.socket) -> None:
        with client:
            client.recv(4096)
            client.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 100\r\n\r\n%b" % begin)

    with serving(answer) as address:
        assert not Download(address, "name", Stored).advance(0.3, 0.3)


def test_download_takes_no_proxy(server: SnapshotServer, through_a_dead_proxy: None) -> None:
    received(Download(server.address, "name", Stored), pause=5.0)


def test_download_says_why_it_waits(server: SnapshotServer) -> None:
    missing = Download(server.address, "missing", Stored)
    assert not missing.advance(0.3, 1.0)
    assert missing.problem == "it does not offer its weights yet"
    server.close()
    gone = Download(server.address, "name", Stored)
    assert not gone.advance(0.3, 1.0)
    assert "Connection refused" in gone.problem
    server.__init__("127.0.0.1")  # type: ignore[misc]  # the fixture closes it


def test_wait_of_a_node_that_joins_names_its_cause_and_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    download, now = Download("http://10.0.0.9:77", "name", Stored), time.monotonic()
    download.problem = "ConnectionRefusedError: no"
    monkeypatch.setattr(elastic.time, "monotonic", lambda: now + after)  # type: ignore[attr-defined]
    after = 0.0
    wait = Wait()
    wait.check(download, 30, unanswered=False)
    assert not caplog.messages
    after = 11.0
    wait.check(download, 30, unanswered=False)
    wait.check(None, 30, unanswered=False)
    assert caplog.messages == [
        "this node has waited 11 s to join the other nodes: the node at http://10.0.0.9:77 sends no weights "
        "(ConnectionRefusedError: no)"
    ]
    after = 121.0
    with pytest.raises(RuntimeError, match="could not join the others within 121 s: .* sends no weights .Connection"):
        wait.check(download, 30, unanswered=False)
    after = 1900.0
    with pytest.raises(RuntimeError, match="no node offers its weights"):
        wait.check(None, 30, unanswered=False)
    with pytest.raises(RuntimeError, match="the lighthouse sends no list of nodes"):
        wait.check(None, 30, unanswered=True)


def test_lighthouse_page_takes_no_proxy_and_names_are_unescaped(through_a_dead_proxy: None) -> None:
    page = b"<b>a&lt;b&gt; &amp; &quot;c&quot;:1f</b> x <br>Step: 7"

    def answer() -> None:
        with listens.accept()[0] as client:
            client.recv(4096)
            client.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(page), page))

    with socket.create_server(("127.0.0.1", 0)) as listens:
        threading.Thread(target=answer, daemon=True).start()
        assert read_quorum(f"127.0.0.1:{listens.getsockname()[1]}") == [('a<b> & "c"', 7)]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://no.such.host.invalid:29510", "the name 'no.such.host.invalid' does not resolve"),
        (f"http://{'a' * 70}.b:1", "does not resolve"),
        ("http://", "has no host"),
        ("http://host:many", "is not a valid address"),
        ("http://host:99999", "is not a valid address"),
    ],
)
def test_lighthouse_address_that_cannot_work_is_refused_by_name(address: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        Lighthouse(address, "a", timeout=1)
    assert str(error.value).startswith(address)


def test_slow_host_name_resolution_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [ended.wait(60)])
    monkeypatch.setattr("lightning_sparse.elastic.direct.RESOLVE_SECONDS", 0.1)
    with pytest.raises(ValueError, match="does not resolve .no answer in"):
        own_address("http://host:29510")
    ended.set()


def test_store_of_a_node_listens_only_on_its_own_address() -> None:
    store = _store_on("127.0.0.2")
    with socket.create_connection(("127.0.0.2", store.port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.3", store.port), timeout=5)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.8.0.1:1", True),
        ("::1:1", True),
        ("[::1]:1", True),
        ("::ffff:127.0.0.1:1", True),
        ("10.0.0.1:1", False),
        ("fe80::1%lo:1", False),
        ("", False),
    ],
)
def test_loopback_addresses_are_recognized(place: str, expected: bool) -> None:
    assert is_loopback(place) is expected


def member(name: str, place: str, network: str, number: int = 5) -> Member:
    said: dict[str, Any] = {"token": f"{number}", "number": number, "run": "x", "trains": True, "observes": False}
    return Member(name, place, NodeStatus(network=network, **said))


def names_of(*members: Member) -> list[str]:
    found = quorum_of(members)
    assert {each.name for each in (*found.members, *found.unreached)} == {each.name for each in members}
    assert all(each in found.members for each in found.contributors)
    return [each.name for each in found.members]


def test_quorum_of_several_machines_has_no_member_with_a_loopback_address() -> None:
    far = [member("b", "10.0.0.2:1", "two"), member("c", "10.0.0.3:1", "three")]
    assert names_of(member("a", "127.0.0.1:1", "one", number=3), *far) == ["b", "c"]
    assert names_of(member("a", "10.0.0.1:1", "one", number=3), *far) == ["a", "b", "c"]


def test_quorum_with_a_training_loopback_node_excludes_other_machines() -> None:
    near = member("c", "10.0.0.1:1", "one", number=0)
    assert names_of(member("a", "127.0.0.1:1", "one"), member("b", "10.0.0.2:1", "two", number=0), near) == ["a", "c"]
    assert names_of(member("a", "127.0.0.1:1", "one"), member("b", "127.0.0.1:2", "one")) == ["a", "b"]


def test_group_between_nodes_listens_on_the_address_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, Gloo uses the address of the host name."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before, store = listening(), _store_on("127.0.0.1")
    groups = [_process_group("127.0.0.2", timedelta(seconds=20)) for _ in range(2)]
    joined = [
        threading.Thread(target=group.configure, args=(f"127.0.0.1:{store.port}/x", f"{rank}", rank, 2))
        for rank, group in enumerate(groups)
    ]
    for each in joined:
        each.start()
    for each in joined:
        each.join()
    listens = listening() - before - {f"0100007F:{store.port:04X}"}
    assert {each.split(":")[0] for each in listens} == {"0200007F"}
    for group in groups:
        group.abort(errored=False)


def listening() -> set[str]:
    """Return the addresses and ports in hexadecimal on which this process listens."""
    mine = {
        os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink() and os.path.lexists(each)
    }
    rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}
