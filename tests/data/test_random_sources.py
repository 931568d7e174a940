"""Random folders, archives and tables give the samples and labels of torchvision, tarfile, pyarrow and pandas.

The sources are on a local disk, behind fsspec, on sshfs and on S3. ``SOURCES_INPUTS`` sets the number of inputs of each
kind, ``SOURCES_SEED`` the first seed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import random
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from lightning_sparse.data.config import CacheConfig, DataError
from lightning_sparse.data.sources.labels import columns_of_csv, numbered
from lightning_sparse.data.sources.layout import Split
from lightning_sparse.data.sources.listing import find_layout
from lightning_sparse.data.sources.manifest import Manifest
from lightning_sparse.data.sources.storage import Storage, StoredFile
from lightning_sparse.flavours.pytorch_lightning import TokenDataModule
from tests.data.test_token_corpora import MODES, random_files
from tests.data.test_token_corpora import write as write_tokens
from tests.helpers.data import needs_s3, s3_server, sshfs_mount, tar_of, upload, write

T = TypeVar("T")
INPUTS = int(os.environ.get("SOURCES_INPUTS", "25"))
SEED = int(os.environ.get("SOURCES_SEED", "0"))
NAMES = ["a", "B", "c d", "10", "9", "ä", "#1", "a-b", "a.b", "猫", "x%20", "it's", "A", "_", "[z]", "a&b", "~", "e+f"]
IMAGES = [".jpg", ".JPG", ".jpeg", ".Png", ".ppm", ".bmp", ".PGM", ".tif", ".TIFF", ".webp"]
OTHERS = [".gif", ".jpg.gz", ".txt", "", ".json", ".xml", ".jpgx", ".JPG.bak"]
HIDDEN = ["._a.jpg", ".DS_Store", ".x.png"]
pytestmark = pytest.mark.timeout(3600 if "SOURCES_INPUTS" in os.environ else 300)


def inputs(kind: str) -> Iterator[random.Random]:
    return (random.Random(f"{kind} {SEED + number}") for number in range(INPUTS))


def listed(storage: Storage, config: CacheConfig, name: str) -> Manifest:
    """List a split with a reader that all inputs share."""
    split = Split(config, name, 60.0, quiet=True)
    split.storage = storage
    return find_layout(split).manifest()


def attempt(call: Callable[[], T]) -> tuple[T | None, str]:
    """Return (result, ""), or (None, the error)."""
    try:
        return call(), ""
    except ValueError as error:
        return None, str(error)


def contents(storage: Storage, manifest: Manifest) -> dict[str, bytes]:
    found = {}
    answers = storage.read([manifest.location(number) for number in range(len(manifest))])
    for path, answer in zip(manifest.paths, answers, strict=True):
        assert isinstance(answer, StoredFile), (path, answer)
        found[path] = answer.data
    return found


def config_of(source: Path | str, **more: Any) -> CacheConfig:
    return CacheConfig(source=str(source), cache_dir="none", **{"format": "bytes", **more})


# -- folders -----------------------------------------------------------------------------------------------------------


def grow(draw: random.Random, folder: Path, depth: int, links: bool) -> None:
    """Fill a folder with images, other files, hidden files, links and folders. `links`: also link to folders."""
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(draw.randrange(5)):
        suffixes = draw.choice([IMAGES, IMAGES, OTHERS])
        (folder / f"{draw.choice(NAMES)}{draw.choice(suffixes)}").write_bytes(draw.randbytes(draw.randrange(5)))
    for name in draw.sample(HIDDEN, draw.randrange(2)):
        (folder / name).write_bytes(b"hidden")
    if draw.random() < 0.2:
        (folder / ".git").mkdir(exist_ok=True)
        (folder / ".git" / "1.jpg").write_bytes(b"hidden")
    files = [each for each in folder.iterdir() if each.is_file()]
    if files and draw.random() < 0.3:
        link(folder / f"link{draw.choice(IMAGES)}", draw.choice(files))
    for name in draw.sample(NAMES, draw.randrange(3) if depth else 0):
        if not (folder / name).exists():
            grow(draw, folder / name, depth - 1, links)
    folders = [each for each in folder.iterdir() if each.is_dir()]
    if folders and links and draw.random() < 0.2:
        link(folder / "linked", draw.choice(folders))


def link(path: Path, target: Path) -> None:
    if not path.exists():
        path.symlink_to(os.path.relpath(target, path.parent))  # sshfs refuses links that leave the mount


def image_folder(split: Path) -> dict[str, str]:
    """Return path -> class of torchvision's ImageFolder, without hidden files and folders."""
    from torchvision.datasets import ImageFolder

    reference = ImageFolder(str(split), allow_empty=True)
    paths = ((PurePosixPath(path).relative_to(split), label) for path, label in reference.samples)
    return {
        f"{split.name}/{path}": reference.classes[label]
        for path, label in paths
        if not any(part.startswith(".") for part in path.parts)
    }


