"""Batches through DALI. The only module that imports it.

One thread reads samples from the store. Another thread runs DALI, which takes the arrays without a copy (``no_copy``).

===================  =========================================  ==============================================
samples              CPU                                        GPU
===================  =========================================  ==============================================
decoded uint8        crop -> resize -> flip, normalize          upload the crop -> the same on the GPU
JPEG                 decode only the crop -> the same           mixed decode of only the crop -> the same
===================  =========================================  ==============================================

DALI reads no files and draws no random numbers: `prepare` computes the crops, as for torch.
"""

import threading
from collections import deque
from collections.abc import Generator, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import fn, pipeline_def, types
from torch.utils.dlpack import from_dlpack

from lightning_sparse.data.config import ImageOptions
from lightning_sparse.data.decode import SampleReader, decode, orientation
from lightning_sparse.data.pipeline.images import Batch, PreparedBatch, prepare
from lightning_sparse.data.pipeline.loader import BatchRequest, prefetch_map

_SCAN, _APP1 = 0xDA, 0xE1  # markers of JPEG
_FRAMES = {0xC0, 0xC1, 0xC2}  # Huffman codes: sequential or progressive
_EXIF = b"\xff\xe1\0\x22Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0"  # up to the orientation
_PREFETCH = 2  # batches in each of the two queues: samples read, batches made


class DaliPipeline:
    """Makes batches with DALI. `batch_size` is the largest number of samples in a request; `device` None is the CPU."""

    def __init__(
        self,
        store: SampleReader,
        options: ImageOptions,
        *,
        batch_size: int,
        threads: int = 2,
        device: int | None = None,
    ) -> None:
        self._store, self._options = store, options
        self.prefetch_depth = 2 * _PREFETCH + 1  # the thread between the two queues holds one
        limits = {"batch_size": batch_size, "num_threads": threads, "device_id": device}
        self._pipe: Any = _graph(
            options, store.format, device is not None, **limits, prefetch_queue_depth=1, exec_dynamic=True
        )
        self._pipe.build()
        self._turn = threading.Lock()  # the thread of an iterator that was closed may still be at its last batch
        self._in_use: deque[PreparedBatch] = deque(maxlen=_PREFETCH + 1)  # uploads may continue after run() returns

    def run(self, requests: Iterable[BatchRequest]) -> Generator[Batch, None, None]:
        read = prefetch_map(self._read, requests, _PREFETCH, "reader")
        made = prefetch_map(self._run, read, _PREFETCH, "DALI")
        try:
            for images, labels in made:
                # in the consumer's thread: on a GPU this makes the consumer's stream wait for DALI's
                on_gpu = "GPU" in type(images).__name__
                device = torch.device("cuda", images.device_id()) if on_gpu else torch.device("cpu")
                yield from_dlpack(images.as_tensor()), labels.to(device, non_blocking=True)
        finally:
            made.close()

    def close(self) -> None:
        self._pipe = None
        self._in_use.clear()

    def _read(self, request: BatchRequest) -> PreparedBatch:
        prepared = prepare(self._store, request, self._options)
        if self._store.format == "decoded":
            return prepared._replace(images=crop_all(prepared))
        return prepared._replace(images=[readable_by_dali(image) for image in prepared.images])

    def _run(self, prepared: PreparedBatch) -> tuple[Any, torch.Tensor]:
        flip = prepared.crops.flip
        inputs = {"flip": flip.astype(np.int32), "size": np.full(len(flip), prepared.size, np.float32)}
        if self._store.format == "jpeg":  # decoded images are already cropped
            inputs |= _regions(prepared)
        try:
            with self._turn:
                self._in_use.append(prepared)
                (images,) = self._pipe.run(images=prepared.images, **inputs)
        except RuntimeError as error:
            raise RuntimeError(
                f"DALI failed on one of the samples {prepared.indices.tolist()} of the manifest. Use backend='torch' "
                f"or sample_format='decoded', which read all cached images. Error of DALI: {error}"
            ) from error
        return images, prepared.labels


