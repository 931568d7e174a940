"""Elastic nodes draw equal conclusions from the statuses of all nodes, and share samples."""

import random
import re
import threading
import time
from collections import Counter, deque
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse.elastic import ElasticSampler, wait
from lightning_sparse.elastic.lighthouse import Lighthouse, Member, NodeStatus, _status_of
from lightning_sparse.elastic.observer import RoundObserver
from lightning_sparse.elastic.quorum import Sizes, quorum_of
from lightning_sparse.elastic.rounds import (
    FAILURES,
    IDLE_SECONDS,
    Layout,
    Outcome,
    Payload,
    Round,
    RoundProtocol,
    _refusal,
)
from lightning_sparse.elastic.sampling import SampleAssigner, SampleProgress
from lightning_sparse.elastic.state import ElasticUpdateState, OptimizerRounds
from lightning_sparse.elastic.updates import ElasticConfig
from lightning_sparse.exchange.communicator import Group
from lightning_sparse.exchange.paths import Sparse, TensorSpec
from lightning_sparse.kernels import compress


def member(name: str, token: str, number: int, **said: Any) -> Member:
    return Member(name, "", NodeStatus(token, number, **{"observes": False, **said}))


def names(members: list[Member]) -> list[str]:
    return [each.name for each in members]


def test_messages_are_multiplied_by_outer_lr_and_dense_updates_are_not() -> None:
    path = Sparse.of(TensorSpec(3, 1, 4), 0.5, torch.float32)
    assert path is not None
    message_B = compress(torch.tensor([3.0, 0.0, 0.0, -6.0]), None, None, path.k, torch.float32)
    state: Any = SimpleNamespace(_config=ElasticConfig(lighthouse="http://a:1", outer_lr=1.5), _path=path)
    weights_S = torch.zeros(4)
    found = Round("old", "new", 1, 3, message_B.expand(2, -1).contiguous(), dense=(torch.full((4,), 3.0),))
    ElasticUpdateState._add_round(state, found, weights_S)
    assert weights_S.tolist() == [-4.0, -1.0, -1.0, 5.0]


STRANGER = {"run": "x"}


@pytest.mark.parametrize(
    ("members", "run", "token", "known", "training"),
    [
        pytest.param(
            [member("a", "old", 4), member("b", "new", 5), member("c", "new", 5), member("d", "", 0)],
            None, "new", "abcd", "bc", id="most rounds win, and nodes with older weights observe",
        ),
        pytest.param(
            [member("a", "z", 5), member("b", "y", 5), member("c", "y", 5)],
            None, "y", "abc", "bc", id="most nodes win at equal rounds",
        ),
        pytest.param(
            [member("a", "base", 4, prepared="round"), member("b", "round", 5)],
            None, "round", "ab", "ab", id="a prepared round counts",
        ),
        pytest.param(
            [member(name, "token", 1, facts={"density": value}) for name, value in zip("abc", (1, 1, 2), strict=True)],
            None, "token", "ab", "ab", id="a node with other options is left out",
        ),
        pytest.param(
            [member("a", "mine", 7, run="a", trains=True), *(member(n, "theirs", 10**6, **STRANGER) for n in "bc"),
             member("d", "", 0)],
            "a", "mine", "ad", "a", id="the run that trains wins over strangers",
        ),
        pytest.param(
            [member("a", "s", 9, run="x"), member("b", "t", 5, run="y"), member("c", "u", 4, run="y")],
            "y", "t", "bc", "b", id="the run of most nodes wins",
        ),
        pytest.param(
            [member("a", "a:1", 0), member("b", "", 0)], "a:1", "a:1", "ab", "a", id="new weights name the run",
        ),
        pytest.param(
            [member("a", "a:1", 0), member("b", "saved", 5, run="x")],
            "x", "saved", "ab", "b", id="a checkpoint wins over new weights",
        ),
    ],
)  # fmt: skip
def test_quorum_selects_run_weights_and_members(
    members: list[Member], run: str | None, token: str, known: str, training: str
) -> None:
    found = quorum_of(members)
    assert (found.token, names(found.members), names(found.training)) == (token, list(known), list(training))
    assert run is None or found.run == run


