"""What nodes that come and go conclude alike from what they said of themselves."""

from typing import Any

from lightning_sparse.exchange.lighthouse import Member, Said
from lightning_sparse.exchange.rounds import quorum_of


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