@pipeline_def  # type: ignore[untyped-decorator]
def _graph(options: ImageOptions, store_format: str, on_gpu: bool) -> Any:
    size = _input("size", types.FLOAT, 0)
    if store_format == "jpeg":
        region = {"start": _input("start", types.INT32, 1), "shape": _input("shape", types.INT32, 1)}
        files = _input("images", types.UINT8, 1)
        device = "mixed" if on_gpu else "cpu"
        cut = fn.decoders.image_slice(files, device=device, output_type=types.RGB, axis_names="HW", **region)
        # first as the decoder of the cache resizes a whole image, so that both formats give the same pixels
        exact = {f"roi_{end}": _input(f"roi_{end}", types.FLOAT, 1) for end in ("start", "end")}
        cut = fn.resize(cut, size=_input("decoded", types.FLOAT, 1), antialias=True, **exact)
    else:
        cut = _input("images", types.UINT8, 3, layout="HWC")
        cut = cut.gpu() if on_gpu else cut
    resized = fn.resize(cut, resize_x=size, resize_y=size, antialias=True)
    return fn.crop_mirror_normalize(
        resized,
        mirror=_input("flip", types.INT32, 0),
        mean=[255 * value for value in options.mean],
        std=[255 * value for value in options.std],
        dtype=types.FLOAT,
        output_layout="CHW",
    )


def _input(name: str, dtype: Any, ndim: int, **options: Any) -> Any:
    return fn.external_source(name=name, no_copy=True, dtype=dtype, ndim=ndim, **options)


def crop_all(prepared: PreparedBatch) -> list[NDArray[np.uint8]]:
    """Return a copy of the crop of each decoded image."""
    # Faster than DALI's slice, and only the crop is uploaded to a GPU. A region of interest of the resize would use
    # pixels from outside the crop at its edges.
    crops = zip(*(crop.tolist() for crop in prepared.crops[:4]), strict=True)
    return [
        image[top : top + height, left : left + width].copy()
        for image, (top, left, height, width) in zip(prepared.images, crops, strict=True)
    ]


def readable_by_dali(file: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return JPEG files of one or three components, and all others (CMYK, GIF, PNG with a palette, ...) as PPM."""
    # a file that DALI cannot read would end its pipeline
    segments = jpeg_segments(file.data)
    frame = next((begin for kind, begin, _ in segments if kind in _FRAMES), None)
    if frame is None or file[frame + 9] not in (1, 3):
        pixels = decode(file.tobytes())
        header = f"P6\n{pixels.shape[1]} {pixels.shape[0]}\n255\n".encode()
        return np.concatenate([np.frombuffer(header, np.uint8), pixels.reshape(-1)])
    if all(kind != _APP1 for kind, *_ in segments):
        return file
    # DALI finds the orientation in other places than Pillow: one EXIF block with Pillow's orientation replaces all
    # others
    parts = [file[begin:end] for kind, begin, end in segments if kind != _APP1]
    block = np.frombuffer(_EXIF + bytes([orientation(file.tobytes()), 0, 0, 0, 0, 0, 0]), np.uint8)
    return np.concatenate([file[:2], block, *parts, file[segments[-1][2] :]])


def jpeg_segments(file: memoryview) -> list[tuple[int, int, int]]:
    """Return (marker, begin, end) of the segments of a JPEG up to its first scan; [] if it is not a sound JPEG."""
    segments: list[tuple[int, int, int]] = []
    position = 2 if bytes(file[:2]) == b"\xff\xd8" else len(file)
    while position + 10 <= len(file) and file[position] == 0xFF:
        kind = file[position + 1]
        if kind == 0xFF:  # fills a gap
            position += 1
            continue
        if kind == _SCAN:
            return segments
        if kind < 0xC0 or 0xD0 <= kind < _SCAN:  # a marker that no header has
            return []
        end = position + 2 + int.from_bytes(file[position + 2 : position + 4], "big")
        segments.append((kind, position, end))
        position = end
    return []


def _regions(prepared: PreparedBatch) -> dict[str, Any]:
    # The pixels of each file that its crop at the short side depends on, and the position of the crop in them.
    top, left, height, width, _ = prepared.crops
    scale, shape = np.stack(prepared.scale, 1), np.stack([height, width], 1)
    begin = np.stack([top, left], 1) * scale
    end, around = begin + shape * scale, np.ceil(scale)  # resizing blends pixels up to `scale` away
    first = np.maximum(np.floor(begin - around), 0)
    last = np.minimum(np.ceil(end + around), np.stack(prepared.sizes, 1))
    return {
        "start": first.astype(np.int32),
        "shape": (last - first).astype(np.int32),
        "roi_start": (begin - first).astype(np.float32),
        "roi_end": (end - first).astype(np.float32),
        "decoded": shape.astype(np.float32),
    }