def test_quorum_has_the_number_of_the_run_and_its_contributors() -> None:
    members = [member("a", "s", 9, run="x"), member("b", "t", 5, run="y"), member("c", "t", 5, run="y")]
    found = quorum_of(members)
    assert (found.number, names(found.contributors)) == (5, ["b", "c"])


def test_refusal_names_an_option_that_one_node_lacks() -> None:
    assert "differs from the training nodes: new=None, theirs missing." in _refusal(
        {"new": None, "same": 1}, {"same": 1}
    )


def test_node_that_loaded_equal_weights_leaves_the_shares_of_others() -> None:
    assigner = SampleAssigner("b")
    assigner.update(["b"], [assigner.report()] * 2)
    begun = member("b", "saved", 4, progress=SampleProgress(40, assigner.report().assignment))
    found = quorum_of([member("a", "saved", 4), begun])
    assigner.update(names(found.members), found.progress)
    assert [*assigner.share(range(44), 0, device=0, devices=1)] == [*range(40), 41, 43]


@pytest.mark.parametrize(
    ("changes", "impatient", "expected"),
    [
        ("xxx", "", "x"),
        ("xx-", "", ""),
        ("xx-", "b", "x"),
        ("x--", "a", ""),
        ("x-", "a", ""),
        ("xy-", "ab", ""),
        ("xxyy", "abcd", ""),
        ("xxxy", "d", ""),
        ("xxxy", "a", "x"),
    ],
)
def test_quorum_changes_parameters_if_all_nodes_agree_or_most_have_waited(
    changes: str, impatient: str, expected: str
) -> None:
    members = [
        member(name, "token", 5, change=change.strip("-"), impatient=name in impatient, observes=change != "-")
        for name, change in zip("abcd", changes, strict=False)
    ]
    found = quorum_of(members)
    assert found.change == expected
    assert found.contributors == ([] if expected else [each for each in members if not each.status.change])


def test_quorum_has_joining_nodes_with_other_parameters_and_no_training_nodes() -> None:
    training = [member(name, "token", 5, trained="x", trains=True) for name in "ab"]
    behind = member("c", "older", 4, trained="y", trains=True)
    joining = member("d", "", 0, trained="y", observes=True)
    found = quorum_of([*training, behind, joining])
    assert names(found.members) == ["a", "b", "d"]
    assert found.trained == "x"


class Silent(Lighthouse):
    """A lighthouse that never forms a quorum."""

    def __init__(self) -> None:
        self.name, self.heard = "a:1", list[NodeStatus]()

    def quorum(self, status: NodeStatus) -> None:
        self.heard.append(status)


@pytest.fixture
def rounds() -> RoundProtocol:
    pytest.importorskip("torchft", reason="needs torchft")
    rounds = RoundProtocol(Silent(), Group((0,), 0), {}, min_nodes=1, timeout=1.0)
    rounds.fit(Layout("", Sizes(8, 0, 4), ()))
    rounds.token, rounds.history = "0", deque(["0"])
    return rounds


def message(value: int) -> Tensor:
    return torch.full((8,), value, dtype=torch.uint8)


def count(rounds: RoundProtocol, base: str, token: str, held: Tensor) -> None:
    rounds._count(Round(base, token, 0, 2, torch.empty(0)), held, Outcome())


def settle(rounds: RoundProtocol, token: str, held: Tensor, now: str) -> list[Tensor]:
    """Settle a round from "0" to ``token``. Return the messages that are pending again."""
    outcome = Outcome()
    rounds._unsettled = Round("0", token, 1, 2, torch.empty(0)), held
    rounds._settle(now, outcome)
    return outcome.returned


def test_messages_of_rounds_unknown_to_others_are_pending_again(rounds: RoundProtocol) -> None:
    first, second = message(1), message(2)
    count(rounds, "0", "1b", first)
    count(rounds, "1b", "2b", second)
    returned, had = rounds.set_version("9a", 9, ["0", "1a"])
    assert returned == [first, second]
    assert had == []
    assert rounds.set_version("9c", 9, ["0", "1a", "9a"]) == ([], []), "once"


