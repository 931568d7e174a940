"""Windows of token ids: cut from a corpus, packed with documents, split into parts, and mixed."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.data.id_files import Corpus, Spans
from lightning_sparse.data.rng import shuffled

_MIXTURE, _LIMIT, _HELD_OUT = 4, 5, 6  # numbers of random streams; `sampler.py` uses others
Documents = Literal["joined", "separate", "packed"]
DOCUMENTS = get_args(Documents)
IGNORED = -100  # a target that torch's cross entropy ignores
Arrays = tuple[NDArray[np.int64], ...]


class TokenWindows(Protocol):
    """Numbered windows of token ids. Only the windows of a `Mixture` depend on the epoch."""

    @property
    def context(self) -> int: ...

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def windows(self, indices: NDArray[np.int64], epoch: int = 0) -> Arrays:
        """Return inputs and targets, and positions unless documents are joined; each int64 [B, context]."""


class TokenStream:
    """Windows of a fixed length. Window i begins at token i * context, and continues across the ends of files.

    Args:
        context: number of tokens that a model sees; a window has one more, the last target.
        documents: "joined" ignores the ends of documents. "separate" masks targets across ends and adds positions. The
            end of a file or span also ends a document.
        spans: parts of the corpus to use; default: all of it. Adjacent parts are joined.
    """

    least_document = 1
    """Smallest number of tokens of a document that windows use."""

    def __init__(
        self, corpus: Corpus, context: int, documents: Documents = "joined", spans: Spans | None = None
    ) -> None:
        self.corpus, self.context, self.documents, self._spans = corpus, context, documents, spans
        if documents != "joined":
            self._check_ends()
        self._cut(Spans(np.zeros(1, np.int64), np.array([len(corpus)])) if spans is None else spans)

    def _check_ends(self) -> None:
        files = self.corpus.files
        for file in files:
            if file.end is None or file.end != files[0].end:
                raise ValueError(
                    f"{self.corpus.path}: documents={self.documents!r} needs the same id at the end of all documents, "
                    f'but {file.path.name} has end={file.end}: write "end": ID into its JSON file, or use a tokenizer '
                    "that has such an id."
                )

    @property
    def least_tokens(self) -> int:
        return self.context + 1

    def _cut(self, spans: Spans) -> None:
        total = int(spans.lengths.sum())
        self._count = max(0, total - 1) // self.context
        if not self._count:
            raise ValueError(
                f"{self.corpus.path}: context={self.context} needs {self.least_tokens:,} tokens or more, but there are "
                f"{total:,}. Use a smaller context, or more text."
            )
        self._segments = segments(spans, self.corpus.begins)
        self._ends = np.cumsum(self._segments.lengths)  # position in the stream after each segment

    def __len__(self) -> int:
        return self._count

    @property
    def fingerprint(self) -> str:
        files = self.corpus.files
        about = [(file.dtype.name, file.vocab_size, file.tokens, file.checksum) for file in files]
        extras: tuple[Any, ...] = () if self.documents == "joined" else (self.documents, files[0].end)
        if self._spans is not None:
            extras += tuple(hashlib.blake2b(span.tobytes(), digest_size=16).hexdigest() for span in self._spans)
        elif len(files) > 1 and self.documents != "packed":
            extras += ("over the ends of files",)  # earlier versions cut each file separately
        return hashlib.blake2b(repr((self.context, about, *extras)).encode(), digest_size=16).hexdigest()

    def windows(self, indices: NDArray[np.int64], epoch: int = 0) -> Arrays:
        rows = np.empty((len(indices), self.context + 1), np.int64)
        begins = indices * self.context
        first_segments = np.searchsorted(self._ends, begins, side="right")
        seams = [  # places in the rows where the next file or span begins
            (number, place)
            for number, (begin, segment) in enumerate(zip(begins.tolist(), first_segments.tolist(), strict=True))
            for place in self._fill(rows[number], begin, segment)
        ]
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if self.documents == "joined":
            return inputs, targets
        ends = inputs == self.corpus.files[0].end
        for number, place in seams:
            ends[number, place - 1] = True
        firsts = np.ones_like(ends)
        firsts[:, 1:] = ends[:, :-1]
        return inputs, np.where(ends, IGNORED, targets), _positions(firsts)

    def _fill(self, row: NDArray[np.int64], begin: int, segment: int) -> list[int]:
        at, seams = 0, list[int]()
        while True:
            left = int(self._ends[segment]) - begin - at
            count = min(left, len(row) - at)
            end = int(self._segments.begins[segment] + self._segments.lengths[segment])
            row[at : at + count] = self.corpus.read(end - left, count)
            at, segment = at + count, segment + 1
            if at == len(row):
                return seams
            seams.append(at)


def segments(spans: Spans, file_begins: NDArray[np.int64]) -> Spans:
    """Join adjacent spans, then cut them where files begin."""
    begins, lengths = spans.begins[spans.lengths > 0], spans.lengths[spans.lengths > 0]
    ends = begins + lengths
    apart = begins[1:] != ends[:-1]
    begins, ends = begins[np.append(True, apart)], ends[np.append(apart, True)]
    places = np.searchsorted(begins, file_begins, side="right") - 1
    inside = (places >= 0) & (file_begins < ends[places])
    all_begins = np.union1d(begins, file_begins[inside])
    spans_of = np.searchsorted(begins, all_begins, side="right") - 1
    all_ends = np.minimum(ends[spans_of], np.append(all_begins[1:], ends[-1]))
    return Spans(all_begins, all_ends - all_begins)


class PackedStream(TokenStream):
    """Windows of whole documents. Documents that are longer than a window are cut; free space is padded."""

    least_document = 2

    @property
    def least_tokens(self) -> int:
        return 2

    def _cut(self, spans: Spans) -> None:
        documents = self.corpus.documents() if self._spans is None else spans
        # a document of d tokens, including its end, has d - 1 inputs, because the end is only a target
        inputs = documents.lengths - 1
        begins, inputs = documents.begins[inputs > 0], inputs[inputs > 0]
        if not len(inputs):
            raise ValueError(f"{self.corpus.path} has no document of two tokens or more. Use more text.")
        counts = -(-inputs // self.context)
        offsets = self.context * (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))
        lengths = np.minimum(np.repeat(inputs, counts) - offsets, self.context)
        windows = pack(lengths, self.context)
        order = np.argsort(windows, kind="stable")
        self._pieces = Spans((np.repeat(begins, counts) + offsets)[order], lengths[order])
        self._ends = np.cumsum(np.bincount(windows))
        self._count = len(self._ends)

    def windows(self, indices: NDArray[np.int64], epoch: int = 0) -> Arrays:
        inputs = np.full((len(indices), self.context), self.corpus.files[0].end, np.int64)
        targets, firsts = np.full_like(inputs, IGNORED), np.zeros(inputs.shape, np.bool_)
        for row, window in enumerate(indices.tolist()):
            begin = int(self._ends[window - 1]) if window else 0
            pieces = (piece[begin : self._ends[window]].tolist() for piece in self._pieces)
            at = 0
            for first, length in zip(*pieces, strict=True):
                ids = self.corpus.read(first, length + 1)
                inputs[row, at : at + length], targets[row, at : at + length] = ids[:-1], ids[1:]
                firsts[row, at] = True
                at += length
            firsts[row, at : at + 1] = True  # the padding is not part of the last document
        return inputs, targets, _positions(firsts)


def pack(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the window of each piece. The longest piece goes first, into the fullest window that has space for it.

    Lengths of pieces are 1 to `capacity`, the length of a window.

    >>> pack(np.array([2, 5, 3, 4]), capacity=7)
    array([0, 0, 1, 1])
    """
    windows, count = np.empty(len(lengths), np.int64), 0
    left: dict[int, NDArray[np.int64]] = {}  # free space -> windows
    rooms: list[int] = []  # keys of `left`, sorted

    def add_free(space: int, some: NDArray[np.int64]) -> None:
        if not space or not len(some):
            return
        if space not in left:
            insort(rooms, space)
        left[space] = np.concatenate([left.get(space, some[:0]), some])

    order = np.argsort(-lengths, kind="stable")
    for pieces in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        length = int(lengths[pieces[0]])
        while len(pieces) and (place := bisect_left(rooms, length)) < len(rooms):
            space = rooms.pop(place)
            some, remainder = np.split(left.pop(space), [len(pieces)])
            windows[pieces[: len(some)]], pieces = some, pieces[len(some) :]
            add_free(space, remainder)
            add_free(space - length, some)
        per_window = capacity // length
        new = count + np.arange(-(-len(pieces) // per_window))
        windows[pieces] = np.repeat(new, per_window)[: len(pieces)]
        full, last = np.split(new, [len(pieces) // per_window])
        add_free(capacity - per_window * length, full)
        add_free(capacity - len(pieces) % per_window * length, last)
        count += len(new)
    return windows


def _positions(firsts: NDArray[np.bool_]) -> NDArray[np.int64]:
    places = np.arange(firsts.shape[1])
    positions: NDArray[np.int64] = places - np.maximum.accumulate(np.where(firsts, places, 0), 1)
    return positions


class SelectedWindows:
    def __init__(self, whole: TokenWindows, indices: NDArray[np.int64]) -> None:
        self._whole, self._indices, self.context = whole, indices, whole.context

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(self._whole.fingerprint.encode(), digest_size=16)
        digest.update(self._indices.tobytes())
        return digest.hexdigest()

    def windows(self, indices: NDArray[np.int64], epoch: int = 0) -> Arrays:
        return self._whole.windows(self._indices[indices], epoch)


class Mixture:
    """Windows of several streams, in proportion to their weights.

    An epoch ends when all windows of one stream are used. The other streams continue in the next epoch where they
    stopped, and start over at their end. So each window of a stream is used once before any is used again.
    """

    def __init__(self, streams: Sequence[TokenWindows], weights: Sequence[float], seed: int) -> None:
        self._streams, self.context = streams, streams[0].context
        lengths = np.array([len(stream) for stream in streams])
        shares = np.array(weights) / max(weights)  # divide first: the sum of weights may overflow
        shares /= shares.sum()
        self._shares = shares
        self._counts = np.round(shares * (lengths / shares).min()).clip(1, lengths).astype(np.int64)  # per epoch
        self._ends = np.cumsum(self._counts)
        self._orders = [shuffled(np.arange(length), seed, number, _MIXTURE) for number, length in enumerate(lengths)]
        self._about = (self._counts.tolist(), seed)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def shares(self) -> list[tuple[float, float]]:
        """For each stream, its share of the weights, and its share of the windows of an epoch."""
        return list(zip(self._shares.tolist(), (self._counts / len(self)).tolist(), strict=True))

    @property
    def fingerprint(self) -> str:
        about = (*(stream.fingerprint for stream in self._streams), *self._about)
        return hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()

    def windows(self, indices: NDArray[np.int64], epoch: int = 0) -> Arrays:
        numbers = np.searchsorted(self._ends, indices, side="right")
        out: list[NDArray[np.int64]] = []
        for number in np.unique(numbers).tolist():
            mask, order, count = numbers == number, self._orders[number], int(self._counts[number])
            places = indices[mask] - (self._ends[number] - count) + epoch * count
            arrays = self._streams[number].windows(order[places % len(order)], epoch)
            out = out or [np.empty((len(indices), self.context), np.int64) for _ in arrays]
            for whole, part in zip(out, arrays, strict=True):
                whole[mask] = part
        return tuple(out)


def mixed(parts: Sequence[TokenWindows], weights: Sequence[float], seed: int) -> TokenWindows:
    return parts[0] if len(parts) == 1 else Mixture(parts, weights, seed)


def split(stream: TokenStream, fraction: float) -> tuple[TokenWindows, TokenWindows]:
    """Return windows to train on, and windows of about this fraction of the tokens to validate on.

    Validation windows come from whole documents, and the random draw is the same for all seeds. If the ends of
    documents are unknown, windows are drawn instead.
    """
    corpus = stream.corpus
    if not corpus.has_ends:
        return _split_windows(stream, fraction)
    begins, lengths = corpus.documents()
    is_used = lengths >= stream.least_document
    documents = Spans(begins[is_used], lengths[is_used])
    try:
        train, held_out = hold_out(documents, fraction, stream.least_tokens)
        parts = [type(stream)(corpus, stream.context, stream.documents, spans) for spans in (train, held_out)]
    except ValueError as error:
        raise ValueError(f"{corpus.path}: val_fraction={fraction} cannot split it: {error}") from error
    return parts[0], parts[1]


def _split_windows(stream: TokenStream, fraction: float) -> tuple[TokenWindows, TokenWindows]:
    count = len(stream)
    if count < 2:
        raise ValueError(f"val_fraction={fraction}: {count} window(s) are too few to split; at least 2 are needed.")
    order = shuffled(np.arange(count), 0, _HELD_OUT)
    held_out, train = np.split(order, [min(count - 1, max(1, round(fraction * count)))])
    return SelectedWindows(stream, np.sort(train)), SelectedWindows(stream, np.sort(held_out))


def hold_out(documents: Spans, fraction: float, least: int) -> tuple[Spans, Spans]:
    """Draw documents at random. Return the documents to train on, and the documents to validate on.

    Documents are held out until their tokens are as close to the fraction as possible. Each part must have `least`
    tokens.
    """
    total = int(documents.lengths.sum())
    target = max(least, round(fraction * total))
    if total - target < least:
        raise ValueError(f"it has {total:,} tokens, but each part needs {least:,}. Use more text.")
    order = shuffled(np.arange(len(documents.lengths)), 0, _HELD_OUT)
    sums = np.cumsum(documents.lengths[order])
    last = max(int(np.abs(sums - target).argmin()), int(np.searchsorted(sums, least)))
    surplus = int(sums[last]) - target
    # Cut the last drawn document only if the held-out tokens would exceed twice the fraction, or would leave too few to
    # train on. Then only its end is held out.
    is_cut = surplus > target or total - int(sums[last]) < least
    trained, held = documents.lengths.copy(), np.zeros_like(documents.lengths)
    held[order[: last + 1]] = documents.lengths[order[: last + 1]]
    held[order[last]] -= surplus * is_cut
    trained -= held
    begins = documents.begins
    return Spans(begins[trained > 0], trained[trained > 0]), Spans((begins + trained)[held > 0], held[held > 0])


def limited(windows: TokenWindows, fraction: float) -> TokenWindows:
    """Return this fraction of the windows, at least one. A larger fraction contains the windows of a smaller one."""
    some = shuffled(np.arange(len(windows)), 0, _LIMIT)[: max(1, round(fraction * len(windows)))]
    return SelectedWindows(windows, np.sort(some))
