"""What nodes that come and go conclude alike from what they said of themselves."""

from typing import Any

import pytest
import torch

from lightning_sparse.exchange.communicator import Group
from lightning_sparse.exchange.lighthouse import Lighthouse, Member, Said, _said
from lightning_sparse.exchange.rounds import Outcome, Round, Rounds, quorum_of


def member(name: str, token: str, number: int, **said: Any) -> Member:
    return Member(name, "", Said(token, number, observes=False, **said))


def names(members: list[Member]) -> list[str]:
    return [each.name for each in members]


def test_the_weights_of_most_rounds_are_trained_on() -> None:
    found = quorum_of([member("a", "old", 4), member("b", "new", 5), member("c", "new", 5), member("d", "", 0)])
    assert (found.token, found.number, names(found.contributors)) == ("new", 5, ["b", "c"])
    assert names(found.members) == ["a", "b", "c", "d"], "the others observe"


def test_of_two_weights_of_as_many_rounds_those_of_more_nodes_count() -> None:
    assert quorum_of([member("a", "z", 5), member("b", "y", 5), member("c", "y", 5)]).token == "y"


def test_a_round_that_one_node_knows_counts_for_those_that_are_prepared() -> None:
    found = quorum_of([member("a", "base", 4, prepared="round"), member("b", "round", 5)])
    assert (found.token, names(found.training)) == ("round", ["a", "b"])


def test_a_round_that_was_refused_counts_no_more() -> None:
    """Its messages were sent again: the node that alone knew that it counts, and comes back, takes up the others'."""
    found = quorum_of([member("a", "round", 5), member("b", "base", 4, refused=["round"])])
    assert (found.token, names(found.contributors)) == ("base", ["b"])


def test_a_node_that_differs_is_left_out() -> None:
    facts = [{"density": 0.1}, {"density": 0.1}, {"density": 0.2}]
    found = quorum_of([member(name, "token", 1, facts=each) for name, each in zip("abc", facts, strict=True)])
    assert names(found.members) == ["a", "b"]


class Silent(Lighthouse):
    """Has no quorum for anybody."""

    def __init__(self) -> None:
        self.name, self.heard = "a:1", list[Said]()

    def quorum(self, said: Said) -> None:
        self.heard.append(said)


def test_a_node_tells_which_rounds_it_has_refused() -> None:
    pytest.importorskip("torchft", reason="needs torchft")
    lighthouse, sent, outcome = Silent(), torch.ones(4), Outcome()
    rounds = Rounds(lighthouse, Group((0,), 0), {}, min_nodes=1, timeout=1.0)
    rounds.fit(8, 0, 4)
    rounds._unsettled = Round("base", "round", 5, 2, torch.empty(0)), sent
    rounds._settle("base", outcome)
    assert outcome.returned == [sent]
    rounds.round()
    assert lighthouse.heard[-1].refused == ("round",)


class Alone(Silent):
    """Has nobody but the node itself."""

    def quorum(self, said: Said) -> list[Member]:  # type: ignore[override]
        return [Member(self.name, "", said)]


def test_a_node_that_finds_no_weights_begins_with_its_own_and_still_asks_in_case_others_have_some() -> None:
    pytest.importorskip("torchft", reason="needs torchft")
    rounds = Rounds(Alone(), Group((0,), 0), {}, min_nodes=1, timeout=1.0)
    rounds.fit(8, 0, 4)
    rounds.ask()
    asked = rounds.wants
    rounds.round()
    assert (rounds.token, rounds.wants) == ("a:1", asked)


def test_what_a_node_of_another_version_says_is_read_as_far_as_it_is_known() -> None:
    assert _said({"token": "t", "colour": "red"}) == Said(token="t")
    assert _said(None) == Said()
