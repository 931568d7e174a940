"""The same samples through torchvision, in threads of this process.

Threads rather than worker processes: what takes time (reading, decoding, resizing) releases the interpreter, the node's
memory is read in place, and there is nothing to pickle and nobody to leave behind. Each thread makes whole batches, one
more than there are threads is under way while the network trains. Whole-array work is done by numpy: torch would start
a team of OpenMP threads for each of these threads.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.transforms.v2 import functional as F

from lightning_sparse.data.decode import decode
from lightning_sparse.data.pipeline.batch import Batch, Look, Prepared, Request, prepare
from lightning_sparse.data.sample import SampleReader


class TorchPipeline:
    """
    Args:
        store: where samples come from.
        look: windows and normalisation.
        threads: how many batches are made at once.
        pin: put batches into page-locked memory, from which a GPU copies asynchronously.
    """

    def __init__(self, store: SampleReader, look: Look, *, threads: int = 2, pin: bool = False) -> None:
        self._store, self._look, self._pin = store, look, pin
        self._ahead = threads + 1
        self._memory = Recycled(threads + 3)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="lightning_sparse batches")
        # (pixel / 255 - mean) / std = pixel * scale + shift
        self._scale = (1 / (255 * np.array(look.std))).astype(np.float32)
        self._shift = (-np.array(look.mean) / np.array(look.std)).astype(np.float32)

    def run(self, requests: Iterable[Request]) -> Generator[Batch, None, None]:
        """Batches in the order of requests."""
        requests = iter(requests)
        ahead: deque[Future[Batch]] = deque()
        try:
            while True:
                while len(ahead) < self._ahead and (request := next(requests, None)) is not None:
                    ahead.append(self._pool.submit(self._make, request))
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            for each in ahead:
                each.cancel()

    def close(self) -> None:
        """Wait for the batches under way, and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _make(self, request: Request) -> Batch:
        prepared = prepare(self._store, request, self._look)
        shape = (len(request.indices), 3, request.size, request.size)
        images = torch.empty(shape, pin_memory=True) if self._pin else torch.from_numpy(self._memory.take(shape))
        for place, target in enumerate(images.numpy()):
            image = resized(prepared, place, self._store.format)
            self._normalise(image[:, ::-1] if prepared.windows.flip[place] else image, target)
        labels = torch.from_numpy(prepared.labels)
        return images, labels.pin_memory() if self._pin else labels

    def _normalise(self, image: NDArray[np.uint8], target: NDArray[np.float32]) -> None:
        for plane, scale, shift, out in zip(
            image.transpose(2, 0, 1).copy(), self._scale, self._shift, target, strict=True
        ):
            np.multiply(plane, scale, out=out)
            np.add(out, shift, out=out)


class Recycled:
    """Memory for batches, used again once nobody refers to a batch any more, any view of it included.

    Fresh memory costs a page fault for every 4 KB of it, which is as much work as resizing.

    Args:
        keep: so many unused blocks, of the size that was asked for last.
    """

    def __init__(self, keep: int) -> None:
        self._free: deque[NDArray[np.float32]] = deque(maxlen=keep)

    def take(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """An array with arbitrary contents. What is made of it, as a tensor, keeps the block from being reused."""
        size = int(np.prod(shape))
        try:
            block = self._free.pop()
        except IndexError:
            block = np.empty(size, np.float32)
        if len(block) != size:
            block = np.empty(size, np.float32)
        array = block.reshape(shape)  # an object of its own, whose end says that the block is free
        weakref.finalize(array, self._free.append, block).atexit = False
        return array


def resized(prepared: Prepared, place: int, store_format: str) -> NDArray[np.uint8]:
    """The window of one picture at its final size, not flipped, uint8 [size, size, 3]."""
    picture = prepared.pictures[place]
    if store_format == "jpeg":
        picture = decode(picture.tobytes())
    top, left, height, width = (each[place] for each in prepared.windows[:4])
    window = picture[top : top + height, left : left + width].copy()
    # channels last under another name: torch resizes uint8 with vector instructions in this layout
    image = F.resize(torch.from_numpy(window).permute(2, 0, 1), [prepared.size, prepared.size], antialias=True)
    pixels: NDArray[np.uint8] = image.permute(1, 2, 0).contiguous().numpy()
    return pixels
