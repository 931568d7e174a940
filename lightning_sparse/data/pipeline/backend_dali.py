"""The same samples through DALI. The only file that imports it.

A thread of ours reads ahead from the store, another runs DALI, which takes the arrays as they are (``no_copy``) and
resizes, flips and normalises them on threads of its own, or on the GPU:

===================  =========================================  ==============================================
samples              without a GPU                              with one
===================  =========================================  ==============================================
decoded uint8        the window -> resize -> flip, normalise    upload the window -> the same on the GPU
JPEG                 decode the window only -> the same         mixed decode of the window only -> the same
===================  =========================================  ==============================================

Of a decoded picture DALI is given the window alone, whose rows our thread copies out of the store: that costs less than
DALI's slice, and on a GPU the rest of the picture is not uploaded. A region of interest of the resize would save the
copy as well, but lets pixels from outside into the edges of the window.

DALI reads no file, draws no random number and knows no epoch: windows come from `augment`, as for torchvision, and an
epoch ends when its requests do, so there is nothing that an iterator could forget to reset. The executor is the dynamic
one, whose outputs are handed to torch without a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import fn, pipeline_def, types
from torch.utils.dlpack import from_dlpack

from lightning_sparse.data.decode import decode
from lightning_sparse.data.pipeline.batch import Batch, Look, Prepared, Request, prepare
from lightning_sparse.data.pipeline.prefetch import prefetch
from lightning_sparse.data.sample import SampleReader

_AHEAD = 2  # batches in each of the two queues: read, and made


class DaliPipeline:
    """
    Args:
        store: where samples come from.
        look: windows and normalisation.
        batch_size: the largest number of samples in a request.
        threads: of DALI.
        device: the index of the GPU that does the work; None for the CPU.
    """

    def __init__(
        self, store: SampleReader, look: Look, *, batch_size: int, threads: int = 2, device: int | None = None
    ) -> None:
        self._store, self._look = store, look
        options = {"batch_size": batch_size, "num_threads": threads, "device_id": device}
        self._pipe: Any = _graph(
            look, store.format, device is not None, **options, prefetch_queue_depth=1, exec_dynamic=True
        )
        self._pipe.build()

    def run(self, requests: Iterable[Request]) -> Generator[Batch, None, None]:
        """Batches in the order of requests."""
        made = prefetch(self._made(requests), _AHEAD, "DALI")
        try:
            for images, labels in made:
                # here, in the thread that uses them: on a GPU this orders DALI's stream before the caller's
                yield from_dlpack(images.as_tensor()), labels.to(_device_of(images), non_blocking=True)
        finally:
            made.close()

    def close(self) -> None:
        """Give DALI's threads and memory back."""
        self._pipe = None

    def _made(self, requests: Iterable[Request]) -> Iterator[tuple[Any, torch.Tensor]]:
        read = prefetch(map(self._read, requests), _AHEAD, "reader")
        in_use: deque[Prepared] = deque(maxlen=_AHEAD + 1)  # uploads may go on after run() has returned
        try:
            for prepared in read:
                in_use.append(prepared)
                yield self._run(prepared), torch.from_numpy(prepared.labels)
        finally:
            read.close()

    def _read(self, request: Request) -> Prepared:
        prepared = prepare(self._store, request, self._look)
        if self._store.format == "decoded":
            return prepared._replace(pictures=cut_out(prepared))
        return prepared._replace(pictures=[as_dali_reads(each) for each in prepared.pictures])

    def _run(self, prepared: Prepared) -> Any:
        try:
            (images,) = self._pipe.run(pictures=prepared.pictures, **_inputs(prepared, self._store.format))
        except RuntimeError as error:
            raise RuntimeError(
                f"DALI failed on one of the samples {prepared.indices.tolist()} of the manifest; backend='torch' and "
                f"sample_format='decoded' read whatever the cache holds. DALI says: {error}"
            ) from error
        return images


@pipeline_def  # type: ignore[untyped-decorator]
def _graph(look: Look, store_format: str, on_gpu: bool) -> Any:
    size = _input("size", types.FLOAT, 0)
    if store_format == "jpeg":
        window = {"start": _input("start", types.INT32, 1), "shape": _input("shape", types.INT32, 1)}
        files = _input("pictures", types.UINT8, 1)
        device = "mixed" if on_gpu else "cpu"
        cut = fn.decoders.image_slice(files, device=device, output_type=types.RGB, axis_names="HW", **window)
    else:
        cut = _input("pictures", types.UINT8, 3, layout="HWC")
        cut = cut.gpu() if on_gpu else cut
    resized = fn.resize(cut, resize_x=size, resize_y=size, antialias=True)
    return fn.crop_mirror_normalize(
        resized,
        mirror=_input("flip", types.INT32, 0),
        mean=[255 * each for each in look.mean],
        std=[255 * each for each in look.std],
        dtype=types.FLOAT,
        output_layout="CHW",
    )


def _input(name: str, dtype: Any, ndim: int, **options: Any) -> Any:
    return fn.external_source(name=name, no_copy=True, dtype=dtype, ndim=ndim, **options)


def cut_out(prepared: Prepared) -> list[NDArray[np.uint8]]:
    """The window of each decoded picture, in memory of its own."""
    windows = zip(*(each.tolist() for each in prepared.windows[:4]), strict=True)
    return [
        picture[top : top + height, left : left + width].copy()
        for picture, (top, left, height, width) in zip(prepared.pictures, windows, strict=True)
    ]


def as_dali_reads(file: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A JPEG of one or three colours as it is; anything else (CMYK, GIF, a palette) as pixels behind a PPM header.

    One file that DALI does not read ends its pipeline.
    """
    if jpeg_components(file.data) in (1, 3):
        return file
    pixels = decode(file.tobytes())
    header = f"P6\n{pixels.shape[1]} {pixels.shape[0]}\n255\n".encode()
    return np.concatenate([np.frombuffer(header, np.uint8), pixels.reshape(-1)])


def jpeg_components(file: memoryview) -> int:
    """How many colours a JPEG has, from its frame header; 0 when it is none."""
    if bytes(file[:2]) != b"\xff\xd8":
        return 0
    place = 2
    while place + 9 < len(file) and file[place] == 0xFF:
        kind = file[place + 1]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            return file[place + 9]
        place += 1 if kind == 0xFF else 2 + int.from_bytes(file[place + 2 : place + 4], "big")
    return 0


def _inputs(prepared: Prepared, store_format: str) -> dict[str, Any]:
    """Besides the pictures. Those that are decoded are cut out already."""
    top, left, height, width, flip = prepared.windows
    inputs = {"flip": flip.astype(np.int32), "size": np.full(len(flip), prepared.size, np.float32)}
    if store_format == "jpeg":
        inputs["start"] = np.stack([top, left], 1).astype(np.int32)
        inputs["shape"] = np.stack([height, width], 1).astype(np.int32)
    return inputs


def _device_of(images: Any) -> torch.device:
    return torch.device("cuda", images.device_id()) if "GPU" in type(images).__name__ else torch.device("cpu")
