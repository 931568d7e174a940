"""The form of a listing, the rules for its names, and the error of an unreadable file, for folders and URLs."""

from __future__ import annotations

from collections.abc import Callable

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
PROGRESS_S = 1.0


class UnreadableFileError(Exception):
    """The file cannot be read, now or later."""


Listing = tuple[list[tuple[str, int, int, int]], list[tuple[str, int]], list[str]]
"""(Path relative to the root, size, mtime in ns, tag) of files; (path, stamp) of folders; paths of ignored
files. Unknown sizes are -1, and other unknown values are 0. Tag and stamp change when a path leads to another file or
folder, even of equal size and time."""


def whole_part(data: bytes, first: int, last: int) -> bytes:
    """Return the data. Raise UnreadableFileError if it does not have the length of the requested part."""
    if len(data) != last - first:
        raise UnreadableFileError(
            f"storage returned {len(data):,} bytes for bytes {first:,} to {last:,}. If the file has become shorter, "
            "run `lightning-sparse cache warm` to list the source again. Otherwise its server cannot send parts of "
            "files"
        )
    return data


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def is_label(name: str) -> bool:
    return name.lower().endswith(".cls")


def is_visible(name: str) -> bool:
    return not name.startswith(".")


FILTERS: dict[str, Callable[[str], bool]] = {
    "here": lambda name: True,  # all files in the folder; the others: below it
    "visible": is_visible,
    "images": lambda name: is_visible(name) and is_image(name),
}
"""Which files are listed, by their names. Hidden folders are not."""