def test_message_of_a_refused_round_counts_once_if_a_node_returns_with_it(rounds: RoundProtocol) -> None:
    sent, again = message(1), message(2)
    assert settle(rounds, "1a", sent, now="0") == [sent]
    count(rounds, "0", "1b", again)
    returned, had = rounds.set_version("3a", 3, ["0", "1a", "2a"])
    assert returned == [again]
    assert had == [sent], "it is both in the weights and pending"


def test_remaining_node_has_unsettled_messages_pending_again(rounds: RoundProtocol) -> None:
    sent = message(1)
    assert settle(rounds, "1a", sent, now="7a") == []
    assert rounds.reconcile() == ([sent], [])


def test_dense_message_replaces_older_messages_in_the_ledger(rounds: RoundProtocol) -> None:
    for number in range(3):
        count(rounds, str(number), str(number + 1), torch.full((4,), float(number)))
    assert len(rounds._ledger) == 1


def test_node_that_observes_stays_the_first_node(rounds: RoundProtocol) -> None:
    """A node may observe while it writes a checkpoint, which no other node may write at the same time."""
    for observes in (False, True):
        here = member(rounds.name, "0", 0, observes=observes)
        rounds._quorum_of([here, member("b:1", "0", 0)], Outcome())
        assert rounds.is_first


def test_node_that_observes_pauses_while_the_lighthouse_does_not_answer(rounds: RoundProtocol) -> None:
    """A joining node asks in a loop. It must not use a core for it."""
    began, observer = time.monotonic(), RoundObserver(rounds)
    observer.start()
    time.sleep(0.5)
    observer.stop()
    asked = rounds._lighthouse.heard  # type: ignore[union-attr]
    assert rounds.unanswered
    assert 1 <= len(asked) <= 1 + (time.monotonic() - began) / IDLE_SECONDS


class Pair(Silent):
    """A lighthouse that knows another node with the same weights."""

    def quorum(self, status: NodeStatus) -> list[Member]:  # type: ignore[override]
        return [Member("a:1", "", status), Member("b:1", "", replace(status, observes=False))]


def test_rounds_that_always_fail_are_logged_once_with_their_cause(
    rounds: RoundProtocol, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rounds, "_lighthouse", Pair())
    monkeypatch.setattr(rounds, "_group_for", Mock(side_effect=RuntimeError("address family\n mismatch")))
    for failed in range(3 * FAILURES):
        assert bool(caplog.messages) == (failed >= FAILURES)
        rounds.round(Payload(message(1)))
    (line,) = caplog.messages
    assert re.match(r"10 rounds in a row with b have failed .address family mismatch.\. .* exchange nothing", line)


def test_node_that_falls_behind_has_its_dropped_messages_pending_until_others_have_them(rounds: RoundProtocol) -> None:
    sent = message(1)
    outcome = Outcome()
    rounds._count(Round("0", "1", 1, 2, torch.empty(0)), sent, outcome)
    for number in range(1, 5000):  # more than the history holds
        rounds._count(Round(str(number), str(number + 1), number + 1, 2, torch.empty(0)), None, outcome)
    assert rounds.fall_behind(outcome.rounds) == [sent]
    assert (rounds.token, rounds.number) == ("0", 0)
    assert rounds.reconcile() == ([], []), "no other node is left"
    outcome = Outcome()
    rounds._count(Round("0", "1", 1, 2, torch.empty(0)), sent, outcome)
    rounds.fall_behind(outcome.rounds)
    assert rounds.set_version("2", 2, ["0", "1"]) == ([], [sent])


class Connecting(RoundProtocol):
    """A node that counts its connections instead of making them."""

    def __init__(self, name: str) -> None:
        super().__init__(Silent(), Group((0,), 0), {}, min_nodes=1, timeout=1.0)
        self.name = name
        self._process_group = Mock()

    def meet(self, members: list[Member]) -> str:
        self._tries += 1
        self._group_for(members)
        return self._group_name

    @property
    def member(self) -> Member:
        return Member(self.name, "here:1", NodeStatus(tries=self._tries, group=self._group_name))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sets(st.sampled_from("abcd"), min_size=1), st.sets(st.sampled_from("abcd"))), max_size=20))
