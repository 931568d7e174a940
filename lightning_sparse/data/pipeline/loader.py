"""What Lightning iterates over: batches of one rank, which know where in the epoch they are.

They are plain iterables, not DataLoaders, so Lightning neither replaces a sampler nor adds one. What it asks of them:

=============================== =====================================================================================
Lightning                       here
=============================== =====================================================================================
iter() to check that it can     costs nothing: an iterator starts working with its first next()
batch_sampler.sampler           `TrainLoader` itself, so that set_epoch() is called; there is no attribute `sampler`,
                                which ``overfit_batches`` would complain about
len()                           the batches of a whole epoch, equal on all ranks; also while resuming, since Lightning
                                adds those that were done before
state_dict, load_state_dict     saved with the loops; read before the first batch of a resumed epoch
=============================== =====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from lightning_sparse.data.pipeline.batch import Batch, Pipeline, Request
from lightning_sparse.data.pipeline.sampler import Indices, Order, Segment
from lightning_sparse.messages import log


class ImageSizes:
    """Edge of the square that the network sees, by epoch.

    Args:
        sizes: one size for all epochs, or {first epoch: size} for training that starts with small pictures.

    Raises:
        ValueError: when a size is not positive, or no size is given for epoch 0.

    >>> [ImageSizes({0: 128, 6: 224}).at(epoch) for epoch in (0, 5, 6, 90)]
    [128, 128, 224, 224]
    """

    def __init__(self, sizes: int | Mapping[int, int]) -> None:
        self._sizes = dict(sorted(({0: sizes} if isinstance(sizes, int) else dict(sizes)).items()))
        if 0 not in self._sizes or min(self._sizes) < 0 or min(self._sizes.values()) < 1:
            raise ValueError(
                f"image_size={sizes!r}: give an edge in pixels, or sizes by their first epoch, beginning with epoch "
                f"0, as in {{0: 128, 6: 224}}."
            )

    def at(self, epoch: int) -> int:
        """In this epoch."""
        return next(size for first, size in reversed(self._sizes.items()) if first <= epoch)

    @property
    def largest(self) -> int:
        """Of all epochs: what cached pixels must suffice for."""
        return max(self._sizes.values())


class TrainLoader:
    """Random batches of one rank, epoch after epoch.

    Args:
        order: of samples.
        pipeline: makes the batches.
        node, device: the place of this rank.
        sizes: of pictures, by epoch.
        fingerprint: of the data set; a state of another one is not taken over.
        fixed: give the samples of epoch 0 in every epoch (to overfit on a few batches).
        on_epoch: called with the number of each epoch that begins.
        on_resume: called with the number of batches of the epoch that are done, when a state was saved by a run with
            other ranks or batches, whose count of them means nothing here.
    """

    def __init__(
        self,
        order: Order,
        pipeline: Pipeline,
        *,
        node: int = 0,
        device: int = 0,
        sizes: ImageSizes,
        fingerprint: str = "",
        fixed: bool = False,
        on_epoch: Callable[[int], None] | None = None,
        on_resume: Callable[[int], None] | None = None,
    ) -> None:
        self._order, self._pipeline, self._place, self._sizes = order, pipeline, (node, device), sizes
        self._fingerprint, self._fixed, self._on_epoch, self._on_resume = fingerprint, fixed, on_epoch, on_resume
        self._epoch = 0
        self._before: tuple[Segment, ...] = ()  # steps of this epoch that were done under other layouts
        self._done = 0  # and under this one
        self._resumes = False  # the next iterator goes on rather than beginning
        self._open: Generator[Batch, None, None] | None = None

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """Where Lightning looks for set_epoch()."""
        return SimpleNamespace(sampler=self)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iterator gives. Lightning calls it; so does a loop of your own."""
        if epoch != self._epoch:
            self._epoch, self._before, self._done, self._resumes = epoch, (), 0, False
        if self._on_epoch is not None:
            self._on_epoch(epoch)

    def __len__(self) -> int:
        return self._order.steps

    def __iter__(self) -> Iterator[Batch]:
        return self._batches()

    def _batches(self) -> Iterator[Batch]:
        self.close()  # an iterator that was left midway: its work is for nothing
        if not self._resumes:
            self._before, self._done = (), 0
        self._resumes = False
        batches = self._open = self._pipeline.run(self._requests())
        try:
            for batch in batches:
                self._done += 1  # counted when it is handed out: what was read ahead is read again after a restart
                yield batch
        finally:
            batches.close()

    def _requests(self) -> Iterator[Request]:
        epoch = self._epoch
        plan = self._order.epoch(0 if self._fixed else epoch, self._before)
        for step in range(self._done, plan.steps):
            yield Request(plan.batch(step, *self._place), epoch, self._sizes.at(epoch), True)

    def close(self) -> None:
        """Stop what the last iterator has under way."""
        if self._open is not None:
            self._open.close()
        self._open = None

    def state_dict(self) -> dict[str, Any]:
        """How far this epoch is, for all ranks alike: plain values."""
        done = [*self._before, Segment(self._order.layout, self._done)]
        return {
            "epoch": self._epoch,
            "segments": [each.state_dict() for each in done],
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a run stopped, also one with other nodes, another batch size or another shuffle."""
        self._epoch, segments = state["epoch"], [Segment.from_state(each) for each in state["segments"]]
        if state["fingerprint"] != self._fingerprint:
            log.warning("the data set has changed since the checkpoint was saved: its epoch begins anew")
            segments = [Segment(self._order.layout, 0)]
        own = segments.pop().steps if segments[-1].layout == self._order.layout else 0
        self._before, self._done, self._resumes = tuple(segments), own, True
        moved = bool(self._before) or state["fingerprint"] != self._fingerprint
        if moved and self._on_resume is not None:
            left = self._order.epoch(self._epoch, self._before).steps - own
            self._on_resume(len(self) - left)


class EvalLoader:
    """The same batches in every pass: centre crops, nothing shuffled.

    Args:
        batches: of this rank.
        pipeline: makes them.
        size: edge of the square that the network sees.
    """

    def __init__(self, batches: Sequence[Indices], pipeline: Pipeline, *, size: int) -> None:
        self._indices, self._pipeline, self._size = batches, pipeline, size
        self._open: Generator[Batch, None, None] | None = None

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches()

    def _batches(self) -> Iterator[Batch]:
        self.close()
        batches = self._open = iter(self._pipeline.run(Request(each, 0, self._size, False) for each in self._indices))
        try:
            yield from batches
        finally:
            batches.close()

    def close(self) -> None:
        """Stop what the last iterator has under way."""
        if self._open is not None:
            self._open.close()
        self._open = None
