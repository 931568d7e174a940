"""Compression groups: the parameters that are reduced together, independent of DDP's buckets.

DDP's buckets change. Round 0 has one bucket. In round 1, DDP rebuilds the buckets in the order in which gradients
became ready. A second fit and a resumed run start over. So residuals do not belong to buckets, but to *groups*, which
are known by the names and sizes of their parameters. The *layout* is the list of groups of one round. It is settled
when two rounds in a row had it; until then, rounds are dense. A settled layout outlives the DDP wrapper: one large
bucket is split into the settled groups, with the same shards and bits.

Excluded parameters have groups of their own, so each bucket is cut in two.
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
    """An ordered set of parameters that is reduced as one flat tensor."""

    names: tuple[str, ...]
    numels: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[ParamGroup], tuple[tuple[str, ...], tuple[int, ...]]]:
        return ParamGroup, (self.names, self.numels)  # not the cached hash: strings hash differently in each process

    @cached_property
    def _hash(self) -> int:  # cached, because groups are keys and have hundreds of names
        return hash((self.names, self.numels))

    @cached_property
    def numel(self) -> int:
        """N, number of elements of the flat tensor."""
        return sum(self.numels)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The place of each parameter in the flat tensor."""
        ends = accumulate(self.numels)
        return {n: slice(end - numel, end) for n, numel, end in zip(self.names, self.numels, ends, strict=True)}

    def only(self, names: Iterable[str]) -> ParamGroup:
        """Return the group's parameters with these names, in the order of the group."""
        wanted = set(names)
        kept = [(n, numel) for n, numel in zip(self.names, self.numels, strict=True) if n in wanted]
        return ParamGroup(tuple(n for n, _ in kept), tuple(numel for _, numel in kept))

    def shard_numel(self, num_devices: int) -> int:
        """Return S = ceil(N / L), the number of elements of a device's shard of the padded tensor."""
        return -(-self.numel // num_devices)

    def shard_slices(self, names: Iterable[str], device_index: int, num_devices: int) -> list[tuple[str, slice, slice]]:
        """Return, for each named parameter in a device's shard, its name, its place in the shard, and its place in the
        parameter."""
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
    """Return the name of each parameter by ``id()``; a shared parameter has its first name."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def in_bucket_order(tensor: Tensor) -> Tensor:
    """Return a parameter, or its gradient, flat in the order of DDP's buckets.

    This is the order in memory, which for channels_last is not the order of the dims. If elements share memory or leave
    gaps, it is the order of the dims.
    """
    tensor = tensor.detach()
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def excluded_names(module: nn.Module, exclude: Exclude) -> frozenset[str]:
    """Return the names of the parameters that ``exclude`` selects.

    Raises:
        ValueError: if a pattern matches no parameter.
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
            f"such as {', '.join(map(repr, list(named)[:3]))}. A pattern must match the whole name; '*' matches "
            f"anything."
        )
    return frozenset(name for names in matched.values() for name in names)


def refuse_sparse_gradients(module: nn.Module) -> None:
    """Raise ValueError for embeddings with sparse gradients, which have no fixed layout to shard."""
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    sparse = [name for name, each in module.named_modules() if isinstance(each, embeddings) and each.sparse]
    if sparse:
        raise ValueError(
            f"embedding(s) {', '.join(sparse)}: sparse=True, whose gradients cannot be sharded over devices. Use "
            f"sparse=False (nodes exchange only the largest entries anyway), or strategy='ddp'."
        )


def refuse_python_reducer() -> None:
    """Raise ValueError if torch uses its Python reducer, which passes single gradients instead of buckets."""
    dynamo = sys.modules.get("torch._dynamo")  # not imported: then nobody has set it
    if dynamo is not None and dynamo.config.optimize_ddp == "python_reducer":
        raise ValueError(
            "torch._dynamo.config.optimize_ddp='python_reducer' (and compiled autograd, which needs it) makes no "
            "buckets to exchange. Set it to True or False, and compile only the model."
        )


def group_of(parameters: Sequence[Tensor], names: dict[int, str]) -> ParamGroup:
    """Return the group of a bucket's parameters.

    Raises:
        ValueError: if a parameter is not in ``names``.
    """
    unknown = [tuple(p.shape) for p in parameters if id(p) not in names]
    if unknown:
        raise ValueError(
            f"the bucket has parameters of shapes {unknown} that are not in the module of HierState. Create HierState "
            f"with the module that DistributedDataParallel wraps."
        )
    return ParamGroup(tuple(names[id(p)] for p in parameters), tuple(map(flat_numel, parameters)))