def test_nodes_of_a_quorum_make_the_same_new_connections_or_none(quorums: list[tuple[set[str], set[str]]]) -> None:
    """In each quorum, some nodes may not hear of it. The round of the others then fails."""
    pytest.importorskip("torchft", reason="needs torchft")
    nodes, used = {name: Connecting(name) for name in "abcd"}, set[str]()
    for present, deaf in quorums:
        members = [nodes[name].member for name in sorted(present)]
        heard = [nodes[name] for name in sorted(present - deaf)]
        before = [node._process_group.configure.call_count for node in heard]
        found = {node.meet(members) for node in heard}
        made = {node._process_group.configure.call_count - n for node, n in zip(heard, before, strict=True)}
        assert len(found) <= 1
        assert len(made) <= 1
        if made == {1}:
            assert not found & used, "an old name leads to old addresses"
        used |= found
        if present & deaf:
            for node in heard:
                node._abort_group()


class Alone(Silent):
    """A lighthouse that knows only the node itself."""

    def quorum(self, status: NodeStatus) -> list[Member]:  # type: ignore[override]
        return [Member(self.name, "", status)]


def test_node_that_finds_no_weights_trains_its_own_and_asks_again() -> None:
    pytest.importorskip("torchft")
    rounds = RoundProtocol(Alone(), Group((0,), 0), {}, min_nodes=1, timeout=1.0)
    rounds.fit(Layout("", Sizes(8, 0, 4), ()))
    rounds.ask()
    asked = rounds.wants
    rounds.round()
    assert (rounds.token, rounds.wants) == ("a:1", asked)


def test_node_that_waits_for_min_nodes_logs_the_training_nodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torchft")
    monkeypatch.setattr(wait, "SLOW_AFTER", timedelta(seconds=0.1))
    rounds = RoundProtocol(Alone(), Group((0,), 0), {}, min_nodes=2, timeout=0.3)
    rounds.fit(Layout("", Sizes(8, 0, 4), ()))
    rounds.token = "0"
    assert rounds.round(Payload(message(1))).returned
    assert re.match(
        r"this node has waited . s to exchange updates: fewer than min_nodes=2 nodes train .a.$", caplog.messages[-1]
    )


def test_own_weights_keep_an_uncertain_message_that_settles_while_they_are_shown() -> None:
    state, peers, sent = SimpleNamespace(slices=SimpleNamespace(numel=4)), SimpleNamespace(uncertain=None), message(1)
    rounds: Any = OptimizerRounds(peers, 1, None, lambda: [state])  # type: ignore[arg-type, list-item]
    peers.uncertain = sent
    rounds.show_own(True)
    peers.uncertain = None  # the thread that observes has settled it
    assert rounds.uncertain_of(state) == [sent]
    rounds.show_own(False)
    assert rounds.uncertain_of(state) == []


def test_node_asks_a_lighthouse_that_is_back_at_once() -> None:
    node = object.__new__(Lighthouse)
    node.name, node._left, node._asks_again = "a:1", threading.Event(), float("inf")
    paused = []

    def heartbeat(name: str) -> None:
        paused.append(node._asks_again > 0)
        if len(paused) == 2:
            raise RuntimeError("connection refused")
        if len(paused) == 4:
            node._left.set()

    node._send_heartbeats(SimpleNamespace(heartbeat=heartbeat))
    assert paused == [True, True, True, False], "it fails at the second heartbeat"


class BehindLoopback(Silent):
    """A lighthouse on the node's own machine, where /etc/hosts maps its name to 127.0.1.1."""

    def quorum(self, status: NodeStatus) -> list[Member]:  # type: ignore[override]
        other = replace(status, token="1", number=1, trains=True, network="two")
        return [Member(self.name, "127.0.1.1:1", status), Member("b:1", "10.0.0.2:1", other)]


def test_node_that_others_cannot_reach_is_advised_to_use_an_ip_address(
    rounds: RoundProtocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "_lighthouse", BehindLoopback())
    with pytest.raises(ValueError, match=r"cannot reach node a at 127\.0\.1\.1, .*/etc/hosts.* an IP address"):
        rounds.round()


def test_unknown_fields_of_a_status_are_ignored() -> None:
    assert _status_of({"token": "t", "color": "red"}) == NodeStatus(token="t")
    assert _status_of({"progress": {"end": 3, "color": "red"}}) == NodeStatus(progress=SampleProgress(3))
    assert _status_of(None) == NodeStatus()


