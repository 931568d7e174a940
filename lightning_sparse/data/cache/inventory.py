"""List and remove the caches in a folder: `lightning-sparse cache info` and `cache clear`."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from lightning_sparse.data.cache.disk import DiskCache
from lightning_sparse.data.cache.folders import VERSION, source_name
from lightning_sparse.data.cache.manifest import listed_splits
from lightning_sparse.data.config import DataError

_FOLDER = re.compile(r"v(\d+)-[0-9a-f]{16}")


@dataclass(frozen=True)
class CachedSource:
    """The cache of a source. splits: (name, cached files, listed files, bytes); empty if of another version."""

    folder: Path
    source: str
    version: int
    splits: tuple[tuple[str, int, int, int], ...] = ()

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*") if path.is_file())

    def describe(self) -> str:
        other = "" if self.version == VERSION else f" (version {self.version}, which this version does not use)"
        lines = [f"{self.source}{other}: {self.bytes / 1e9:,.2f} GB in {self.folder}"]
        for split, kept, listed, nbytes in self.splits:
            lines.append(f"  {split}: {kept:,} of {listed:,} files, {nbytes / 1e9:,.2f} GB")
        return "\n".join(lines)


def caches(cache_dir: str) -> list[CachedSource]:
    """Return the caches of all sources and versions.

    Raises:
        ValueError: if there is no such folder.
    """
    root = Path(cache_dir)
    if not root.is_dir():
        raise ValueError(f"cache_dir={root} is not a folder. Give the cache_dir of your runs.")
    found = []
    for folder in sorted(root.iterdir()):
        match = _FOLDER.fullmatch(folder.name)
        if match is None or folder.is_symlink() or not (folder / "cache.json").is_file():
            continue
        version = int(match[1])
        try:
            source = str(json.loads((folder / "cache.json").read_text())["source"])
        except (OSError, ValueError, KeyError, TypeError):
            source = "an unknown source (its cache.json is corrupt)"
        splits = _splits(folder) if version == VERSION else ()
        found.append(CachedSource(folder, source, version, splits))
    return found


def clear(cache_dir: str, source: str | None = None) -> list[CachedSource]:
    """Remove the cache of a source, or of all sources; return what was removed. Running jobs keep their open files.

    Raises:
        ValueError: if there is no such folder.
    """
    removed = [each for each in caches(cache_dir) if source is None or each.source == source_name(source)]
    for each in removed:
        shutil.rmtree(each.folder)
    return removed


def _splits(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    rows = []
    for split, files in listed_splits(folder).items():
        store = folder / f"{split}.lmdb"
        kept, nbytes = 0, 0
        try:
            if store.is_dir():
                disk = DiskCache(store)
                kept, nbytes = disk.entries(), disk.bytes()
                disk.close()
        except DataError:
            continue  # corrupt; the run that uses it reports it
        rows.append((split, kept, files, nbytes))
    return tuple(rows)
