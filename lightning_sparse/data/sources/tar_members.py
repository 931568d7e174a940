"""Reads the members of a tar file, from its headers."""

from __future__ import annotations

import contextlib
import posixpath
import tarfile
import time
import zlib
from collections.abc import Callable
from typing import Any

from lightning_sparse.data.sources.storage_base import PROGRESS_S, UnreadableFileError, is_label, is_visible

MAX_LABEL_BYTES = 64  # of a member that is a label: `.cls`
MAX_LINKS = 40  # links that are followed from member to member; Linux follows as many between files

Member = tuple[str, int, int, str, int, int]
"""(Name, offset, size, contents of a ``.cls`` member, size and CRC-32 of its headers) of a file in a tar file. The
offset is that of the contents, which follow the headers. For a sparse member, whose contents are in pieces, the offset
is -1 minus that of the headers, and the size of the headers is 0."""


def members(file: Any, progress: Callable[[], None]) -> tuple[list[Member], list[str]]:
    """Return the members of a tar file, from its headers, and the names of ignored members: hidden members and devices.

    A link stands for the member that it leads to. Raise UnreadableFileError if the file is incomplete or compressed.
    """
    members: list[Member] = []
    links: list[tuple[int, str, str]] = []  # place in `members`, name, target
    ignored: list[str] = []
    last_report = time.monotonic()
    try:
        with file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                name = _member_name(member.name)
                if not all(map(is_visible, name.split("/"))):
                    ignored.append(name)
                elif member.islnk() or member.issym():
                    folder = "" if member.islnk() else posixpath.dirname(member.name)
                    target = posixpath.normpath(posixpath.join(folder, member.linkname))
                    links.append((len(members), name, target))
                    members.append((name, 0, 0, "", 0, 0))
                elif member.isreg():
                    is_short_label = is_label(name) and member.size <= MAX_LABEL_BYTES
                    stream = tar.extractfile(member) if is_short_label else None
                    label = stream.read().decode("ascii", "replace").strip() if stream else ""
                    file.seek(member.offset)  # tarfile finds the next header by itself
                    header = b"" if member.issparse() else file.read(member.offset_data - member.offset)
                    offset = -1 - member.offset if member.issparse() else member.offset_data
                    members.append((name, offset, member.size, label, len(header), zlib.crc32(header)))
                elif not member.isdir():
                    ignored.append(name)
                if time.monotonic() - last_report >= PROGRESS_S:
                    progress()
                    last_report = time.monotonic()
            check_end(file, tar.offset)
    except tarfile.TarError as error:
        raise UnreadableFileError(f"it is not an uncompressed tar file: {error}") from error
    _follow(members, links)
    return members, ignored


def _member_name(name: str) -> str:
    # `tar -C FOLDER .` puts ./ before each name
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    return "" if name == "." else name


def sparse_member(file: Any, offset: int) -> bytes:
    """Return the contents of a sparse member of a tar file, whose header is at `offset`."""
    with file, contextlib.suppress(tarfile.TarError):
        file.seek(offset)
        tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115  # closes nothing but the file
        member = tar.next()
        stream = None if member is None else tar.extractfile(member)
        if stream is not None:
            data: bytes = stream.read()
            return data
    raise UnreadableFileError(f"it has changed: there is no member at byte {offset:,}")


def _follow(found: list[Member], links: list[tuple[int, str, str]]) -> None:
    targets = {name: target for _, name, target in links}
    about = {member[0]: member[1:] for member in found if member[0] not in targets}
    for place, name, target in links:
        for _ in range(MAX_LINKS):  # a link may lead to another link
            target = targets.get(target, target)
        if target not in about:
            raise UnreadableFileError(f"its member {name} is a link to {target}, which is not a file in it")
        found[place] = (name, *about[target])


def check_end(file: Any, offset: int) -> None:
    """Raise UnreadableFileError unless only zeros follow the last member: tarfile ends at a damaged header."""
    file.seek(offset)
    while part := file.read(1 << 20):
        if any(part):
            raise UnreadableFileError(
                f"it has data after its end, at byte {offset:,}: either it is damaged there, or several files were "
                "joined. Write it again"
            )