def test_values_of_other_types_in_a_status_are_ignored() -> None:
    assert _status_of({"token": 7, "number": "many", "run": "x", "sizes": 3}) == NodeStatus(run="x")
    assert _status_of({"progress": {"end": "x", "reached": 3}}) == NodeStatus(progress=SampleProgress(reached=3))
    assert _status_of({"progress": [1], "trains": 1}) == _status_of([]) == NodeStatus()


# -- shares of samples -------------------------------------------------------------------------------------------------

AHEAD = 6


class Node:
    """Draws consecutive samples."""

    def __init__(self, name: str) -> None:
        self.assigner, self.place = SampleAssigner(name), 0
        self.assigner.ahead = AHEAD
        self.drawn: list[int] = []

    def draw(self, count: int) -> None:
        for _ in range(count):
            place = self.assigner.draw(self.place)
            assert place is not None
            self.drawn.append(place)
            self.place = place + 1


def quorum(nodes: dict[str, Node], generator: random.Random) -> None:
    """Let all nodes report and update, and draw as many samples as they may before and after it."""
    names = sorted(nodes)
    reports = [nodes[name].assigner.report() for name in names]
    for name in names:
        if nodes[name].drawn:
            nodes[name].draw(generator.randint(0, AHEAD // 3))
    for name in names:
        nodes[name].assigner.update(names, reports)
        nodes[name].draw(generator.randint(0, AHEAD // 3))


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.1, 0.4]))
@example(868, 0.0)  # a node draws across the border of two assignments
def test_samples_are_drawn_once_and_only_shares_of_lost_nodes_are_skipped(seed: int, misses: float) -> None:
    """Nodes leave forever, or miss quorums."""
    generator, gone, missed = random.Random(seed), list[Node](), 0
    nodes = last = {name: Node(name) for name in "abc"}
    for number in range(30):
        there = {name: node for name, node in nodes.items() if generator.random() >= misses}
        if 2 * len(there) <= len(nodes) or not there.keys() & last.keys():  # no quorum
            there = nodes
        missed += len(nodes) - len(there)
        quorum(there, generator)
        last = dict(there)
        if generator.random() < 0.2 and len(nodes) > 1:
            gone.append(nodes.pop(generator.choice(sorted(nodes))))
        if generator.random() < 0.2:
            nodes[f"{number}"] = Node(f"{number}")
    quorum(nodes, generator)
    first = min(node.place for node in nodes.values())
    assert not any(node.assigner._warned for node in nodes.values())
    counts = Counter(place for node in (*nodes.values(), *gone) for place in node.drawn)
    assert max(counts.values(), default=1) == 1
    drawn = {place for node in (*nodes.values(), *gone) for place in node.drawn if place < first}
    assert first - len(drawn) <= (len(gone) + missed) * AHEAD * 40, "a few batches per lost node"


def test_epoch_without_samples_left_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assigner = SampleAssigner("a")
    assigner.start_at(7)
    assigner.update(["a"], [assigner.report()])
    assert [*assigner.share(range(3), 3, device=0, devices=1)] == []
    assert "no sample of epoch 1 is left for this node" in caplog.text


def test_node_that_draws_more_than_it_reported_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    node = Node("a")
    quorum({"a": node}, random.Random(0))
    node.assigner.report()
    node.draw(AHEAD)
    assert not caplog.messages
    node.draw(2)
    assert [each.partition(".")[0] for each in caplog.messages] == [
        "this node has drawn more samples since the last round than it had reported"
    ]


def test_assigner_knows_whether_an_epoch_has_samples_left() -> None:
    assigner = SampleAssigner("b")
    assert assigner.has_left(0, 99), "the length of an epoch is unknown"
    assigner.update(["a", "b"], [assigner.report()] * 2)
    drawn = assigner.share(range(7), 0, device=0, devices=1)
    assert next(drawn) == 1
    assert [assigner.has_left(0, samples) for samples in (3, 4)] == [True, False], "1, 3 and 5 of 0 to 6"
    assert assigner.has_left(1, 4), "7, 9, 11 and 13"
    assert list(drawn) == [3, 5]


def test_node_that_leaves_out_the_rest_of_an_epoch_draws_no_sample_of_a_joining_node() -> None:
    """It draws from the next epoch while the quorum is formed in which another node joins."""
    size = 10 * AHEAD
    a, b = Node("a"), Node("b")
    a.assigner.expect(size)
    quorum({"a": a}, random.Random(0))
    a.draw(3)
    assert not a.assigner.skip_to(0, 1)
    assert a.assigner.skip_to(1, 1)
    assert not a.assigner.skip_to(1, 1), "the others know"
    a.place = size
    a.assigner.update(["a"], [a.assigner.report()])
    reports = [a.assigner.report(), b.assigner.report()]
    a.draw(AHEAD)
    for node in (a, b):
        node.assigner.update(["a", "b"], reports)
    b.place = size
    for node in (a, b):
        node.draw(size // 3)
    drawn = a.drawn + b.drawn
    assert len(set(drawn)) == len(drawn)


def test_node_that_draws_a_whole_epoch_leaves_out_nothing() -> None:
    assigner = SampleAssigner("a")
    assigner.update(["a", "b"], [assigner.report()] * 2)
    list(assigner.share(range(8), 0, device=0, devices=3))
    assert not assigner.skip_to(1, 3), "a rest that is smaller than a batch"


def test_epochs_of_several_sizes_are_refused() -> None:
    assigner = SampleAssigner("a")
    assigner.update(["a"], [assigner.report()])
    assert list(assigner.share(range(3), 0, device=0, devices=1)) == [0, 1, 2]
    with pytest.raises(ValueError, match="epochs have 3 and 4 samples"):
        next(assigner.share(range(4), 4, device=0, devices=1))


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with others"])
def test_samples_drawn_before_the_checkpoint_are_not_drawn_again(alone: bool) -> None:
    """A node that joins others uses their progress instead of its own."""
    assigner, others = SampleAssigner("b"), SampleAssigner("a")
    assigner.start_at(6)
    members = [member("b", "saved", 4, progress=assigner.report())]
    if not alone:
        others.update(["a"], [others.report()])
        members.insert(0, member("a", "later", 5, progress=others.report()))
    found = quorum_of(members)
    assigner.update(names(found.members), found.progress)
    assert [*assigner.share(range(10), 0, device=0, devices=1)] == ([6, 7, 8, 9] if alone else [1, 3, 5, 7, 9])
    assert (assigner.report().end, assigner.report().reached) == (10, 10)


def of_device(device: int, size: int, ends: int | None = None) -> list[list[int]]:
    """Return the samples of one of two devices in three epochs. Another node leaves at sample `ends`."""
    assigner, sampler = SampleAssigner("a"), ElasticSampler(range(size), shuffle=False)
    assigner.update(["a", "b"], [assigner.report()] * 2)
    if ends is not None:
        assigner.update(["a"], [SampleProgress(ends, assigner.report().assignment)] * 2)
    sampler.set_share(partial(assigner.share, device=device, devices=2))
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    return epochs


def test_devices_share_the_samples_of_their_node() -> None:
    assert [of_device(device, 12)[0] for device in range(2)] == [[0, 4, 8], [2, 6, 10]]


@pytest.mark.parametrize("size", [1, 5, 7, 33])
@pytest.mark.parametrize("ends", [None, 1, 3, 10])
def test_devices_of_a_node_draw_equally_many_samples(size: int, ends: int | None) -> None:
    zero, one = (of_device(device, size, ends) for device in range(2))
    assert [*map(len, zero)] == [*map(len, one)], "the node steps together"
    assert not any(set(mine) & set(other) for mine, other in zip(zero, one, strict=True))
    both = [len(mine) + len(other) for mine, other in zip(zero, one, strict=True)]
    if ends is not None:
        assert size - 1 <= both[2] <= size or size <= ends / 2


def test_sampler_shuffles_each_epoch() -> None:
    sampler = ElasticSampler(range(10), seed=3)
    with pytest.raises(RuntimeError, match="not attached to a run"):
        next(iter(sampler))
    with pytest.raises(TypeError, match="no length"):
        len(sampler)
    assigner = SampleAssigner("a")
    assigner.update(["a"], [assigner.report()])
    sampler.set_share(partial(assigner.share, device=0, devices=1))
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]