@pytest.fixture(
    params=["local", "file", pytest.param("sshfs", marks=pytest.mark.sshfs), pytest.param("s3", marks=needs_s3)]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str, dict[str, Any], Any]]:
    """Yield a folder, its source, storage_options, and the file system of S3, to which each split is copied."""
    kind, here = request.param, tmp_path / "here"
    write(here / "not empty")
    with contextlib.ExitStack() as stack:
        if kind == "s3":
            options, files = stack.enter_context(s3_server())
            bucket = f"folders{len(files.ls(''))}"  # servers of one process share their buckets
            files.mkdir(bucket)
            yield here, f"s3://{bucket}", options, files
        elif kind == "sshfs":
            stack.enter_context(sshfs_mount(here, tmp_path / "there"))
            yield here, str(tmp_path / "there"), {}, None
        else:
            yield here, f"{'simplecache::file://' if kind == 'file' else ''}{here}", {}, None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_folders_give_the_samples_and_labels_of_torchvision(place: tuple[Path, str, dict[str, Any], Any]) -> None:
    pytest.importorskip("torchvision", reason="it is the reference")
    here, source, options, files = place
    refused = 0
    with Storage(config_of(source, storage_options=options or None), timeout=60.0) as storage:
        for number, draw in enumerate(inputs("folders")):
            split = here / f"split{number}"
            classes = draw.sample(NAMES, draw.randint(1, 4))
            for name in classes:
                grow(draw, split / name, 2, links="://" not in source)  # fsspec leaves out links to folders
            for name in draw.sample([*OTHERS, "a.jpg"], draw.randrange(2)):
                (split / f"next{name}").write_bytes(b"no sample")
            if files is not None:
                upload(files, split, f"{source}/{split.name}")
            expected = image_folder(split)
            if {*expected.values()} != {*classes} or too_deep(split, expected):
                refused += 1
                with pytest.raises(ValueError, match="contains no images|would be the only class"):
                    list_images(storage, source, options, split)
                continue
            manifest = list_images(storage, source, options, split)
            labels = [manifest.classes[label] for label in manifest.labels.tolist()]
            assert manifest.classes == tuple(sorted(classes)), split
            assert dict(zip(manifest.paths, labels, strict=True)) == expected, split
            assert contents(storage, manifest) == {path: (here / path).read_bytes() for path in expected}
    assert refused < 0.9 * INPUTS


def list_images(storage: Storage, source: str, options: dict[str, Any], split: Path) -> Manifest:
    config = config_of(source, format="jpeg", storage_options=options or None)
    asked = Split(config, split.name, 60.0, quiet=True)
    asked.storage = storage
    asked.probed = lambda files: np.zeros((0, 3), np.int64)  # type: ignore[method-assign]  # the files are not real images
    return find_layout(asked).manifest()


def too_deep(split: Path, expected: dict[str, str]) -> bool:
    """Return whether the only class contains only folders of images, which are then probably the classes."""
    folders = {path.rpartition("/")[0] for path in expected}
    only = {*expected.values()}
    return len(only) == 1 and len(folders) > 1 and f"{split.name}/{min(only)}" not in folders


# -- archives ----------------------------------------------------------------------------------------------------------


