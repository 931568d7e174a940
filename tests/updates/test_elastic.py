"""Nodes that come and go, on real processes with torchft's lighthouse: killed, stopped, cut off, back again."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

pytest.importorskip("torchft", reason="needs torchft")

from lightning_sparse.elastic.rounds import RoundProtocol
from tests.helpers.nodes import Nodes, nodes_of
from tests.updates.elastic_node import main, toy

pytestmark = pytest.mark.slow
PARAMETERS = sum(p.numel() for p in toy(0).parameters())


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with nodes_of(main) as nodes:
        yield nodes


def tokens_of(nodes: Nodes, names: Iterable[str]) -> dict[str, list[str]]:
    """The names of weights that each node had; weights of one name have the same bits wherever they are."""
    digests: dict[str, set[str]] = {}
    told = {name: [each for each in nodes.reports(name) if "digest" in each] for name in names}
    for each in (each for reports in told.values() for each in reports):
        digests.setdefault(each["token"], set()).add(each["digest"])
    assert {token: found for token, found in digests.items() if len(found) > 1} == {}
    return {name: [each["token"] for each in reports] for name, reports in told.items()}


def check(nodes: Nodes, names: str) -> dict[str, list[str]]:
    """The same, and no node has lost what it trained: what it made, in its last life, is what it sent in rounds that
    count and what is pending."""
    for name in names:
        off = [each["off"] for each in nodes.reports(name) if "digest" in each]
        large = [index for index, each in enumerate(off) if each >= 1e-5]
        assert not large, f"{name}: off by {max(off)} in reports {large[0]} to {large[-1]} of {len(off)}"
    return tokens_of(nodes, names)


def end(nodes: Nodes, names: str) -> None:
    """Tell nodes to end."""
    for name in names:
        nodes.send(name, signal.SIGTERM)
    assert [nodes.join(name) for name in names] == [0] * len(names)


def finish(nodes: Nodes, names: str) -> dict[str, list[str]]:
    """Both, of the same nodes."""
    end(nodes, names)
    return check(nodes, names)


def begin(nodes: Nodes, names: str, **options: Any) -> None:
    """Start nodes."""
    for name in names:
        nodes.start(name, **options)


def of(count: int, after: int = 0) -> Callable[[dict[str, Any]], bool]:
    """A report of a round of so many nodes, after another round."""
    return lambda report: report.get("nodes") == count and report["number"] > after


@pytest.mark.parametrize(
    "options", [{}, {"delay": 0}, {"sync_every": 3, "delay": 2, "step_ahead": 0.5, "outer_lr": 1.5}]
)
def test_one_of_three_is_killed_and_comes_back(nodes: Nodes, options: dict[str, Any]) -> None:
    begin(nodes, "abc", timeout=5, density=0.1, **options)
    begun = nodes.wait_for("c", of(3))["number"]
    nodes.kill("c")
    nodes.wait_for("a", of(2, begun))
    nodes.start("c", timeout=5, density=0.1, seed=7, **options)
    nodes.wait_for("c", of(3))
    tokens = finish(nodes, "abc")
    assert set(tokens["a"]) & set(tokens["b"]) & set(tokens["c"])
    begins = [each["begins"] for each in nodes.reports("c") if "begins" in each]
    assert begins[-1] > 0  # where its peer was, and not with weights of its own
    assert nodes.reports("a")[-1]["left"] < 1e-6  # all that was pending is sent in the end


def test_a_node_that_stands_still_is_out_and_comes_back(nodes: Nodes) -> None:
    begin(nodes, "abc", timeout=3, density=0.1)
    begun = nodes.wait_for("c", of(3))["number"]
    nodes.send("c", signal.SIGSTOP)
    without = nodes.wait_for("a", of(2, begun))["number"]
    nodes.wait_for("a", of(2, without + 10))
    nodes.send("c", signal.SIGCONT)
    nodes.wait_for("c", of(3, without))
    assert "has missed rounds" in nodes.output("c")
    finish(nodes, "abc")


def test_a_node_that_is_told_to_end_sends_what_is_pending(nodes: Nodes) -> None:
    begin(nodes, "abc", timeout=5, density=0.02)
    begun = nodes.wait_for("c", of(3))["number"]
    nodes.send("c", signal.SIGTERM)
    assert nodes.join("c") == 0
    last = nodes.reports("c")[-1]
    assert last["ends"] > 0
    assert last["left"] < 1e-6
    nodes.wait_for("a", of(2, begun))
    end(nodes, "ab")
    check(nodes, "abc")


def test_nodes_flush_in_the_same_rounds(nodes: Nodes) -> None:
    begin(nodes, "ab", timeout=5, density=0.02, flush_every=5)
    nodes.wait_for("a", of(2, 7))
    nodes.start("c", timeout=5, density=0.02, flush_every=5)
    begun = nodes.wait_for("c", of(3))["number"]
    nodes.wait_for("a", of(3, begun + 50))
    nodes.kill("c")
    nodes.wait_for("a", of(2, begun + 60))
    end(nodes, "ab")
    check(nodes, "abc")
    places = set()
    for name in "abc":
        whole = [each for each in nodes.reports(name) if each.get("nodes") == 3 and not each["rounds_lost"]]
        flushed = [each for each in whole[2:] if each["left"] < 1e-6]  # first it may have been alone
        assert len(flushed) > 3
        places |= {each["number"] % 5 for each in flushed}
        received = flushed[-1]["received"] - flushed[0]["received"]
        assert received > 2 * 4 * PARAMETERS * (len(flushed) - 2), "all that the two others had pending"
    assert len(places) == 1, "and only then"


def dies_in_a_flush(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    """A node that is killed where it would send to two others what it has pending."""
    dense = RoundProtocol._dense

    def dies(rounds: RoundProtocol, *args: Any) -> Any:
        if rounds.stats.nodes == 3 and args[0].name == rounds.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return dense(rounds, *args)

    RoundProtocol._dense = dies  # type: ignore[method-assign]
    main(name, lighthouse, options)


def test_a_node_that_dies_in_a_flush_ends_no_other(nodes: Nodes) -> None:
    for name in "abc":
        nodes.start(name, main=dies_in_a_flush if name == "b" else main, timeout=5, density=0.05, flush_every=5)
    nodes.join("b")
    for name in "ac":
        nodes.wait_for(name, of(2, nodes.reports(name)[-1]["number"] + 10))
    assert nodes.reports("a")[-1]["rounds_lost"] > 0
    finish(nodes, "ac")


def test_with_too_few_nodes_a_flush_counts_no_more_than_other_rounds(nodes: Nodes) -> None:
    begin(nodes, "ab", timeout=2, density=0.1, min_nodes=2, flush_every=1)
    nodes.wait_for("a", of(2, 10))
    nodes.kill("b")
    time.sleep(6)
    before = nodes.reports("a")[-1]
    after = nodes.wait_for("a", lambda report: report.get("step", 0) > before["step"] + 2)
    assert after["number"] == before["number"]


def test_elastic_node_with_min_nodes_waits_although_its_last_request_failed(nodes: Nodes) -> None:
    """The lighthouse gives the remaining node no quorum until the heartbeat of the other node has expired."""
    options: dict[str, Any] = {"timeout": 1, "density": 0.1, "min_nodes": 2, "pause": 0.001}
    begin(nodes, "ab", **options)
    nodes.wait_for("a", of(2, 20))
    nodes.kill("b")
    nodes.wait_for("a", lambda report: report["rounds_lost"] > 3)
    nodes.start("b", **options)
    nodes.wait_for("a", of(2, nodes.reports("a")[-1]["number"] + 1))
    reports = [each for each in nodes.reports("a") if "waited_s" in each]
    without_wait = [
        after
        for before, after in zip(reports, reports[1:], strict=False)
        if after["number"] == before["number"] and after["waited_s"] - before["waited_s"] < 0.5
    ]
    assert len(without_wait) <= 10, "steps without a round and without a wait: first ones, and those whose round failed"
    finish(nodes, "ab")


def test_nodes_train_on_while_there_is_no_lighthouse(nodes: Nodes) -> None:
    begin(nodes, "ab", timeout=5, density=0.1)
    before = nodes.wait_for("a", of(2))
    nodes.darken()
    during = nodes.wait_for("a", lambda report: report["step"] > before["step"] + 30)
    assert during["number"] < before["number"] + 30
    nodes.light()
    nodes.wait_for("a", of(2, during["number"] + 10))
    finish(nodes, "ab")


def test_a_node_waits_for_others(nodes: Nodes) -> None:
    nodes.start("a", timeout=2, density=0.1, min_nodes=2)
    before = nodes.wait_for("a", lambda report: report.get("step", 0) > 1)
    assert before["number"] == 0
    nodes.start("b", timeout=2, density=0.1, min_nodes=2)
    nodes.wait_for("a", of(2, 10))
    finish(nodes, "ab")


def test_a_node_with_other_options_is_refused_and_the_others_go_on(nodes: Nodes) -> None:
    begin(nodes, "ab", timeout=5, density=0.1)
    nodes.wait_for("a", of(2))
    nodes.start("c", timeout=5, density=0.2)
    assert nodes.join("c") == 1
    assert "this node differs from those that train: density=0.2, theirs 0.1" in nodes.output("c")
    nodes.wait_for("a", of(2))
    check(nodes, "ab")


@pytest.mark.parametrize("options", [{}, {"delay": 0}, {"flush_every": 3}], ids=["delayed", "at once", "whole"])
def test_elastic_node_with_non_finite_updates_is_left_out_and_goes_on(nodes: Nodes, options: dict[str, Any]) -> None:
    begin(nodes, "a", timeout=5, density=0.1, **options)
    nodes.start("b", timeout=5, density=0.1, breaks_at=[*range(40, 50)], **options)
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


def test_elastic_node_that_ends_with_non_finite_updates_leaves_them_out(nodes: Nodes) -> None:
    begin(nodes, "ab", timeout=5, density=0.1)
    nodes.wait_for("a", of(2))
    nodes.start("c", timeout=5, density=0.1, breaks_at=[*range(10_000)])
    nodes.wait_for("c", lambda report: report.get("rounds_left_out", 0) > 3)
    end(nodes, "cab")
    last = nodes.reports("c")[-1]
    assert (last["finite"], last["left"]) == (True, 0.0)
    tokens_of(nodes, "abc")


@pytest.mark.parametrize("run", ["", "other"], ids=["of an early checkpoint", "named"])
def test_elastic_node_of_another_run_is_refused_and_the_others_keep_their_weights(nodes: Nodes, run: str) -> None:
    begin(nodes, "ab", timeout=5, density=0.1)
    nodes.wait_for("a", of(2))
    nodes.start("c", timeout=5, density=0.1, version=["0123456789abcdef", 100_000, 0, run])
    assert nodes.join("c") == 1
    assert f"resumes round 100000 of run '{run or '0123456789abcdef'}'" in nodes.output("c")
    assert nodes.wait_for("a", of(2))["number"] < 100_000
    finish(nodes, "ab")


@pytest.mark.timeout(600)
def test_twenty_nodes_die_at_random_moments_and_come_back(nodes: Nodes) -> None:
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
        nodes.wait_for(name, of(3), timeout=120)
    finish(nodes, "abc")


@pytest.mark.timeout(900)
def test_a_node_that_stays_keeps_nothing_of_fifty_that_came_and_went(nodes: Nodes) -> None:
    options: dict[str, Any] = {"timeout": 3, "density": 0.1}
    nodes.start("a", **options)
    used = []
    for number in range(50):
        nodes.start("b", **options)
        used.append(nodes.wait_for("a", of(2)))
        if number % 2:
            nodes.kill("b")
        else:
            nodes.send("b", signal.SIGTERM)
            assert nodes.join("b") == 0
        nodes.wait_for("a", of(1, used[-1]["number"]))
    settled, last = used[10], used[-1]
    assert last["files"] <= settled["files"] + 2
    assert last["threads"] <= settled["threads"] + 2
    assert last["MB"] < settled["MB"] + 10
    end(nodes, "a")
    check(nodes, "ab")


def test_step_ahead_is_measured_soon_after_nodes_have_come(nodes: Nodes) -> None:
    begin(nodes, "abc", timeout=5, density=0.1)
    begun = nodes.wait_for("a", of(3, 70))["number"]  # when samples are rare
    nodes.kill("c")
    nodes.wait_for("a", of(2, begun))
    nodes.start("c", timeout=5, density=0.1)
    back = nodes.wait_for("a", of(3, begun))["number"]
    measured = nodes.wait_for("a", lambda report: report.get("nodes") == 3 and report["step_ahead"] < 1)
    assert measured["number"] < back + 20
    finish(nodes, "abc")


# -- a link that is cut, in network namespaces -------------------------------------------------------------------------

BRIDGE, GATEWAY = "ls-elastic", "10.77.0.1"
CUT_SECONDS = 20.0


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


def main_in_namespace(name: str, lighthouse: str, options: dict[str, Any]) -> None:
    """The same node, in the namespace of its name."""
    with open(f"/run/netns/ls-{name}") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
    os.environ["GLOO_SOCKET_IFNAME"] = f"ls-{name}-1"
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
            subprocess.run(["ip", "netns", "del", f"ls-{name}"], check=False)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False)


@pytest.mark.root
@pytest.mark.timeout(240)
def test_a_node_whose_link_was_cut_comes_back_with_what_it_trained(apart: Nodes) -> None:
    for name in "abc":
        apart.start(name, timeout=5, density=0.1, pause=0.05)  # sums round in each step: few hundreds of them
    begun = apart.wait_for("c", of(3))["number"]
    ip("link set ls-c-0 down")
    without = apart.wait_for("a", of(2, begun))["number"]
    time.sleep(CUT_SECONDS)
    ip("link set ls-c-0 up")
    apart.wait_for("c", of(3, without), timeout=90)
    assert "has missed rounds" in apart.output("c")
    finish(apart, "abc")
