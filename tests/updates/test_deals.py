"""Samples that are dealt to nodes that come and go."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_sparse.exchange.deals import Deals, Drawn
from lightning_sparse.updates import ElasticSampler

AHEAD = 4


class Node:
    """Draws from the line, place by place."""

    def __init__(self, name: str) -> None:
        self.deals, self.place = Deals(name), 0
        self.deals.ahead = AHEAD
        self.drawn: list[int] = []

    def draw(self, count: int) -> None:
        for _ in range(count):
            place = self.deals.draw(self.place)
            assert place is not None
            self.drawn.append(place)
            self.place = place + 1


def quorum(nodes: dict[str, Node], generator: random.Random, joins: list[str]) -> None:
    """All say, some draw meanwhile, all conclude."""
    names = sorted(nodes)
    said = [nodes[name].deals.say() for name in names]
    for name in names:
        if name not in joins:
            nodes[name].draw(generator.randint(0, AHEAD))
    trains = next((name for name in names if name not in joins), names[0])
    for name in names:
        nodes[name].deals.follow(names, [said[names.index(trains)], *said])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
@example(868)  # a node draws across the border of two deals
def test_nodes_that_stay_draw_no_sample_twice_and_leave_out_only_shares_of_those_that_are_gone(seed: int) -> None:
    generator, gone = random.Random(seed), list[Node]()
    nodes = {name: Node(name) for name in "abc"}
    joins = list("abc")
    for number in range(30):
        quorum(nodes, generator, joins)
        joins = []
        if generator.random() < 0.2 and len(nodes) > 1:
            gone.append(nodes.pop(generator.choice(sorted(nodes))))
        if generator.random() < 0.2:
            joins = [f"{number}"]
            nodes[f"{number}"] = Node(f"{number}")
    quorum(nodes, generator, joins)
    first = min(node.place for node in nodes.values())
    counts = Counter(place for node in nodes.values() for place in node.drawn)
    assert max(counts.values(), default=1) == 1
    drawn = {place for node in (*nodes.values(), *gone) for place in node.drawn if place < first}
    assert first - len(drawn) <= len(gone) * AHEAD * 40, "a few batches of each"


def test_a_node_that_was_away_gives_back_what_it_had_not_drawn() -> None:
    nodes = {name: Node(name) for name in "ab"}
    quorum(nodes, random.Random(0), joins=list("ab"))
    nodes["b"].draw(2)
    quorum({"a": nodes["a"]}, random.Random(0), joins=[])
    nodes["a"].draw(20)
    quorum(nodes, random.Random(0), joins=["b"])
    nodes["b"].draw(3)
    assert not set(nodes["a"].drawn) & set(nodes["b"].drawn)


def of_device(device: int, size: int, ends: int | None = None) -> list[list[int]]:
    """What a device of two draws in three epochs; another node is there until `ends`, samples of the first one."""
    deals, sampler = Deals("a"), ElasticSampler(range(size), shuffle=False)
    deals.follow(["a", "b"], [deals.say()] * 2)
    if ends is not None:
        deals.follow(["a"], [Drawn(ends, deals.say().deal)] * 2)
    sampler.deal(partial(deals.share, device=device, devices=2))
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    return epochs


def test_devices_of_a_node_share_what_it_is_dealt() -> None:
    assert [of_device(device, 12)[0] for device in range(2)] == [[0, 4, 8], [2, 6, 10]]


@pytest.mark.parametrize("size", [1, 5, 7, 33])
@pytest.mark.parametrize("ends", [None, 1, 3, 10])
def test_devices_of_a_node_draw_as_many_samples_each(size: int, ends: int | None) -> None:
    zero, one = (of_device(device, size, ends) for device in range(2))
    assert [*map(len, zero)] == [*map(len, one)], "the node steps together"
    assert not any(set(mine) & set(other) for mine, other in zip(zero, one, strict=True))
    both = [len(mine) + len(other) for mine, other in zip(zero, one, strict=True)]
    if ends is not None:
        assert size - 1 <= both[2] <= size or size <= ends / 2


def test_a_sampler_draws_an_epoch_in_its_order() -> None:
    sampler = ElasticSampler(range(10), seed=3)
    with pytest.raises(RuntimeError, match="attached to none"):
        next(iter(sampler))
    with pytest.raises(TypeError, match="no length"):
        len(sampler)
    deals = Deals("a")
    deals.follow(["a"], [deals.say()])
    sampler.deal(partial(deals.share, device=0, devices=1))
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]