def make_tar(draw: random.Random, file: Path) -> None:
    """Write a tar file of samples ``*.bin``, with folders, links, hidden members and names of any length."""
    prefix = draw.choice(["", "", "./"])
    with tarfile.open(
        file, "w", format=draw.choice([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    ) as tar:
        files: list[str] = []
        for number in range(draw.randrange(1, 8)):
            long = "deep/" * draw.choice([0, 1, 15, 40]) if tar.format != tarfile.USTAR_FORMAT else "d/"
            folder = draw.choice(["", "", "k/", long])
            about = tarfile.TarInfo(f"{prefix}{folder}{draw.choice(['s', 'ä', 'x y'])}{number}.bin")
            kind = draw.random()
            if kind < 0.12:
                about.name = f"{prefix}{folder}._{number}.bin"
            elif kind < 0.2:
                about.name, about.type = f"{prefix}{folder or 'folder'}", tarfile.DIRTYPE
            elif kind < 0.3 and files:
                about.type, about.linkname = tarfile.LNKTYPE, draw.choice(files)
            elif kind < 0.4 and files:
                about.type, target = tarfile.SYMTYPE, draw.choice(files)
                about.linkname = os.path.relpath(target, os.path.dirname(about.name) or ".")
            data = draw.randbytes(draw.choice([0, 1, 511, 512, 513, 2000])) if about.isreg() else b""
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
            if about.isreg() and "._" not in about.name:
                files.append(about.name)


def tar_contents(file: Path) -> dict[str, bytes]:
    """Return the visible files of a tar file as tarfile reads them."""
    found = {}
    with tarfile.open(file) as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            if not member.isdir() and not any(part.startswith(".") for part in name.split("/")):
                stream = tar.extractfile(member)
                assert stream is not None
                found[name] = stream.read()
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("damaged", [False, True])
def test_shards_give_the_members_that_tarfile_reads(
    place: tuple[Path, str, dict[str, Any], Any], damaged: bool
) -> None:
    """A shard that is cut, or has damaged headers, is refused unless all members are read."""
    here, source, options, files = place
    config, refused = config_of(source, storage_options=options or None), 0
    with Storage(config, timeout=60.0) as storage:
        for number, draw in enumerate(inputs("shards")):
            split = here / f"split{number}"
            split.mkdir()
            for name in draw.sample(["stats.json", "README", "0.idx", "0.parquet", ".hidden"], 2):
                (split / name).write_bytes(b"{}")
            shards = [split / f"{shard}{draw.choice(['.tar', '.TAR'])}" for shard in range(draw.randint(1, 2))]
            for shard in shards:
                make_tar(draw, shard)
            if not any(each.name in ("0.tar",) for each in shards):
                (split / "0.parquet").unlink(missing_ok=True)
            expected = {
                f"{split.name}/{shard.name}/{name}": data
                for shard in shards
                for name, data in tar_contents(shard).items()
            }
            if damaged:
                damage(draw, shards[-1])
            if files is not None:
                upload(files, split, f"{source}/{split.name}")
            manifest, refusal = attempt(partial(listed, storage, config, split.name))
            if manifest is None:
                assert damaged or not expected, (split, refusal)
                refused += 1
                continue
            assert contents(storage, manifest) == expected, split
    assert refused <= 0.2 * INPUTS or damaged


def damage(draw: random.Random, file: Path) -> None:
    """Cut a tar file anywhere before its end, or change a header that has a checksum."""
    with tarfile.open(file) as tar:
        headers = [member.offset for member in tar]
        end = tar.offset
    data = bytearray(file.read_bytes())
    if draw.random() < 0.5:
        cut = draw.randrange(1, end)
        del data[cut + (cut % 512 == 0) :]  # tarfile accepts a file that ends after a member
    else:
        data[draw.choice(headers) + draw.randrange(0, 100)] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "zip"])
