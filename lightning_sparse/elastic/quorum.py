"""The members of a quorum that take part in its round, and their roles.

Each node computes all of this from the statuses of all members, and gets the same result. So each tie is broken by a
token or a name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.elastic.lighthouse import Member, NodeStatus
from lightning_sparse.elastic.sampling import SampleProgress, name_of


class Sizes(NamedTuple):
    """Sizes of the payloads of one device."""

    message_bytes: int = 0  # without a sample
    sample_bytes: int = 0
    numel: int = 0  # of the slice


@dataclass(frozen=True)
class Quorum:
    """The nodes of a round."""

    members: list[Member]  # in rank order
    training: list[Member]  # members with the weights ``token``, which ``number`` rounds led to
    contributors: list[Member]  # training nodes that send updates
    token: str
    number: int
    facts: Mapping[str, Any]  # common to all members
    run: str  # all members belong to it, or join it
    unreached: list[Member]  # left out because of loopback addresses
    trained: str
    sizes: Sequence[Sequence[int]]
    change: str  # of the exchanged parameters, which this quorum makes; empty for none

    @property
    def layout_description(self) -> str:
        return describe_layout(self.trained, self.sizes)

    @property
    def next_token(self) -> str:
        """Name of the weights after this round."""
        # With ``tries``, so that every attempt has a different token, and rows of two attempts cannot mix.
        return name_of(self.token, [(member.name, member.status.tries) for member in self.contributors])

    @property
    def token_after_change(self) -> str:
        return name_of(self.token, self.change)

    @property
    def progress(self) -> list[SampleProgress]:
        return [
            member.status.progress if member.status.progress.assignment or member in self.training else SampleProgress()
            for member in self.members
        ]

    def row_of(self, sent: Tensor | None, sizes: Sizes) -> Tensor:
        """Return a member's bytes, padded with zeros to a length that follows from the statuses of all members."""
        statuses = [member.status for member in self.contributors if not member.status.flushes]
        # Samples are comparable only if all contributors took them at the same exchange. Otherwise, the row ends before
        # them.
        sampled = all(status.sampled for status in statuses) and len({status.exchanges for status in statuses}) == 1
        row_B = torch.zeros(sizes.message_bytes + sizes.sample_bytes * sampled, dtype=torch.uint8)
        if sent is not None and sent.dtype == torch.uint8:
            sent_B = sent[: len(row_B)]
            row_B[: len(sent_B)] = sent_B
        return row_B

    def is_too_small(self, min_nodes: int) -> bool:
        return len(self.contributors) < min_nodes and not any(member.status.leaves for member in self.contributors)


def quorum_of(members: Sequence[Member]) -> Quorum:
    """Return the quorum that all members conclude from their statuses. At least one member must have weights."""
    run = _run_of(members)
    members = [member for member in members if member.status.run in ("", run)]
    named = [member.status for member in members if member.status.token and member.status.run == run]
    # The newest weights continue, and of several the weights that most nodes have, or are prepared for.
    votes = Counter(token for member in members for token in {member.status.token, member.status.prepared})
    _, _, token = max((status.number, votes[status.token], status.token) for status in named)
    training = [member for member in members if token in (member.status.token, member.status.prepared)]
    # A prepared node still has the number of the round before.
    number = max(member.status.number + (member.status.token != token) for member in training)
    description = Counter(_describe(member.status) for member in training).most_common(1)[0][0]
    model = next(member.status for member in training if _describe(member.status) == description)
    facts = model.facts
    # Nodes that do not train yet follow the training nodes in the parameters that they exchange.
    followers = [member for member in members if member not in training and not member.status.trains]
    alike = [
        member
        for member in members
        if member.status.facts == facts and (member in followers or _describe(member.status) == description)
    ]
    near = _near(alike, [member for member in training if member in alike])
    training = [member for member in training if member in near]
    # A quorum that changes the parameters has no contributors, so no round mixes two layouts.
    change = _agreed_change(training)
    contributors = [member for member in training if not member.status.observes and not change]
    unreached = [member for member in alike if member not in near]
    layout = (model.trained, model.sizes)
    return Quorum(near, training, contributors, token, number, facts, run or token, unreached, *layout, change)


def describe_layout(trained: str, sizes: Sequence[Sequence[int]]) -> str:
    return f"{trained}, sizes {list(sizes)}"


def _describe(status: NodeStatus) -> str:
    return f"{status.facts!r} {describe_layout(status.trained, status.sizes)}"


def _agreed_change(training: Sequence[Member]) -> str:
    """Return the change that all training nodes want, or most of them if one of these has waited long enough."""
    changes = Counter(member.status.change for member in training if member.status.change)
    change = max(changes, key=lambda each: (changes[each], each), default="")
    impatient = any(member.status.impatient for member in training if member.status.change == change)
    agreed = changes[change] == len(training) or (impatient and 2 * changes[change] > len(training))
    return change if agreed else ""


def _near(members: list[Member], training: list[Member]) -> list[Member]:
    # If a training node has a loopback address, only the nodes on its machine take part. Otherwise, if there are
    # several machines, nodes with a loopback address are left out.
    if len({member.status.network for member in members}) == 1:
        return members
    local = next((member for member in training if member.is_local), None)
    if local is not None:
        return [member for member in members if member.status.network == local.status.network]
    return [member for member in members if not member.is_local]


def _run_of(members: Sequence[Member]) -> str:
    # The run that most nodes train continues, even if another run has more rounds. If no node trains yet, it is the run
    # that most nodes name.
    runs = {member.status.run for member in members} - {""}

    def votes(run: str) -> tuple[int, int, int, str]:
        statuses = [member.status for member in members if member.status.run == run]
        return sum(status.trains for status in statuses), len(statuses), max(status.number for status in statuses), run

    return max(runs, key=votes, default="")
