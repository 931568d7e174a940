"""WebDataset shards: members are found once and read by their place, on a mount and in a fake S3."""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse.data.cache.store import SampleStore
from lightning_sparse.data.config import CacheConfig, CorruptSampleError, DataError
from lightning_sparse.data.sources.listing import classes_of, has_split, load_or_list
from lightning_sparse.data.sources.manifest import Manifest
from lightning_sparse.data.sources.storage import Storage, Unreadable
from tests.data.fits import PACKAGES, ours
from tests.helpers.data import bytes_of, jpeg, needs_s3, read, s3_server, tar_of, upload, write


def shard(path: Path, members: dict[str, bytes], **links: tuple[bytes, str]) -> None:
    write(path, tar_of(members, **links))


def payload(number: int) -> bytes:
    return f"{number:03} ".encode() * (100 + number)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create two shards of four samples. Names of over 100 bytes need an additional header."""
    for number in range(2):
        members: dict[str, bytes] = {}
        for sample in range(4 * number, 4 * number + 4):
            name = f"{'deep/' * 30 * (sample == 5)}{sample:06}"
            members |= {f"{name}.npy": payload(sample), f"{name}.cls": f"{sample % 3}\n".encode()}
        shard(tmp_path / "source" / "train" / f"{number:03}#{number}.tar", members)
    return tmp_path / "source"


def test_samples_of_shards_are_read_by_their_place(folder: Path, tmp_path: Path) -> None:
    config = bytes_of(folder)
    manifest, data, counts = read(config)
    assert data == [payload(number) for number in range(8)]
    assert manifest.labels.tolist() == [[number % 3] for number in range(8)]
    assert list(manifest.paths)[0] == "train/000#0.tar/000000.npy"
    assert classes_of(config, "train")[1] == manifest.num_classes == 3
    assert counts.storage_bytes == sum(map(len, data)), "only the samples, not the shards, are transferred"
    assert counts.changed == 0
    assert Manifest.load(manifest.to_bytes()).location(7) == manifest.location(7)
    _, again, counts = read(config)
    assert again == data
    assert (counts.storage_samples, counts.disk_samples) == (0, 8)


def test_shards_of_images_serve_the_image_module(tmp_path: Path) -> None:
    for split, count in (("train", 6), ("test", 2)):
        members = {}
        for n in range(count):
            members |= {f"{n}.jpg": jpeg(n), f"{n}.json": b"{}", f"{n}.cls": str(n % 2).encode()}
        shard(tmp_path / "source" / split / "0.tar", members)
    data = ours(PACKAGES[0]).CachedImageDataModule(
        str(tmp_path / "source"), str(tmp_path / "cache"), 6, 16, memory_gb=0.01, with_indices=True, backend="torch"
    )
    data.setup("fit")
    ((images, labels, indices),) = list(data.train_dataloader())
    data.teardown("fit")
    assert images.shape == (6, 3, 16, 16)
    assert labels.tolist() == [index % 2 for index in indices.tolist()]
    assert has_split(data._options.cache, "test")
    assert not has_split(data._options.cache, "val")


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"a.npy": b"a", "a.txt": b"b"}, r"sample 'a' has the members a\.npy, a\.txt, of which 2 can be the sample"),
        ({"a.cls": b"1"}, "of which 0 can be the sample"),
        ({"a.npy": b"a", "a.cls": b"1", "b.npy": b"b"}, r"0\.tar/b\.npy has no \.cls member"),
        ({"a.npy": b"a", "a.cls": b"cat"}, r"a \.cls member .* is not a whole number"),
        ({"a.npy": b"a", "a.cls": b"9" * 20}, r"a \.cls member .* is not a whole number"),
        (
            {"a.npy": b"a", "a.fine.cls": b"1", "a.coarse.cls": b"0"},
            r"sample 'a' has 2 labels: a\.fine\.cls, a\.coarse\.cls",
        ),
        ({}, "contain no samples"),
    ],
)
def test_shard_without_samples_is_refused_with_the_reason(tmp_path: Path, members: dict[str, bytes], says: str) -> None:
    shard(tmp_path / "source" / "train" / "0.tar", members)
    with pytest.raises(ValueError, match=says):
        read(bytes_of(tmp_path / "source"))


def test_member_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "source" / "train" / "0.tar"
    shard(file, {"a.npy": b"a"})
    with tarfile.open(file, "a") as tar:
        tar.addfile(tarfile.TarInfo("a.npy"))
    with pytest.raises(ValueError, match=r"train/0\.tar: the member a\.npy occurs 2 times"):
        read(bytes_of(tmp_path / "source"))


@pytest.mark.parametrize(
    ("members", "member", "labels"),
    [
        ({"a.seg.npy": b"s", "a.txt": b"t"}, "seg.npy", [[]]),
        ({"a.NPY": b"s", "a.CLS": b"3", "a.txt": b"t"}, "npy", [[3]]),
    ],
)
def test_member_that_is_the_sample_can_be_chosen(
    tmp_path: Path, members: dict[str, bytes], member: str, labels: list[list[int]]
) -> None:
    shard(tmp_path / "source" / "train" / "0.TAR", members)
    manifest, data, _ = read(bytes_of(tmp_path / "source", member=member))
    assert (data, manifest.labels.tolist()) == ([b"s"], labels)


@pytest.fixture
def s3(folder: Path) -> Iterator[dict[str, Any]]:
    """Create a bucket with the shards and with folders of images. Yields storage_options."""
    with s3_server() as (options, files):
        files.mkdir("shards")
        upload(files, folder, "shards")
        for number in range(6):
            files.pipe_file(f"shards/pictures/train/c{number % 2}/{number}.jpg", jpeg(number))
        yield options


@needs_s3
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_shards_and_images_in_s3_equal_local_files(folder: Path, tmp_path: Path, s3: dict[str, Any]) -> None:
    manifest, data, counts = read(bytes_of("s3://shards", tmp_path / "cache", storage_options=s3))
    local, expected, _ = read(bytes_of(folder, tmp_path / "other"))
    assert data == expected
    assert counts.storage_bytes == sum(map(len, data))
    assert manifest.offsets.tolist() == local.offsets.tolist()
    images = bytes_of("s3://shards/pictures", tmp_path / "cache", storage_options=s3, format="jpeg")
    manifest, data, _ = read(images)
    assert manifest.classes == ("c0", "c1")
    assert data == [jpeg(number) for number in (0, 2, 4, 1, 3, 5)]


def test_s3_without_s3fs_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    if importlib.util.find_spec("s3fs"):
        monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(ValueError, match="needs a package that is not installed: Install s3fs to access S3"):
        bytes_of("s3://bucket/folder", tmp_path / "cache")
    assert not os.path.exists(tmp_path / "cache")


@pytest.mark.parametrize("format", ["bytes", "jpeg"])
def test_files_next_to_shards_are_ignored_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    """img2dataset, WebDataset and users leave such files."""
    for number in range(2):
        shard(tmp_path / "source" / "train" / f"{number}.tar", {f"{each}.jpg": jpeg(each) for each in range(3)})
    os.rename(tmp_path / "source" / "train" / "1.tar", tmp_path / "source" / "train" / "1.TAR")
    for name in ("0_stats.json", "0.parquet", "README", "x.idx", ".hidden.npy"):
        write(tmp_path / "source" / "train" / name, b"{}")
    manifest, data, _ = read(bytes_of(tmp_path / "source", format=format))
    assert data == [jpeg(each) for each in range(3)] * 2
    assert manifest.paths[3] == "train/1.TAR/0.jpg"
    lines = [each.getMessage() for each in caplog.records if "ignored" in each.getMessage()]
    assert len(lines) == 1
    assert "ignored 4 file(s) that are not shards: train/0.parquet, train/0_stats.json, train/README, ..." in lines[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("5.npy", r"has shards \(train/0\.tar\) and other files \(train/5\.npy\)"),
        ("other.parquet", r"has shards \(train/0\.tar\) and other files \(train/other\.parquet\)"),
        ("1.tar.gz", r"the shard train/1\.tar\.gz is compressed"),
        ("1.TGZ", r"the shard train/1\.TGZ is compressed"),
        ("1.tar", r"train/1\.tar cannot be used: it is not an uncompressed tar file"),
        ("logs/x.txt", r"has shards \(0\.tar\) and folders \(logs\)"),
    ],
)
def test_possible_samples_next_to_shards_are_refused_by_name(tmp_path: Path, name: str, message: str) -> None:
    shard(tmp_path / "source" / "train" / "0.tar", {"0.npy": b"a"})
    write(tmp_path / "source" / "train" / name, tar_of({"1.npy": b"a"}, "w:gz"))
    with pytest.raises(ValueError, match=message):
        read(bytes_of(tmp_path / "source"))


def test_hidden_members_are_ignored_and_links_are_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """tar on macOS writes hidden members, and GNU tar writes links for a folder with hard links."""
    file = tmp_path / "source" / "train" / "0.tar"
    members = {"./._0.npy": b"macOS", "./0.npy": b"zero", "./.git/1.npy": b"hidden", "k/1.npy": b"one"}
    links = {"2.npy": (tarfile.LNKTYPE, "./0.npy"), "k/3.npy": (tarfile.SYMTYPE, "../2.npy")}
    shard(file, members, **links, pipe=(tarfile.FIFOTYPE, ""))
    manifest, data, _ = read(bytes_of(tmp_path / "source"))
    assert list(manifest.paths) == [f"train/0.tar/{each}" for each in ("0.npy", "k/1.npy", "2.npy", "k/3.npy")]
    assert data == [b"zero", b"one", b"zero", b"zero"]
    assert "ignored 3 file(s) that are not visible files in a shard: train/0.tar/._0.npy" in caplog.text


def test_link_in_a_shard_that_leads_nowhere_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "source" / "train" / "0.tar"
    shard(file, {"0.npy": b"zero"}, **{"1.npy": (tarfile.SYMTYPE, "/somewhere/1.npy")})
    with pytest.raises(ValueError, match=r"member 1\.npy is a link to /somewhere/1\.npy, which is not a file in it"):
        read(bytes_of(tmp_path / "source"))


@pytest.mark.parametrize(("format", "scheme"), [("gnu", ""), ("posix", "simplecache::file://"), ("oldgnu", "")])
def test_sparse_members_of_a_shard_are_read(tmp_path: Path, format: str, scheme: str) -> None:
    files = tmp_path / "files"
    expected = {
        "0.bin": [(0, b"HEAD"), (1 << 20, b"TAIL")],
        "1.bin": [(0, b"whole")],
        f"{'long' * 40}.bin": [(9999, b"x")],
    }
    expected |= {"3.bin": [(place << 17, b"piece %d" % place) for place in range(30)]}  # more than fit into a header
    files.mkdir()
    for name, pieces in expected.items():
        with open(files / name, "wb") as file:
            for place, data in pieces:
                file.seek(place)
                file.write(data)
            file.truncate(file.tell() + 70_000)
    target = tmp_path / "source" / "train" / "0.tar"
    target.parent.mkdir(parents=True)
    subprocess.run(["tar", "-S", f"--format={format}", "-cf", target, "-C", files, *expected], check=True)
    with tarfile.open(target) as tar:
        if not any(each.issparse() for each in tar):
            pytest.skip("the file system of the test, or this tar, keeps no holes")
    manifest, data, _ = read(bytes_of(f"{scheme}{tmp_path / 'source'}", tmp_path / "cache"))
    assert dict(zip(manifest.paths, data, strict=True)) == {
        f"train/0.tar/{name}": (files / name).read_bytes() for name in expected
    }
    if not scheme:
        os.utime(target)
        store = SampleStore(bytes_of(tmp_path / "source", tmp_path / "other"), manifest)
        store.get([0])
        assert store.counters().changed == 1, "reads of sparse members see the time, too"
        store.close()


def test_missing_sparse_member_is_unreadable(tmp_path: Path) -> None:
    shard(tmp_path / "0.tar", {"0.bin": b"x" * 999})
    with Storage(bytes_of(tmp_path)) as storage:
        (found,) = storage.read([("0.tar", -1 - 512, 0)])
    assert isinstance(found, Unreadable)
    assert "there is no member at byte 512" in found.reason


@pytest.mark.parametrize("damage", ["cut", "header", "joined"])
def test_incomplete_shard_is_refused(folder: Path, tmp_path: Path, damage: str) -> None:
    """tarfile stops at a damaged header, and at the end of the first of several concatenated files."""
    file = folder / "train" / "000#0.tar"
    data = bytearray(file.read_bytes())
    with tarfile.open(file) as tar:
        third = tar.getmembers()[2]
    if damage == "cut":
        del data[third.offset_data + 10 :]
    elif damage == "header":
        data[third.offset] ^= 1
    else:
        data += bytes(data)
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"000#0\.tar cannot be used: it (has data after its end|is not an)"):
        read(bytes_of(folder))


def test_shard_that_becomes_shorter_raises_for_its_samples(folder: Path, tmp_path: Path) -> None:
    """The length of each read is checked. Some storage keeps no times."""
    config = bytes_of(folder)
    manifest = load_or_list(config, "train")
    file = folder / "train" / "000#0.tar"
    os.truncate(file, int(manifest.offsets[3]) + 7)
    os.utime(file, ns=(0, int(manifest.mtimes_ns[3])))
    store = SampleStore(config, manifest)
    assert store.get([2])[0].data.tobytes() == payload(2)
    with pytest.raises(CorruptSampleError, match=r"000003\.npy cannot be used: storage returned 519 bytes for bytes"):
        store.get([3])
    store.close()


def exchange_labels(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data.replace(b"0\n", b"9\n"))


def exchange_samples(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data.replace(b"000001.npy", b"000007.npy"))


@pytest.mark.parametrize(
    "change",
    [exchange_labels, exchange_samples, lambda file: os.truncate(file, 6000), lambda file: shard(file, {})],
    ids=["labels", "samples", "shorter", "empty"],
)
def test_shard_replaced_after_it_was_listed_is_an_error(folder: Path, tmp_path: Path, change: Any) -> None:
    config = bytes_of(folder)
    store = SampleStore(config, load_or_list(config, "train"))
    assert store.get([4])[0].data.tobytes() == payload(4)
    file, other = folder / "train" / "000#0.tar", tmp_path / "0.tar"
    shutil.copy(file, other)
    change(other)
    os.replace(other, file)
    with pytest.raises(DataError, match=r"000#0\.tar has changed since it was listed, and contains other samples"):
        store.get([1])
    assert store.get([7])[0].data.tobytes() == payload(7)
    store.close()


def rewrite(file: Path, names: dict[str, str], mtime: int, format: int = tarfile.GNU_FORMAT) -> None:
    """Write the members of a shard again, at equal places, with some of their names exchanged."""
    with tarfile.open(file) as tar:
        members = [(member, (tar.extractfile(member) or io.BytesIO()).read()) for member in tar]
    with tarfile.open(file, "w", format=format) as tar:
        for member, data in members:
            member.name, member.mtime, member.pax_headers = names.get(member.name, member.name), mtime, {}
            tar.addfile(member, io.BytesIO(data))


def swapped(folder: str = "") -> dict[str, str]:
    first, second = f"{folder}000000.npy", f"{folder}000001.npy"
    return {first: second, second: first}


def even_shard(source: Path, folder: str = "", format: int = tarfile.GNU_FORMAT) -> Path:
    """Create a shard of samples of equal size."""
    members = {}
    for sample in range(4):
        members |= {f"{folder}{sample:06}.npy": f"{sample}".encode() * 700, f"{folder}{sample:06}.cls": b"%d" % sample}
    shard(source / "train" / "0.tar", members)
    rewrite(source / "train" / "0.tar", {}, 0, format)
    return source / "train" / "0.tar"


def even_config(tmp_path: Path, scheme: str) -> CacheConfig:
    # with options, fsspec opens the folder, and its reads return no times
    options = {"auto_mkdir": False} if scheme else None
    return bytes_of(f"{scheme}{tmp_path / 'source'}", tmp_path / "cache", storage_options=options)


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize(
    ("folder", "format"),
    [
        ("", tarfile.GNU_FORMAT),
        ("deep/" * 30, tarfile.GNU_FORMAT),
        ("deep/" * 30, tarfile.PAX_FORMAT),
        ("ä", tarfile.PAX_FORMAT),
    ],
    ids=["short", "long GNU", "long pax", "pax"],
)
def test_shard_replaced_where_storage_keeps_no_times_is_an_error(
    tmp_path: Path, scheme: str, folder: str, format: int
) -> None:
    file = even_shard(tmp_path / "source", folder, format)
    config = even_config(tmp_path, scheme)
    manifest = load_or_list(config, "train")
    time = file.stat().st_mtime_ns
    rewrite(file, swapped(folder), 0, format)
    os.utime(file, ns=(time, time))
    store = SampleStore(config, manifest)
    assert store.get([3])[0].data.tobytes() == b"3" * 700
    with pytest.raises(DataError, match=r"0\.tar has changed since it was listed, and contains other samples"):
        store.get([1])
    store.close()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_shard_replaced_twice_is_an_error_if_the_second_one_differs(tmp_path: Path, scheme: str) -> None:
    file = even_shard(tmp_path / "source")
    config = even_config(tmp_path, scheme)
    store = SampleStore(config, load_or_list(config, "train"))
    rewrite(file, {}, 1)
    assert [sample.data.tobytes() for sample in store.get([2, 3])] == [b"2" * 700, b"3" * 700]
    rewrite(file, swapped(), 2)
    with pytest.raises(DataError, match=r"0\.tar has changed since it was listed, and contains other samples"):
        store.get([1])
    store.close()


@needs_s3
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_shard_replaced_in_s3_is_refused_unless_its_samples_have_their_places(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = even_shard(tmp_path / "source")
    with s3_server() as (options, files):
        files.mkdir("replaced")
        upload(files, tmp_path / "source", "replaced")
        config = bytes_of("s3://replaced", tmp_path / "cache", storage_options=options)
        manifest = load_or_list(config, "train")
        store = SampleStore(config, manifest)
        rewrite(file, {}, 1)
        upload(files, tmp_path / "source", "replaced")
        assert store.get([2])[0].data.tobytes() == b"2" * 700
        assert "0.tar has changed since it was listed, but its samples still have the listed places" in caplog.text
        rewrite(file, swapped(), 2)
        upload(files, tmp_path / "source", "replaced")
        with pytest.raises(DataError, match=r"0\.tar has changed since it was listed, and contains other samples"):
            store.get([1])
        store.close()
        assert load_or_list(config, "train").paths[0] == manifest.paths[1], "the next run lists the shard again"


@pytest.mark.parametrize("older", [False, True])
def test_shard_copied_again_after_it_was_listed_is_read(
    folder: Path, caplog: pytest.LogCaptureFixture, older: bool
) -> None:
    config = bytes_of(folder)
    manifest = load_or_list(config, "train")
    if older:  # lists of older versions have no headers
        manifest = replace(manifest, headers=manifest.headers[:0])
    os.utime(folder / "train" / "000#0.tar")
    store = SampleStore(config, manifest)
    assert [sample.data.tobytes() for sample in store.get(range(8))] == [payload(number) for number in range(8)]
    assert store.counters().changed == 1
    assert "000#0.tar has changed since it was listed, but its samples still have the listed places" in caplog.text
    store.close()
    store = SampleStore(config, manifest)
    assert [sample.data.tobytes() for sample in store.get(range(8))] == [payload(number) for number in range(8)]
    assert store.counters().disk_samples == 8, "the samples are cached although the time differs"
    store.close()


def test_shard_overwritten_in_place_is_listed_again_by_the_next_run(folder: Path) -> None:
    config = bytes_of(folder)
    labels = load_or_list(config, "train").labels[:, 0].tolist()
    exchange_labels(folder / "train" / "000#0.tar")
    assert load_or_list(config, "train").labels[:, 0].tolist() == [9, *labels[1:3], 9, *labels[4:]]
