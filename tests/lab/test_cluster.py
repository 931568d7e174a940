"""The lab: its network, commands, failures and interruptions."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_sparse import cli
from lightning_sparse.lab import Cluster, LabConfig, processes, unavailable_reason
from lightning_sparse.lab.network import NETNS_FOLDER, Network, node_address, remove_leftovers
from lightning_sparse.lab.processes import RunName, processes_of

pytestmark = pytest.mark.timeout(120)
# A lab with a network and a lab without one start the same launchers.
NETWORK = unavailable_reason() is None

RECEIVE = """
import socket, time
with socket.create_server(("0.0.0.0", 5000)) as listener:
    print("ready", flush=True)
    connection, _ = listener.accept()
    started, total = time.monotonic(), 0
    while data := connection.recv(1 << 16):
        total += len(data)
    print(total / (time.monotonic() - started))
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""
PLACE = "import os; print('place', *(os.environ[name] for name in ('RANK', 'GROUP_RANK', 'LOCAL_RANK', 'NODE_RANK')))"
ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(250_000)
dist.all_reduce(total)
assert total[0] == dist.get_world_size()
dist.destroy_process_group()
"""

ANSWERS = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, word, last = dist.get_rank(), torch.arange(20_000), dist.get_world_size() - 1
for _ in range(2):  # the first one connects
    started = time.monotonic()
    if rank == 0:
        dist.send(word, last)
        dist.recv(answer := torch.empty_like(word), last)
        assert torch.equal(answer, word + 1)
    if rank == last:
        dist.recv(asked := torch.empty_like(word), 0)
        dist.send(asked + 1, 0)
if rank == 0:
    print("answered after", 1e3 * (time.monotonic() - started), "ms")
dist.destroy_process_group()
"""


def _run_in(network: Network, part: str, program: str, *arguments: str) -> list[str]:
    return [*network.enter_node(part), sys.executable, "-c", program, *arguments]


