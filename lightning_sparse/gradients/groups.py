"""Compression groups: which parameters are reduced together and by which path, independent of DDP's buckets.

DDP's buckets change: round 0 is one bucket, round 1 brings buckets rebuilt in the order in which gradients became
ready, and every new wrap (a second fit, a resumed run) starts over. State kept by bucket index would silently go to
other parameters. So a *group* is known by its content, the ordered (name, numel) of its parameters; the *layout* is the
list of groups of one round. It settles when two rounds in a row had it; until then rounds are dense. It outlives the
wrapper: one big bucket is split into the settled groups, which gives the same shards, hence the same bits.

Parameters excluded from selection are groups of their own: each bucket is cut in two, the excluded ones and the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn

from lightning_sparse.exchange import Path
from lightning_sparse.gradients.config import Exclude

BY_SHARD = (torch.float32, torch.float16, torch.bfloat16)
"""Gradients of other dtypes are all-reduced whole."""


@dataclass(frozen=True)
class ParamGroup:
    """An ordered set of parameters that is reduced as one flat tensor of ``numel`` elements."""

    names: tuple[str, ...]
    numels: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[ParamGroup], tuple[tuple[str, ...], tuple[int, ...]]]:
        return ParamGroup, (self.names, self.numels)  # strings hash differently in each process

    @cached_property
    def _hash(self) -> int:  # groups are keys, and hold hundreds of names
        return hash((self.names, self.numels))

    @cached_property
    def numel(self) -> int:
        """N, the length of the flat tensor."""
        return sum(self.numels)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each parameter lies in the flat tensor."""
        ends = accumulate(self.numels)
        return {n: slice(end - numel, end) for n, numel, end in zip(self.names, self.numels, ends, strict=True)}

    def only(self, names: Iterable[str]) -> ParamGroup:
        """The group's parameters of these names, in its order."""
        wanted = set(names)
        kept = [(n, numel) for n, numel in zip(self.names, self.numels, strict=True) if n in wanted]
        return ParamGroup(tuple(n for n, _ in kept), tuple(numel for _, numel in kept))

    def shard_numel(self, num_devices: int) -> int:
        """S = ceil(N / L), the length of a device's part once the flat tensor is padded to L * S."""
        return -(-self.numel // num_devices)

    def shard_slices(self, names: Iterable[str], device_index: int, num_devices: int) -> list[tuple[str, slice, slice]]:
        """What a device's shard holds of the named parameters.

        Returns:
            For each parameter met: its name, where the piece lies in the shard, and where in the parameter.
        """
        shard = self.shard_numel(num_devices)
        begin, end = device_index * shard, (device_index + 1) * shard
        places = self.slices
        pieces = []
        for name in names:
            lo, hi = max(places[name].start, begin), min(places[name].stop, end)
            if lo < hi:
                here = slice(lo - begin, hi - begin)
                pieces.append((name, here, slice(lo - places[name].start, hi - places[name].start)))
        return pieces


def parameter_names(module: nn.Module) -> dict[int, str]:
    """id -> name for every parameter of the module; a shared parameter has its first name."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def in_bucket_order(tensor: Tensor) -> Tensor:
    """A parameter, or its gradient, flat in the order in which DDP lays gradients into a bucket.

    It is the order of its memory, which for channels_last is not that of the dims; where elements share memory or leave
    gaps it is that of the dims.
    """
    tensor = tensor.detach()
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def excluded_names(module: nn.Module, exclude: Exclude) -> frozenset[str]:
    """The parameters that ``exclude`` means.

    Raises:
        ValueError: when a pattern matches no parameter.
    """
    named = dict(module.named_parameters())
    if exclude == "none":
        return frozenset()
    if exclude == "vectors":
        return frozenset(name for name, parameter in named.items() if parameter.dim() <= 1)
    matched = {pattern: [name for name in named if fnmatchcase(name, pattern)] for pattern in exclude}
    idle = [pattern for pattern, names in matched.items() if not names]
    if idle:
        raise ValueError(
            f"exclude={exclude!r}: {', '.join(map(repr, idle))} matches none of the module's {len(named)} parameters, "
            f"whose names are like {', '.join(map(repr, list(named)[:3]))}. A pattern is held against the whole name; "
            f"'*' stands for anything."
        )
    return frozenset(name for names in matched.values() for name in names)


def refuse_sparse_gradients(module: nn.Module) -> None:
    """Sparse gradients have no fixed layout to shard.

    Raises:
        ValueError: naming the embeddings that would produce them.
    """
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    sparse = [name for name, each in module.named_modules() if isinstance(each, embeddings) and each.sparse]
    if sparse:
        raise ValueError(
            f"the embedding(s) {', '.join(sparse)} have sparse=True: their gradients cannot be sharded over devices. "
            f"Use sparse=False (only the largest entries are sent between nodes anyway), or strategy='ddp'."
        )


def refuse_python_reducer() -> None:
    """It hands gradients over one by one while they are compiled, and never a bucket.

    Raises:
        ValueError: if torch is set to use it.
    """
    dynamo = sys.modules.get("torch._dynamo")  # who has set it has imported it
    if dynamo is not None and dynamo.config.optimize_ddp == "python_reducer":
        raise ValueError(
            "torch._dynamo.config.optimize_ddp='python_reducer' leaves no buckets to exchange, nor does compiled "
            "autograd, which needs it: set it to True or False, and compile the model alone."
        )


def group_of(parameters: Sequence[Tensor], names: dict[int, str]) -> ParamGroup:
    """The group of a bucket's parameters.

    Raises:
        ValueError: when a parameter is not one of the module the names were taken from.
    """
    unknown = [tuple(p.shape) for p in parameters if id(p) not in names]
    if unknown:
        raise ValueError(
            f"the bucket holds parameters of shapes {unknown} that the module given to HierState does not have: "
            f"build HierState from the very module that DistributedDataParallel wraps."
        )
    return ParamGroup(tuple(names[id(p)] for p in parameters), tuple(map(flat_numel, parameters)))


def flat_numel(parameter: Tensor) -> int:
    """Elements of its gradient in a bucket: DDP lays a complex parameter out as pairs of real numbers."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


class Layout:
    """Follows the groups of each round and tells which are settled.

    Args:
        excluded: parameters that share no group with others.

    Attributes:
        settled: groups seen in two rounds in a row, in the order in which they become ready.
        previous: groups of the last round.
    """

    def __init__(self, excluded: frozenset[str] = frozenset()) -> None:
        self.excluded = excluded
        self.previous: tuple[ParamGroup, ...] = ()
        self._current: list[ParamGroup] = []
        self.fix(())

    def fix(self, groups: Iterable[ParamGroup]) -> None:
        """Take these groups as settled."""
        self.settled = tuple(groups)
        self._known = frozenset(self.settled)

    def groups_in(self, group: ParamGroup) -> tuple[ParamGroup, ...]:
        """The settled groups that a bucket's group consists of, in settled order; the group itself if it is none."""
        if group in self._known:
            return (group,)
        names = set(group.names)
        inside = tuple(known for known in self.settled if names.issuperset(known.names))
        covered = [name for known in inside for name in known.names]
        return inside if len(covered) == len(names) and set(covered) == names else (group,)

    def is_settled(self, group: ParamGroup) -> bool:
        """Whether the group may be sent sparsely: its layout was seen in two rounds."""
        return group in self._known

    def is_excluded(self, group: ParamGroup) -> bool:
        """Whether the group is the excluded part of a bucket."""
        return bool(self.excluded) and self.excluded.issuperset(group.names)

    def split_excluded(self, groups: Iterable[ParamGroup]) -> tuple[ParamGroup, ...]:
        """Each group as two, without the excluded parameters and of them alone; what is empty is left out."""
        if not self.excluded:
            return tuple(group for group in groups if group.names)
        halves = [(g.only(set(g.names) - self.excluded), g.only(self.excluded)) for g in groups]
        return tuple(half for pair in halves for half in pair if half.names)

    def record(self, group: ParamGroup) -> None:
        """Note a bucket's group of the running round."""
        self._current.extend(self.split_excluded([group]))

    def abandon_round(self) -> bool:
        """Forget a round that was cut short; True when there was one."""
        cut_short = bool(self._current)
        self._current.clear()
        return cut_short

    def end_round(self) -> bool:
        """Close the round; True when this settled a new layout."""
        current, self._current = tuple(self._current), []
        repeated = current == self.previous
        self.previous = current
        if not repeated or self._known == set(current):
            return False
        self.fix(current)
        return True


# -- a DDP bucket as groups --------------------------------------------------------------------------------------------


class BucketGroup:
    """One group of a bucket; what is written to ``grad_N`` reaches the bucket with write_back().

    Mostly a bucket *is* a group. It is several when the whole model comes as one bucket again (a second fit, a resumed
    run): then each group is a copy that is written back.

    Args:
        group: a settled group inside it, or its own.
        has_residual: False where it is reduced as DDP does.

    Attributes:
        unused: those of its parameters that this rank did not use.
    """

    def __init__(self, bucket: Bucket, group: ParamGroup, path: Path, *, has_residual: bool) -> None:
        self.group, self.path, self.has_residual = group, path, has_residual
        self.unused = bucket.unused.intersection(group.names)
        self.grad_N = bucket.flat_N
        self._pieces = [bucket.gradient(name) for name in group.names] if group != bucket.group else []

    def read(self) -> None:
        """Before the reduction, on its thread or stream: take a copy where the group is a part of the bucket."""
        if self._pieces:
            self.grad_N = torch.cat(self._pieces)

    def write_back(self) -> None:
        """After the reduction: a copy is written to the bucket."""
        if self._pieces:
            torch._foreach_copy_(self._pieces, list(torch.split(self.grad_N, list(self.group.numels))))


@dataclass
class Bucket:
    """What a bucket holds; DDP takes its own object back when the hook returns.

    Attributes:
        unused: those of its parameters that this rank did not use; empty unless DDP looks for them.
        spends_parked: residuals of a run on several nodes join the sum, for there are no shards.
    """

    group: ParamGroup
    flat_N: Tensor
    index: int
    last: bool
    unused: frozenset[str] = frozenset()
    spends_parked: bool = False
    groups: list[BucketGroup] = field(default_factory=list)

    def gradient(self, name: str) -> Tensor:
        """Return a parameter's gradient, flat; a view of the bucket."""
        return self.flat_N[self.group.slices[name]]