def flat_numel(parameter: Tensor) -> int:
    """Return the number of elements of a parameter's gradient in a bucket: DDP stores complex numbers as pairs."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


class Layout:
    """Follows the groups of each round, and knows the settled groups.

    Args:
        excluded: names of parameters that share no group with others.

    Attributes:
        settled: groups of two rounds in a row, in the order in which they become ready.
        previous: groups of the last round.
    """

    def __init__(self, excluded: frozenset[str] = frozenset()) -> None:
        self.excluded = excluded
        self.previous: tuple[ParamGroup, ...] = ()
        self._current: list[ParamGroup] = []
        self.fix(())

    def fix(self, groups: Iterable[ParamGroup]) -> None:
        """Set the settled groups."""
        self.settled = tuple(groups)
        self._known = frozenset(self.settled)

    def groups_in(self, group: ParamGroup) -> tuple[ParamGroup, ...]:
        """Return the settled groups in a bucket, in settled order, or the bucket's own group."""
        if group in self._known:
            return (group,)
        names = set(group.names)
        inside = tuple(known for known in self.settled if names.issuperset(known.names))
        covered = [name for known in inside for name in known.names]
        return inside if len(covered) == len(names) and set(covered) == names else (group,)

    def is_settled(self, group: ParamGroup) -> bool:
        return group in self._known

    def is_excluded(self, group: ParamGroup) -> bool:
        return bool(self.excluded) and self.excluded.issuperset(group.names)

    def split_excluded(self, groups: Iterable[ParamGroup]) -> tuple[ParamGroup, ...]:
        """Split each group into its other parameters and its excluded parameters. Empty groups are left out."""
        if not self.excluded:
            return tuple(group for group in groups if group.names)
        halves = [(g.only(set(g.names) - self.excluded), g.only(self.excluded)) for g in groups]
        return tuple(half for pair in halves for half in pair if half.names)

    def record(self, group: ParamGroup) -> None:
        """Add a bucket's group to the running round."""
        self._current.extend(self.split_excluded([group]))

    def abandon_round(self) -> bool:
        """Forget an interrupted round. Return whether there was one."""
        cut_short = bool(self._current)
        self._current.clear()
        return cut_short

    def end_round(self) -> bool:
        """End the round. Return whether this settled a new layout."""
        current, self._current = tuple(self._current), []
        repeated = current == self.previous
        self.previous = current
        if not repeated or self._known == set(current):
            return False
        self.fix(current)
        return True


# -- a DDP bucket as groups --------------------------------------------------------------------------------------------


class BucketGroup:
    """One group of a bucket. ``write_back`` copies ``grad_N`` to the bucket.

    Usually a bucket is one group. If the whole model is one bucket again (a second fit, a resumed run), it has several
    groups, which are copies.

    Args:
        group: a settled group in the bucket, or the bucket's own.
        has_residual: False if it is reduced as DDP does.

    Attributes:
        unused: parameters that this rank did not use.
    """

    def __init__(self, bucket: Bucket, group: ParamGroup, path: Path, *, has_residual: bool) -> None:
        self.group, self.path, self.has_residual = group, path, has_residual
        self.unused = bucket.unused.intersection(group.names)
        self.grad_N = bucket.flat_N
        self._pieces = [bucket.gradient(name) for name in group.names] if group != bucket.group else []

    def read(self) -> None:
        """Copy the group from the bucket, on the thread or stream of the reduction, if it is a part of the bucket."""
        if self._pieces:
            self.grad_N = torch.cat(self._pieces)

    def write_back(self) -> None:
        if self._pieces:
            torch._foreach_copy_(self._pieces, list(torch.split(self.grad_N, list(self.group.numels))))


@dataclass
class Bucket:
    """The content of a DDP bucket. DDP takes back its own object when the hook returns.

    Attributes:
        unused: parameters that this rank did not use, with DDP's ``find_unused_parameters``.
        spends_parked: residuals of a run on several nodes join the sum, because one node has no shards.
    """

    group: ParamGroup
    flat_N: Tensor
    index: int
    last: bool
    unused: frozenset[str] = frozenset()
    spends_parked: bool = False
    groups: list[BucketGroup] = field(default_factory=list)

    def gradient(self, name: str) -> Tensor:
        """Return a parameter's gradient, flat, as a view of the bucket."""
        return self.flat_N[self.group.slices[name]]
