"""Elastic nodes in processes, with the lighthouse of torchft: killed, stopped, cut off, and back again."""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

pytest.importorskip("torchft", reason="needs torchft")

from lightning_sparse.elastic import observer
from lightning_sparse.elastic.rounds import RoundProtocol
from tests.helpers.nodes import Nodes, nodes_of
from tests.updates.elastic_node import main, toy

pytestmark = pytest.mark.slow
PARAMETERS = sum(p.numel() for p in toy(0).parameters())


STANDARD: dict[str, Any] = {"timeout": 5, "density": 0.1}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with nodes_of(main) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def kept() -> Iterator[Nodes]:
    with nodes_of(main) as nodes:
        yield nodes


@pytest.fixture
def trio(kept: Nodes) -> Iterator[Nodes]:
    """The nodes a, b and c with the standard options, in one quorum. Tests of this module share them."""
    for name in "abc":
        if not kept.runs(name):
            kept.start(name, **STANDARD)
    for name in "abc":
        kept.wait_for(name, of(3))
    yield kept
    check(kept, "abc")


def tokens_of(nodes: Nodes, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the weights that each node had. Weights of one name have equal bits on all nodes."""
    digests: dict[str, set[str]] = {}
    told = {name: [each for each in nodes.reports(name) if "digest" in each] for name in names}
    for each in (each for reports in told.values() for each in reports):
        digests.setdefault(each["token"], set()).add(each["digest"])
    assert {token: found for token, found in digests.items() if len(found) > 1} == {}
    return {name: [each["token"] for each in reports] for name, reports in told.items()}


def check(nodes: Nodes, names: str) -> dict[str, list[str]]:
    """Return the same, and check that no node has lost updates: it sent them in rounds that count, or they are
    pending."""
    for name in names:
        off = [each["off"] for each in nodes.reports(name) if "digest" in each]
        large = [index for index, each in enumerate(off) if each >= 1e-5]
        assert not large, f"{name}: off by {max(off)} in reports {large[0]} to {large[-1]} of {len(off)}"
    return tokens_of(nodes, names)


def end(nodes: Nodes, names: str) -> None:
    """Tell nodes to end."""
    for name in names:
        nodes.send(name, signal.SIGTERM)
    nodes.join(*names)


def finish(nodes: Nodes, names: str) -> dict[str, list[str]]:
    """End nodes, and check them."""
    end(nodes, names)
    return check(nodes, names)


def begin(nodes: Nodes, names: str, **options: Any) -> None:
    """Start nodes."""
    for name in names:
        nodes.start(name, **options)


def of(count: int, after: int = 0) -> Callable[[dict[str, Any]], bool]:
    """Match a report of a round of so many nodes, after another round."""
    return lambda report: report.get("nodes") == count and report["number"] > after


# -- the same three nodes ----------------------------------------------------------------------------------------------


def test_killed_node_comes_back_with_the_weights_of_its_peers(trio: Nodes) -> None:
    begun = trio.wait_for("c", of(3))["number"]
    trio.kill("c")
    trio.wait_for("a", of(2, begun))
    trio.start("c", seed=7, **STANDARD)
    trio.wait_for("c", of(3))
    begins = [each["begins"] for each in trio.reports("c") if "begins" in each]
    assert begins[-1] > 0
    tokens = tokens_of(trio, "abc")
    assert set(tokens["a"]) & set(tokens["b"]) & set(tokens["c"])


def test_stopped_node_misses_rounds_and_comes_back(trio: Nodes) -> None:
    begun = trio.wait_for("c", of(3))["number"]
    trio.send("c", signal.SIGSTOP)
    without = trio.wait_for("a", of(2, begun))["number"]
    trio.wait_for("a", of(2, without + 10))
    trio.send("c", signal.SIGCONT)
    trio.wait_for("c", of(3, without))
    assert "has missed rounds" in trio.output("c")


def test_node_that_ends_sends_its_pending_updates(trio: Nodes) -> None:
    begun = trio.wait_for("c", of(3))["number"]
    trio.send("c", signal.SIGTERM)
    trio.join("c")
    last = trio.reports("c")[-1]
    assert last["ends"] > 0
    assert last["left"] < 1e-6
    assert not last["own"]
    trio.wait_for("a", of(2, begun))


def test_nodes_train_while_there_is_no_lighthouse(trio: Nodes) -> None:
    before = trio.wait_for("a", of(3))
    trio.darken()
    during = trio.wait_for("a", lambda report: report["step"] > before["step"] + 30)
    assert during["number"] < before["number"] + 30
    trio.light()
    trio.wait_for("a", of(3, during["number"] + 10))
    assert trio.output("a").count("sent no list of nodes") == trio.output("a").count("sends the list of nodes again")


def test_node_that_ends_without_a_lighthouse_keeps_its_updates_in_its_own_weights(trio: Nodes) -> None:
    trio.darken()
    dark = trio.reports("c")[-1]["step"]
    trio.wait_for("c", lambda report: report.get("step", 0) > dark + 10)
    end(trio, "c")
    trio.light()
    trio.wait_for("a", of(2))  # a node that is the first to ask a lighthouse begins a new run
    last = trio.reports("c")[-1]
    assert last["ends"] > dark
    assert last["left"] > 1e-6
    assert last["shown_off"] < 1e-6
    assert last["own"]
    assert trio.output("c").count("so the other nodes lack them") == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"density": 0.2}, "this node differs from the training nodes: density=0.2, theirs 0.1"),
        ({"version": ["0123456789abcdef", 10**6, 0, ""]}, "resumes round 1000000 of run '0123456789abcdef'"),
        ({"version": ["0123456789abcdef", 10**6, 0, "other"]}, "resumes round 1000000 of run 'other'"),
    ],
    ids=["other options", "early checkpoint of another run", "checkpoint of another run"],
)
def test_node_of_another_run_is_refused_and_the_others_keep_their_weights(
    trio: Nodes, options: dict[str, Any], error: str
) -> None:
    trio.start("d", **{**STANDARD, **options})
    trio.join("d", code=1)
    assert error in trio.output("d")
    assert trio.wait_for("a", of(3))["number"] < 10**6


def test_node_that_ends_with_non_finite_updates_leaves_them_out(trio: Nodes) -> None:
    trio.start("d", breaks_at=[*range(10_000)], **STANDARD)
    trio.wait_for("d", lambda report: report.get("rounds_left_out", 0) > 3)
    end(trio, "d")
    last = trio.reports("d")[-1]
    assert (last["finite"], last["left"]) == (True, 0.0)
    tokens_of(trio, "bad")


def test_step_ahead_is_measured_soon_after_a_node_has_joined(trio: Nodes) -> None:
    begun = trio.wait_for("a", of(3, 70))["number"]  # when samples are rare
    trio.kill("c")
    trio.wait_for("a", of(2, begun))
    trio.start("c", **STANDARD)
    back = trio.wait_for("a", of(3, begun))["number"]
    measured = trio.wait_for("a", lambda report: report.get("nodes") == 3 and report["step_ahead"] < 1)
    assert measured["number"] < back + 20


# -- nodes with other options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"delay": 0},
        {"sync_every": 3, "delay": 2, "step_ahead": 0.5, "outer_lr": 1.5},
        {"optimizers": 2},
        {"optimizers": 2, "delay": 0, "flush_every": 5},
        {"optimizers": 2, "sync_every": 3, "delay": 2, "step_ahead": 0.5},
    ],
    ids=str,
)
def test_nodes_lose_no_updates_when_one_of_them_is_killed(nodes: Nodes, options: dict[str, Any]) -> None:
    begin(nodes, "ab", **STANDARD, **options)
    begun = nodes.wait_for("b", of(2))["number"]
    nodes.kill("b")
    nodes.wait_for("a", of(1, begun))
    nodes.start("b", seed=7, **STANDARD, **options)
    nodes.wait_for("b", of(2))
    tokens = finish(nodes, "ab")
    assert set(tokens["a"]) & set(tokens["b"])
    assert nodes.reports("a")[-1]["left"] < 1e-6


@pytest.mark.parametrize("step", [0, 60])
def test_nodes_unfreeze_parameters_together_and_a_node_joins_later(nodes: Nodes, step: int) -> None:
    options: dict[str, Any] = {"timeout": 5, "density": 0.1, "unfreezes_at": step}
    begin(nodes, "ab", **options)
    nodes.wait_for("b", of(2))
    nodes.start("c", **options)
    for name in "abc":
        nodes.wait_for(name, lambda report: report.get("nodes") == 3 and report.get("step", 0) > 70)
    nodes.kill("c")
    begun = nodes.reports("a")[-1]["number"]
    nodes.start("c", seed=7, **options)  # joins after the change
    back = nodes.wait_for("c", of(3, begun))["number"]
    nodes.wait_for("a", of(3, back + 20))
    tokens = finish(nodes, "abc")
    assert set(tokens["a"]) & set(tokens["b"]) & set(tokens["c"])
    assert "adds or unfreezes the parameters that the other nodes already train" in nodes.output("c")


@pytest.mark.parametrize("changing", ["c", "ab"], ids=["one of three nodes", "two of three nodes"])
def test_nodes_of_the_minority_end_when_not_all_nodes_unfreeze_parameters(nodes: Nodes, changing: str) -> None:
    for name in "abc":
        nodes.start(name, timeout=3, density=0.1, unfreezes_at=120 if name in changing else None)
    nodes.join("c", code=1)
    where = "only on the other nodes, not on this node" if changing == "ab" else "not on a, b"
    assert re.search(f"parameters were added or unfrozen .*but {where}", nodes.output("c"))
    number = nodes.reports("a")[-1]["number"]
    for name in "ab":
        nodes.wait_for(name, of(2, number + 10))
    finish(nodes, "ab")


def counted(reports: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each report, with the number of rounds that three nodes have made one after the other."""
    rounds, last = 0, -1
    for each in reports:
        if "step" in each:
            rounds = rounds + 1 if each["nodes"] == 3 and each["number"] == last + 1 else 0
            last = each["number"]
            yield each, rounds


def test_nodes_flush_in_the_same_rounds(nodes: Nodes) -> None:
    options: dict[str, Any] = {"timeout": 5, "density": 0.02, "flush_every": 5}
    begin(nodes, "ab", **options)
    nodes.wait_for("a", of(2, 7))
    nodes.start("c", **options)
    begun = nodes.wait_for("c", of(3))["number"]
    nodes.wait_for("a", of(3, begun + 50))
    nodes.kill("c")
    nodes.wait_for("a", of(2, begun + 60))
    end(nodes, "ab")
    check(nodes, "abc")
    places = set()
    for name in "abc":
        # A node that has missed rounds, on a busy machine, first flushes at once.
        together = [each for each, rounds in counted(nodes.reports(name)) if rounds > 5]
        flushed = [each for each in together if each["left"] < 1e-6]
        assert len(flushed) > 3
        places |= {each["number"] % 5 for each in flushed}
        received = flushed[-1]["received"] - flushed[0]["received"]
        assert received > 2 * 4 * PARAMETERS * (len(flushed) - 2), "all pending updates of the two others"
    assert len(places) == 1


def dies_in_a_flush(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    """Run a node that is killed when it would send its pending updates to two others."""
    dense = RoundProtocol._dense

    def dies(rounds: RoundProtocol, *args: Any) -> Any:
        if rounds.stats.nodes == 3 and args[0].name == rounds.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return dense(rounds, *args)

    RoundProtocol._dense = dies  # type: ignore[method-assign]
    main(name, lighthouse, options)


def test_node_that_dies_in_a_flush_ends_no_other_node(nodes: Nodes) -> None:
    for name in "abc":
        nodes.start(name, main=dies_in_a_flush if name == "b" else main, timeout=5, density=0.05, flush_every=5)
    assert nodes.wait_for_death("b") == "b"
    for name in "ac":
        nodes.wait_for(name, of(2, nodes.reports(name)[-1]["number"] + 10))
    assert nodes.reports("a")[-1]["rounds_lost"] > 0
    finish(nodes, "ac")


def test_nodes_lose_no_round_when_a_slow_node_is_in_time_again(nodes: Nodes) -> None:
    """The slow node still has its connections to all nodes, but the others have made new connections without it."""
    for name in "abc":
        nodes.start(name, timeout=10, density=0.1, **({"sleeps": (50, 7.0)} if name == "b" else {}))
    begun = nodes.wait_for("b", of(3))["number"]
    without = nodes.wait_for("a", of(2, begun))["number"]
    nodes.wait_for("b", of(3, without))
    finish(nodes, "abc")
    for name in "abc":
        assert nodes.reports(name)[-1]["rounds_lost"] == 0, nodes.output(name)[-3000:]


@pytest.mark.parametrize("more", [{}, {"flush_every": 1}], ids=["", "flushes"])
def test_node_waits_for_min_nodes_at_the_start_and_after_a_failed_request(nodes: Nodes, more: dict[str, Any]) -> None:
    """The lighthouse gives the remaining node no quorum until the heartbeat of the other node has expired."""
    options: dict[str, Any] = {"timeout": 1, "density": 0.1, "min_nodes": 2, "pause": 0.001, **more}
    nodes.start("a", **options)
    assert nodes.wait_for("a", lambda report: report.get("step", 0) > 1)["number"] == 0
    nodes.start("b", **options)
    nodes.wait_for("a", of(2, 20))
    nodes.kill("b")
    before = nodes.wait_for("a", lambda report: report["rounds_lost"] > 3)
    alone = nodes.wait_for("a", lambda report: report["step"] > before["step"] + 2)
    assert alone["number"] == before["number"]
    nodes.start("b", **options)
    nodes.wait_for("a", of(2, alone["number"] + 1))
    reports = [each for each in nodes.reports("a") if "waited_s" in each and each["number"] > 0]
    without_wait = [
        after
        for before, after in zip(reports, reports[1:], strict=False)
        if after["number"] == before["number"] and after["waited_s"] - before["waited_s"] < 0.5
    ]
    assert len(without_wait) <= 10, "steps without a round and without a wait: those whose round failed"
    finish(nodes, "ab")


@pytest.mark.parametrize("options", [{}, {"flush_every": 3, "delay": 0}], ids=["delayed", "flushes at once"])
def test_node_with_non_finite_updates_is_left_out_and_goes_on(nodes: Nodes, options: dict[str, Any]) -> None:
    begin(nodes, "a", **STANDARD, **options)
    nodes.start("b", breaks_at=[*range(40, 50)], **STANDARD, **options)
    nodes.wait_for("b", lambda report: report.get("rounds_left_out", 0) > 0)
    nodes.wait_for("b", lambda report: report["step"] > 60)
    healed = nodes.wait_for("b", of(2))
    nodes.wait_for("a", of(2, healed["number"] + 5))
    end(nodes, "ab")
    assert nodes.output("b").count("updates of this node are not finite") == 1
    for name in "ab":
        assert all(each["finite"] for each in nodes.reports(name) if "finite" in each), "the global weights"
    check(nodes, "a")
    tokens_of(nodes, "ab")


@pytest.mark.timeout(600)
def test_nodes_killed_at_random_moments_rejoin(nodes: Nodes) -> None:
    generator = random.Random(0)
    options: dict[str, Any] = {"timeout": 3, "density": 0.1, "pause": 0.01}
    begin(nodes, "abc", **options)
    nodes.wait_for("a", of(3))
    for _ in range(20):
        name = generator.choice("abc")
        time.sleep(generator.uniform(0, 1))
        nodes.kill(name)
        time.sleep(generator.uniform(0, 2))
        nodes.start(name, **options)  # while another may die
    for name in "abc":
        nodes.wait_for(name, of(3))
    finish(nodes, "abc")


@pytest.mark.timeout(900)
def test_node_that_stays_keeps_no_resources_of_nodes_that_left(nodes: Nodes) -> None:
    options: dict[str, Any] = {"timeout": 3, "density": 0.1}
    nodes.start("a", **options)
    used = []
    for number in range(24):
        nodes.start("b", **options)
        used.append(nodes.wait_for("a", of(2)))
        if number % 2:
            nodes.kill("b")
        else:
            nodes.send("b", signal.SIGTERM)
            nodes.join("b")
        nodes.wait_for("a", of(1, used[-1]["number"]))
    settled, last = used[8], used[-1]
    assert last["files"] <= settled["files"] + 2
    assert last["threads"] <= settled["threads"] + 2
    assert last["MB"] < settled["MB"] + 10
    end(nodes, "a")
    check(nodes, "ab")


def forgets(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    """Run a node that stores few messages while it validates."""
    observer.WATCHED_BYTES = 20_000
    main(name, lighthouse, options)


def test_node_with_a_long_validation_drops_messages_and_catches_up(nodes: Nodes) -> None:
    for name in "ab":
        nodes.start(name, **STANDARD)
    nodes.start("c", main=forgets, validate_every=40, **STANDARD)
    for _ in range(2):
        begun = nodes.wait_for("c", of(3))["number"]
        nodes.wait_for("c", lambda report, begun=begun: report.get("step", 0) % 40 == 1 and report["number"] > begun)
    nodes.wait_for("c", of(3))
    assert "drops the messages of" in nodes.output("c")
    assert "has missed rounds" in nodes.output("c")
    finish(nodes, "abc")


# -- a link that is cut or slow, in network namespaces -----------------------------------------------------------------

BRIDGE, GATEWAY = "ls-elastic", "10.77.0.1"
CUT_SECONDS = 20.0


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


def main_in_namespace(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    """The same device, in the namespace of its node, the first letter of its name."""
    with open(f"/run/netns/ls-{name[0]}") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
    os.environ["GLOO_SOCKET_IFNAME"] = f"ls-{name[0]}-1"
    main(name, lighthouse, options)


@pytest.fixture
def apart() -> Iterator[Nodes]:
    try:
        ip(f"link add {BRIDGE} type bridge")
        ip(f"addr add {GATEWAY}/24 dev {BRIDGE}")
        ip(f"link set {BRIDGE} up")
        for place, name in enumerate("abc"):
            ip(f"netns add ls-{name}")
            ip(f"link add ls-{name}-0 type veth peer name ls-{name}-1 netns ls-{name}")
            ip(f"link set ls-{name}-0 master {BRIDGE} up")
            ip(f"-n ls-{name} addr add 10.77.0.{place + 2}/24 dev ls-{name}-1")
            ip(f"-n ls-{name} link set ls-{name}-1 up")
            ip(f"-n ls-{name} link set lo up")
        with nodes_of(main_in_namespace, host=GATEWAY) as nodes:
            yield nodes
    finally:
        for name in "abc":
            # A namespace ends later than its deletion, and the link with it. The next test needs the name of the link.
            subprocess.run(["ip", "link", "del", f"ls-{name}-0"], check=False)
            subprocess.run(["ip", "netns", "del", f"ls-{name}"], check=False)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False)


def cut_the_link_of(device: str, apart: Nodes, other: str) -> None:
    """Cut the link of this device's node for `CUT_SECONDS`. Return when all three nodes exchange again."""
    begun = apart.wait_for(device, of(3))["number"]
    ip(f"link set ls-{device[0]}-0 down")
    without = apart.wait_for(other, of(2, begun))["number"]
    time.sleep(CUT_SECONDS)
    ip(f"link set ls-{device[0]}-0 up")
    apart.wait_for(device, of(3, without))


@pytest.mark.root
@pytest.mark.timeout(240)
def test_node_comes_back_with_its_updates_after_a_link_cut(apart: Nodes) -> None:
    for name in "abc":
        apart.start(name, timeout=5, density=0.1, pause=0.05)  # sums round in each step: few hundreds of them
    cut_the_link_of("c", apart, other="a")
    assert "has missed rounds" in apart.output("c")
    finish(apart, "abc")


@pytest.mark.root
@pytest.mark.timeout(240)
def test_node_of_two_devices_comes_back_with_its_updates_after_a_link_cut(apart: Nodes) -> None:
    for name in "abc":
        for device in range(2):  # each namespace has its own ports
            options: dict[str, Any] = {"timeout": 5, "density": 0.1, "pause": 0.05, "width": 67}
            apart.start(f"{name}{device}", device=device, devices=2, port=29400, **options)
    cut_the_link_of("c0", apart, other="a0")
    for device in "01":
        assert "has missed rounds" in apart.output(f"c{device}")
    for name in "abc":
        apart.send(f"{name}0", signal.SIGTERM)
    for device in "01":
        names = [f"{name}{device}" for name in "abc"]
        apart.join(*names)
        check(apart, names)  # type: ignore[arg-type]


@pytest.mark.root
@pytest.mark.timeout(240)
def test_node_sends_its_last_updates_over_a_link_that_takes_longer_than_the_timeout(apart: Nodes) -> None:
    for name in "ab":
        apart.start(name, timeout=5, density=0.01, numel=900_001, pause=0.1)
    begun = apart.wait_for("b", of(2))["number"]
    # 3.6 MB at 3 Mbit/s take 9.6 s.
    slow = "qdisc add dev ls-b-1 root tbf rate 3mbit burst 32kb latency 400ms"
    subprocess.run(["ip", "netns", "exec", "ls-b", "tc", *slow.split()], check=True)
    apart.wait_for("b", of(2, begun + 5))
    end(apart, "b")
    last = apart.reports("b")[-1]
    assert last["ends"] > 0
    assert last["left"] < 1e-6
    assert "attempts to send" not in apart.output("b")
    finish(apart, "a")
