"""Compression groups: the parameters that are reduced together, independent of DDP's buckets.

DDP rebuilds its buckets in round 1, and starts over in a second fit or a resumed run. So residuals belong to *groups*,
which are known by the names and sizes of their parameters. The *layout* is the list of groups of one round. It is
settled when two rounds in a row had it; until then, rounds are dense. A settled layout outlives the DDP wrapper: one
large bucket is split into the settled groups, with the same shards and bits.
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
        """N."""
        return sum(self.numels)

    @cached_property
    def slices(self) -> dict[str, slice]:
        ends = accumulate(self.numels)
        return {n: slice(end - numel, end) for n, numel, end in zip(self.names, self.numels, ends, strict=True)}

    def only(self, names: Iterable[str]) -> ParamGroup:
        """Return the group with only these names."""
        wanted = set(names)
        pairs = [(n, numel) for n, numel in zip(self.names, self.numels, strict=True) if n in wanted]
        return ParamGroup(tuple(n for n, _ in pairs), tuple(numel for _, numel in pairs))

    def shard_numel(self, num_devices: int) -> int:
        """Return S = ceil(N / L), the size of a device's shard of the padded tensor."""
        return -(-self.numel // num_devices)

    def shard_slices(self, names: Iterable[str], device_index: int, num_devices: int) -> list[tuple[str, slice, slice]]:
        """Return (name, place in the shard, place in the parameter) of each named parameter in a device's shard."""
        shard = self.shard_numel(num_devices)
        begin, end = device_index * shard, (device_index + 1) * shard
        places = self.slices
        pieces = []
        for name in names:
            lo, hi = max(places[name].start, begin), min(places[name].stop, end)
            if lo < hi:
                shard_slice = slice(lo - begin, hi - begin)
                pieces.append((name, shard_slice, slice(lo - places[name].start, hi - places[name].start)))
        return pieces


def in_bucket_order(tensor: Tensor) -> Tensor:
    """Flatten one parameter, or its gradient, in the order of DDP's buckets."""
    tensor = tensor.detach()
    # DDP uses the order in memory, which for channels_last is not the order of the dims. It uses the order of the dims
    # if elements share memory or leave gaps.
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def excluded_names(module: nn.Module, exclude: Exclude) -> frozenset[str]:
    """Return the names that ``exclude`` selects.

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
    # Sparse gradients have no fixed layout to shard.
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    sparse = [
        name for name, submodule in module.named_modules() if isinstance(submodule, embeddings) and submodule.sparse
    ]
    if sparse:
        raise ValueError(
            f"embedding(s) {', '.join(sparse)}: sparse=True, whose gradients cannot be sharded over devices. Use "
            f"sparse=False (nodes exchange only the largest entries anyway), or strategy='ddp'."
        )


def refuse_python_reducer() -> None:
    # The Python reducer passes single gradients to the hook instead of buckets.
    dynamo = sys.modules.get("torch._dynamo")  # if it is not imported, nobody has set the option
    if dynamo is not None and dynamo.config.optimize_ddp == "python_reducer":
        raise ValueError(
            "torch._dynamo.config.optimize_ddp='python_reducer' (and compiled autograd, which needs it) makes no "
            "buckets to exchange. Set it to True or False, and compile only the model."
        )


def group_of(parameters: Sequence[Tensor], names: dict[int, str]) -> ParamGroup:
    unknown = [tuple(p.shape) for p in parameters if id(p) not in names]
    if unknown:
        raise ValueError(
            f"the bucket has parameters of shapes {unknown} that are not in the module of HierState. Create HierState "
            f"with the module that DistributedDataParallel wraps."
        )
    return ParamGroup(tuple(names[id(p)] for p in parameters), tuple(map(flat_numel, parameters)))


def flat_numel(parameter: Tensor) -> int:
    # DDP stores complex numbers as pairs.
    return parameter.numel() * (2 if parameter.is_complex() else 1)


class Layout:
    """Follows the groups of each round.

    Args:
        excluded: names of parameters that share no group with others, so each bucket is cut in two.

    Attributes:
        settled: groups of two rounds in a row, in the order in which they become ready.
    """

    def __init__(self, excluded: frozenset[str] = frozenset()) -> None:
        self.excluded = excluded
        self.previous: tuple[ParamGroup, ...] = ()
        self._current: list[ParamGroup] = []
        self.fix(())

    def fix(self, groups: Iterable[ParamGroup]) -> None:
        self.settled = tuple(groups)
        self._known = frozenset(self.settled)

    def groups_in(self, group: ParamGroup) -> tuple[ParamGroup, ...]:
        """Return the settled groups of the bucket, in settled order, or the bucket's own group."""
        if group in self._known:
            return (group,)
        names = set(group.names)
        inside = tuple(settled_group for settled_group in self.settled if names.issuperset(settled_group.names))
        covered = [name for settled_group in inside for name in settled_group.names]
        return inside if len(covered) == len(names) and set(covered) == names else (group,)

    def is_settled(self, group: ParamGroup) -> bool:
        return group in self._known

    def is_excluded(self, group: ParamGroup) -> bool:
        return bool(self.excluded) and self.excluded.issuperset(group.names)

    def split_excluded(self, groups: Iterable[ParamGroup]) -> tuple[ParamGroup, ...]:
        """Split each group into its other parameters and its excluded parameters."""
        if not self.excluded:
            return tuple(group for group in groups if group.names)
        halves = [(g.only(set(g.names) - self.excluded), g.only(self.excluded)) for g in groups]
        return tuple(half for pair in halves for half in pair if half.names)

    def record(self, group: ParamGroup) -> None:
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
    """One group in a DDP bucket. ``write_back`` copies ``grad_N`` to the bucket.

    Args:
        group: a settled group of the bucket, or the bucket's own.
        has_residual: False if it is reduced as DDP does.
    """

    def __init__(self, bucket: Bucket, group: ParamGroup, path: Path, *, has_residual: bool) -> None:
        self.group, self.path, self.has_residual = group, path, has_residual
        self.unused = bucket.unused.intersection(group.names)
        self.grad_N = bucket.flat_N
        # Usually a bucket is one group, which is a view. A bucket with the whole model has several groups, which are
        # copies.
        self._pieces = [bucket.gradient(name) for name in group.names] if group != bucket.group else []

    def read(self) -> None:
        # The copy must run on the thread or stream of the reduction.
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
        applies_by_name: residuals of a run on several nodes join the sum, because one node has no shards.
    """

    group: ParamGroup
    flat_N: Tensor
    index: int
    last: bool
    unused: frozenset[str] = frozenset()
    applies_by_name: bool = False
    groups: list[BucketGroup] = field(default_factory=list)

    def gradient(self, name: str) -> Tensor:
        return self.flat_N[self.group.slices[name]]