def _transfer(network: Network, size: int) -> float:
    """Send `size` bytes from node 0 to node 1, and return the bytes per second that node 1 received."""
    with subprocess.Popen(_run_in(network, "node1", RECEIVE), stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == b"ready\n"
        subprocess.run(_run_in(network, "node0", SEND, node_address(1), str(size)), check=True)
        return float(receiver.stdout.read())


@pytest.fixture
def network():
    """Create two nodes with 20 Mbit/s each."""
    made = Network(RunName.new(), [("node0", node_address(0), 0.02), ("node1", node_address(1), 0.02)])
    yield made
    made.close()
    made.close()  # a second time is allowed


def _lab_namespaces(run: str) -> list[str]:
    return [name for name in os.listdir(NETNS_FOLDER) if name.startswith(f"{run}.")] if NETNS_FOLDER.is_dir() else []


# -- network -----------------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_link_has_its_rate_and_counts_its_bytes(network):
    before = network.traffic()
    size = 2_000_000
    rate = _transfer(network, size)
    assert 0.5 * 2.5e6 < rate < 1.15 * 2.5e6, "20 Mbit/s are 2.5 MB/s"
    after = network.traffic()
    sent = after["node0"].sent - before["node0"].sent
    received = after["node1"].received - before["node1"].received
    assert size < sent < 1.15 * size, "frames add a few percent"
    assert abs(sent - received) < 0.05 * size
    assert after["node1"].sent - before["node1"].sent < 0.2 * size, "acknowledgements only"


@pytest.mark.root
def test_link_changes_its_rate_and_is_cut_and_restored(network):
    network.reshape(0.1)
    rate = _transfer(network, 4_000_000)
    assert 0.5 * 12.5e6 < rate < 1.15 * 12.5e6, "100 Mbit/s are 12.5 MB/s"
    reach = "import socket, sys; socket.create_connection((sys.argv[1], 9), float(sys.argv[2]))"
    errors = []
    for on, patience in ((False, "0.3"), (True, "10")):
        network.switch_link("node1", on=on)
        knock = _run_in(network, "node1", reach, node_address(0), patience)
        errors.append(subprocess.run(knock, capture_output=True, text=True).stderr)
    assert "TimeoutError" in errors[0]
    assert "ConnectionRefusedError" in errors[1], "the node answers, and nothing listens"


@pytest.mark.root
def test_node_and_host_do_not_see_each_other(network):
    script = "hostname; ls /sys/class/net; ip -o route; getent hosts node0"
    before = set(os.listdir("/sys/class/net"))
    seen = subprocess.run([*network.enter_node("node1"), "sh", "-c", script], capture_output=True, text=True).stdout
    assert seen.split("\n")[:3] == ["node1", "eth0", "lo"]
    assert "default" not in seen
    assert node_address(0) in seen
    assert os.uname().nodename != "node1"
    network.close()
    assert set(os.listdir("/sys/class/net")) == before


# -- commands ----------------------------------------------------------------------------------------------------------


def test_lab_ranks_have_the_variables_of_their_node():
    output = io.StringIO()
    with Cluster(LabConfig(nodes=2, devices=2, network=NETWORK)) as cluster:
        result = cluster.run([sys.executable, "-c", PLACE], output=output, timeout=100)
    assert result.exit_code == 0, output.getvalue()
    assert result.node_exit_codes == (0, 0)
    places = sorted(line for line in output.getvalue().splitlines() if "place" in line)
    ranks = ((0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1))
    assert places == [f"[node {node}] place {rank} {node} {device} {node}" for rank, node, device in ranks]
    assert (result.traffic is None) == (not NETWORK)


@pytest.mark.slow
@pytest.mark.root
def test_two_labs_run_at_once_and_write_reports(tmp_path):
    script = tmp_path / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    words = [sys.executable, "-m", "lightning_sparse.cli", "lab", "--devices", "1", "--gbps", "0.5"]
    labs = [
        subprocess.Popen([*words, "--report", str(tmp_path / name), "--", str(script)], stderr=subprocess.PIPE)
        for name in ("first.json", "second.json")
    ]
    for each in labs:
        _, errors = each.communicate(timeout=100)
        assert each.returncode == 0, errors
        assert b"bytes sent between nodes" in errors
    for name in ("first.json", "second.json"):
        report = json.loads((tmp_path / name).read_text())
        assert report["exit_code"] == 0
        assert report["gbps"] == 0.5
        assert all(1_000_000 < node["sent"] < 2_000_000 for node in report["traffic"]), report["traffic"]


@pytest.mark.root
@pytest.mark.sshfs
def test_storage_has_its_own_link(tmp_path):
    (tmp_path / "sample").write_bytes(os.urandom(300_000))
    command = ["sh", "-c", f"cat {tmp_path}/sample > /dev/null && touch {tmp_path}/written"]
    with Cluster(LabConfig(nodes=1, devices=1, storage=tmp_path, storage_gbps=0.1)) as cluster:
        result = cluster.run(command, timeout=100)
        assert cluster.run(command, timeout=100).exit_code == 0, "a second run mounts again"
    assert result.exit_code == 0
    assert (tmp_path / "written").exists()
    assert result.storage_traffic is not None
    assert 300_000 < result.storage_traffic.sent < 600_000
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


# -- failures ----------------------------------------------------------------------------------------------------------


def test_failing_node_decides_and_stops_the_others(capfd, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 1.0)  # the other node would use it completely
    script = "import os, sys, time\nif os.environ['NODE_RANK'] == '1': sys.exit(3)\ntime.sleep(1000)"
    words = ["lab", "--devices", "1", *([] if NETWORK else ["--no-net"]), "--", sys.executable, "-c", script]
    assert cli.main(words) != 0
    assert "exitcode  : 3" in capfd.readouterr().out


@pytest.mark.slow
def test_run_is_ended_at_its_timeout():
    with Cluster(LabConfig(nodes=1, devices=1, network=False)) as cluster:
        with pytest.raises(TimeoutError, match=r"nodes \[0\] were still running"):
            cluster.run([sys.executable, "-c", "import time; time.sleep(100)"], timeout=6)
        assert processes_of(str(cluster.name)) == []


def _start_sleeping_lab(tmp_path, network: bool) -> tuple[subprocess.Popen[bytes], str]:
    """Start a lab in a process, and wait for its ranks. Return the process and the name of the run."""
    script = f"import os, time\nopen(r'{tmp_path}/' + os.environ['RANK'], 'w').close()\ntime.sleep(100)"
    words = [sys.executable, "-m", "lightning_sparse.cli", "lab", *([] if network else ["--no-net"]), "--devices", "1"]
    process = subprocess.Popen([*words, "--", sys.executable, "-c", script], start_new_session=True)
    deadline = time.monotonic() + 60
    while len(os.listdir(tmp_path)) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    token = next(
        entry
        for pid in os.listdir("/proc")
        if pid.isdigit()
        for entry in _environment(pid)
        if entry.startswith(f"{RunName.PREFIX}{process.pid}.")
    )
    return process, token


def _environment(pid: str) -> list[str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        return []
    return [entry.partition("=")[2] for entry in entries if entry.startswith("LIGHTNING_SPARSE_LAB=")]


@pytest.mark.parametrize(
    ("number", "code", "network"),
    [(signal.SIGINT, 130, NETWORK), pytest.param(signal.SIGTERM, 143, False, marks=pytest.mark.slow)],
)
def test_interrupted_lab_cleans_up(tmp_path, number, code, network):
    process, run = _start_sleeping_lab(tmp_path, network)
    assert len(processes_of(run)) >= 4, "two launchers and two ranks"
    process.send_signal(number)
    assert process.wait(timeout=60) == code
    assert processes_of(run) == []
    assert _lab_namespaces(run) == []


@pytest.mark.root
def test_leftovers_of_a_killed_lab_are_removed_by_the_next(tmp_path):
    process, run = _start_sleeping_lab(tmp_path, network=True)
    assert remove_leftovers() == [], "its owner is alive"
    process.kill()
    process.wait()
    assert len(_lab_namespaces(run)) == 3
    with Cluster(LabConfig(nodes=1, devices=1)):
        assert _lab_namespaces(run) == []
        assert processes_of(run) == []


@pytest.mark.slow
def test_ranks_of_a_killed_lab_without_a_network_end_with_it(tmp_path):
    process, run = _start_sleeping_lab(tmp_path, network=False)
    process.kill()
    process.wait()
    with Cluster(LabConfig(nodes=1, devices=1, network=False)):
        deadline = time.monotonic() + 30
        while processes_of(run):
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.root
@pytest.mark.slow
def test_lab_delay_adds_the_round_trip_time(tmp_path):
    script = tmp_path / "answers.py"
    script.write_text(ANSWERS)
    output = io.StringIO()
    with Cluster(LabConfig(nodes=2, devices=1, gbps=0.5, rtt_ms=80)) as cluster:
        for _ in range(2):  # the delay outlives a run
            result = cluster.run([str(script)], output=output, timeout=90)
            assert result.exit_code == 0, output.getvalue()
            assert result.bytes_between_nodes is not None
            assert result.bytes_between_nodes > 4 * 160_000
        name = str(cluster.name)
        assert cluster._delay is not None
        cluster._delay.kill()
        with pytest.raises(RuntimeError, match="that delays links ended with -9"):
            cluster.run([sys.executable, "-c", "pass"], output=output, timeout=90)
    told = [float(line.split("after ")[1].split()[0]) for line in output.getvalue().splitlines() if "answered" in line]
    assert len(told) == 2
    assert all(80 <= milliseconds < 8000 for milliseconds in told)
    assert processes_of(name) == []


# -- launchers ---------------------------------------------------------------------------------------------------------

# Node 1 reaches the last barrier and is delayed there. The other nodes see that all have arrived, and may exit.
HELD_UP = """
import os, sys

if os.environ.get("NODE_RANK") == "1" and any("run_torchrun" in word for word in sys.orig_argv):
    import time
    from torch.distributed.elastic.utils import store

    arrive = store._barrier_nonblocking

    def late(**options):
        key = arrive(**options)
        time.sleep(1.5)
        return key

    store._barrier_nonblocking = late
"""


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_late_launcher_finds_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(HELD_UP)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    output = io.StringIO()
    with Cluster(LabConfig(nodes=2, devices=1, network=False)) as cluster:
        result = cluster.run([sys.executable, "-S", "-c", "print('done')"], output=output, timeout=60)
    assert result.node_exit_codes == (0, 0)
    assert sorted(output.getvalue().splitlines()) == ["[node 0] done", "[node 1] done"]