def test_archives_read_by_many_threads_give_the_right_bytes(tmp_path: Path, kind: str) -> None:
    for number, draw in enumerate([*inputs(f"archives {kind}")][: max(2, INPUTS // 20)]):
        file, prefix = tmp_path / f"{number}.{kind}", draw.choice(["", "./"]) if kind != "zip" else ""
        names = [f"train/{draw.choice('ab')}/{each}.bin" for each in range(120)]
        files = {name: draw.randbytes(draw.randrange(1, 4000)) for name in names}
        archive(file, kind, {f"{prefix}{name}": data for name, data in files.items()})
        config = config_of(f"{kind.partition('.')[0]}://::file://{file}")
        with Storage(config, timeout=60.0, readers=8) as storage:
            assert contents(storage, listed(storage, config, "train")) == files


def archive(file: Path, kind: str, files: dict[str, bytes]) -> None:
    if kind != "zip":
        file.write_bytes(tar_of(files, "w:gz" if kind == "tar.gz" else "w"))
        return
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in files.items():
            packed.writestr(name, data)


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_windows_of_random_token_files_are_equal_on_all_storage_kinds(
    place: tuple[Path, str, dict[str, Any], Any], tmp_path: Path
) -> None:
    here, source, options, files = place
    complete = 0
    for seed in range(SEED, SEED + max(4, INPUTS // 10)):
        rng = np.random.default_rng([seed, 11])
        folder = write_tokens(here / f"tokens{seed}", random_files(rng), rng)
        about = min(folder.rglob("*.json"))
        wrong = ({"vocab_size": 3}, {"checksum": 7})[seed % 2] if seed % 4 > 1 else {}
        about.write_text(json.dumps({**json.loads(about.read_text()), **wrong}))
        if files is not None:
            upload(files, folder, f"{source}/{folder.name}")
        windows = {"context": int(rng.integers(1, 7)), "documents": MODES[seed % 3]}
        expected = windows_of(folder, **windows)
        cache = {"cache_dir": str(tmp_path / f"cache{seed}"), "storage_options": options or None}
        assert "checksum" not in wrong or expected is None, folder
        assert windows_of(f"{source}/{folder.name}", **windows, **cache) == expected, folder
        complete += expected is not None
    assert complete


def windows_of(source: Path | str, **options: Any) -> Any:
    """Return the batches of an epoch, or None if the source is refused."""
    try:
        data = TokenDataModule(source, batch_size=3, **options)
        data.setup("fit")
    except (ValueError, DataError):
        return None
    try:
        return [[each.tolist() for each in batch] for batch in data.train_dataloader()]
    except DataError:
        return None
    finally:
        data.teardown("fit")


# -- tables ------------------------------------------------------------------------------------------------------------

VALUES: list[Callable[[random.Random], str]] = [
    lambda draw: str(draw.randrange(-5, 30)),
    lambda draw: str(draw.choice([draw.getrandbits(70), draw.getrandbits(63), -draw.getrandbits(63)])),
    lambda draw: repr(draw.uniform(-3, 3)),
    lambda draw: f"{draw.randrange(99)}{draw.choice(['.', '.0', 'e1', 'E-2', '.50', 'e400', '_0', 'd'])}",
    lambda draw: draw.choice(["True", "False", "TRUE", "false"]),
    lambda draw: draw.choice(["cat", "dog", "Cat", "ä", "a,b", 'a"b', "a b", "猫", "x1", "-", "½", "two\nlines"]),
    lambda draw: draw.choice(["NA", "", "nan", "null", "inf", "-Infinity", "N/A", "#NA"]),
    lambda draw: draw.choice(["007", "00.5", "+3", "-0", "--1", "1e", "e5", "0"]),
]


def random_column(draw: random.Random, rows: int) -> list[str]:
    kinds = draw.choices(VALUES, weights=[4, 1, 3, 2, 1, 4, 1, 1], k=1 if draw.random() < 0.8 else 2)
    spaces = draw.choice(["", "", "", "", "", " "])
    return [f"{spaces}{draw.choice(kinds)(draw)}{draw.choice(['', spaces])}" for _ in range(rows)]


def random_csv(draw: random.Random) -> bytes:
    rows, columns = draw.randint(1, 8), draw.randint(1, 2)
    names = [f"{draw.choice(['', ' '])}c{number}" for number in range(columns)]
    table = [["path", *names], *zip(*[[f"{row}.bin" for row in range(rows)]], strict=True)]
    labels = [random_column(draw, rows) for _ in range(columns)]
    table[1:] = [[f"{row}.bin", *(column[row] for column in labels)] for row in range(rows)]
    quote = draw.random() < 0.2

    def cell(text: str) -> str:
        return '"' + text.replace('"', '""') + '"' if quote or any(each in text for each in ',"\n') else text

    end = draw.choice(["\n", "\r\n"])
    text = end.join(",".join(map(cell, row)) for row in table) + draw.choice(["", end, end + end])
    return draw.choice([b"", b"\xef\xbb\xbf"]) + text.encode()


def numbers_of(values: list[Any]) -> tuple[npt.NDArray[Any] | None, tuple[str, ...]]:
    """Return typed values as numbers or names; None if a value is missing."""
    if any(value is None or value != value for value in values):
        return None, ()
    if all(isinstance(value, str) for value in values):
        names = sorted({*values})
        return np.array([names.index(value) for value in values], np.float64), tuple(names)
    return np.array([float(value) for value in values], np.float64), ()


def of_pyarrow(data: bytes) -> list[list[Any]]:
    csv = pytest.importorskip("pyarrow.csv", reason="it is the reference")
    table = csv.read_csv(io.BytesIO(data), parse_options=csv.ParseOptions(newlines_in_values=True))
    return [column.to_pylist() for column in table.columns][1:]


def of_pandas(data: bytes) -> list[list[Any]]:
    pandas = pytest.importorskip("pandas", reason="it is the reference")
    table = pandas.read_csv(io.BytesIO(data))
    return [table[name].tolist() for name in table.columns][1:]


def labels_of(data: bytes) -> tuple[Sequence[str], npt.NDArray[Any], tuple[str, ...]]:
    columns = columns_of_csv("train.csv", data)
    paths = columns.pop("path")
    return (paths, *numbered("train.csv", columns, text=True))


@pytest.mark.parametrize("reference", [of_pyarrow, of_pandas])
def test_labels_of_random_tables_equal_the_reference_or_are_refused(reference: Any) -> None:
    accepted = 0
    for number, draw in enumerate(inputs("tables")):
        data = random_csv(draw)
        expected = [numbers_of(values) for values in reference(data)]
        found, refusal = attempt(partial(labels_of, data))
        if found is None:
            assert "train.csv" in refusal, (number, data)
            continue
        accepted += 1
        paths, labels, names = found
        assert list(paths) == [f"{row}.bin" for row in range(len(paths))], (number, data)
        for column, (array, classes) in enumerate(expected):
            assert array is not None, (number, data, "a value is missing")
            np.testing.assert_array_equal(labels[:, column], array, err_msg=f"{number} {data!r}")
            assert names == classes or column, (number, data)
    assert accepted > 0.15 * INPUTS


def typed_column(draw: random.Random, rows: int, width: int) -> tuple[list[Any], Any, int]:
    """Return values, their type, and the number of label columns, or 0 if they are refused."""
    import pyarrow

    one, kind, expected = draw.choice(
        [
            (lambda: draw.randrange(9), pyarrow.int64(), 1),
            (draw.random, pyarrow.float32(), 1),
            (lambda: draw.choice("ab"), pyarrow.string(), 1),
            (lambda: draw.random() < 0.5, pyarrow.bool_(), 1),
            (lambda: [draw.randrange(2) for _ in range(width)], pyarrow.list_(pyarrow.int8()), width),
            (lambda: [draw.random() for _ in range(width)], pyarrow.list_(pyarrow.float64()), width),
            (lambda: [1] * draw.randint(1, 2), pyarrow.list_(pyarrow.int64()), 0),
            (lambda: draw.choice([None, 1]), pyarrow.int64(), 0),
            (lambda: draw.choice(["1", "10"]), pyarrow.string(), 0),
            (lambda: draw.choice([2**63, 2**64 - 1]), pyarrow.uint64(), 0),
            (lambda: draw.choice([float("nan"), 1.0]), pyarrow.float64(), 0),
        ]
    )
    return [one() for _ in range(rows)], kind, expected


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_label_column_of_parquet_is_read_by_type(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    with Storage(config_of(tmp_path), timeout=60.0) as storage:
        for number, draw in enumerate(inputs("parquet")):
            rows, width = draw.randint(1, 6), draw.randint(1, 4)
            values, kind, expected = typed_column(draw, rows, width)
            (tmp_path / f"s{number}").mkdir()
            table = {"x": pyarrow.array([b"x"] * rows), "label": pyarrow.array(values, kind)}
            parquet.write_table(pyarrow.table(table), tmp_path / f"s{number}" / "0.parquet")
            manifest, refusal = attempt(partial(listed, storage, config_of(tmp_path), f"s{number}"))
            if manifest is None:
                assert "column label, sample" in refusal, (number, values)
                assert not expected, (number, values, refusal)
                continue
            is_list = isinstance(values[0], list) and expected
            assert manifest.labels.shape == (rows, width if is_list else manifest.label_columns)
            if manifest.classes:
                assert [manifest.classes[label] for label in manifest.labels[:, 0]] == values
            else:
                read = np.array(table["label"].to_pylist(), np.float64).reshape(rows, -1)
                np.testing.assert_array_equal(manifest.labels, read)
