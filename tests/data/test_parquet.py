"""Parquet files of images as Hugging Face writes them: each row group is read once, on a mount and in a fake S3."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_sparse.data.cache.commands import warm
from lightning_sparse.data.cache.store import Placement, SampleStore, new_run, owners_of
from lightning_sparse.data.config import CacheConfig, CorruptSampleError, DataError
from lightning_sparse.data.sources import layout
from lightning_sparse.data.sources.listing import classes_of, has_split, load_or_list
from tests.helpers.data import bytes_of, read

pyarrow = pytest.importorskip("pyarrow", reason="it reads Parquet files")
parquet = pytest.importorskip("pyarrow.parquet")
FILES, ROWS, GROUP = 3, 8, 3  # rows per file and per row group


def payload(number: int) -> bytes:
    return f"{number:03} ".encode() * (100 + number)


def write(file: Path, columns: dict[str, Any], *, names: tuple[str, ...] = (), group: int = GROUP) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table(columns)
    if names:
        about = {"info": {"features": {"label": {"names": list(names), "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    parquet.write_table(table, file, row_group_size=group)


def image_column(contents: list[bytes | None]) -> list[dict[str, Any]]:
    return [{"bytes": each, "path": f"{number}.jpg"} for number, each in enumerate(contents)]


def data_set(root: Path, make: Any = payload, split: str = "train") -> Path:
    for number in range(FILES):
        numbers = range(number * ROWS, (number + 1) * ROWS)
        columns = {"image": image_column([make(each) for each in numbers]), "label": [each % 2 for each in numbers]}
        write(root / split / f"{number:04}.parquet", columns, names=("cat", "dog"))
    return root


def config_of(folder: Path | str, cache: Path | None = None, **more: Any) -> CacheConfig:
    return bytes_of(folder, cache, **{"shuffle": "global", **more})


def test_selected_rows_equal_the_rows_of_the_file(tmp_path: Path) -> None:
    """The rows are not adjacent, as after a limit."""
    config = config_of(data_set(tmp_path / "source"))
    some = np.array([1, 2, 5, 9, 17, 23])
    store = SampleStore(config, load_or_list(config, "train").select(some))
    found = store.get(range(len(some)))
    store.close()
    assert [each.data.tobytes() for each in found] == [payload(number) for number in some.tolist()]
    assert [each.label for each in found] == [[number % 2] for number in some.tolist()]


def test_parquet_rows_in_any_order_are_transferred_once(tmp_path: Path) -> None:
    config = config_of(data_set(tmp_path / "source"))
    assert classes_of(config, "train")[0] == ("cat", "dog")
    assert has_split(config, "train")
    manifest = load_or_list(config, "train")
    assert manifest.labels.tolist() == [[number % 2] for number in range(24)]
    assert (len(manifest.shards), manifest.paths[4]) == (9, "train/0000.parquet#1/1")
    store = SampleStore(config, manifest)
    for number in np.random.default_rng(0).permutation(24).tolist():
        (sample,) = store.get([number])
        assert (sample.data.tobytes(), sample.label) == (payload(number), [number % 2])
    counts = store.counters()
    assert counts.storage_samples == 24
    assert counts.storage_bytes == sum(len(payload(number)) for number in range(24))
    assert counts.changed == 0
    store.close()
    _, again, counts = read(config)
    assert again == [payload(number) for number in range(24)]
    assert counts.storage_samples == 0


def test_ranks_of_a_node_read_each_row_group_once(tmp_path: Path) -> None:
    config, run = config_of(data_set(tmp_path / "source")), new_run()
    manifest = load_or_list(config, "train")
    stores = [SampleStore(config, manifest, Placement(0, 1, rank), run) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        read = [pool.submit(store.get, range(24)) for store in stores]
    assert [each.data.tobytes() for each in read[1].result()] == [payload(number) for number in range(24)]
    assert stores[0].node_counters().storage_samples == 24
    for store in stores:
        store.close()


def test_row_group_has_one_owner(tmp_path: Path) -> None:
    config = config_of(data_set(tmp_path / "source"))
    manifest = load_or_list(config, "train")
    for nodes in (2, 3):
        owners = owners_of(manifest, nodes, 0)
        assert all(len(set(owners[manifest.shard_of == group])) == 1 for group in range(9))
        assert set(owners) == set(range(nodes))
    assert set(owners_of(manifest, 12, 0)) == set(range(12)), "with fewer groups than nodes, samples are assigned"


def test_disk_cache_is_filled_by_row_groups(tmp_path: Path) -> None:
    config = config_of(data_set(tmp_path / "source"))
    report = warm(config, "train", placement=Placement(0, 2, 0))
    assert 6 <= report.fetched == report.files < 24
    report = warm(config, "train")
    assert (report.present + report.fetched, report.present > 0, report.corrupt) == (24, True, [])
    assert read(config)[2].storage_samples == 0


def test_row_without_bytes_is_named(tmp_path: Path) -> None:
    write(tmp_path / "source" / "train" / "0.parquet", {"image": image_column([b"a", None, b"c"])})
    config = config_of(tmp_path / "source")
    manifest = load_or_list(config, "train")
    assert manifest.labels.shape == (3, 0)
    store = SampleStore(config, manifest)
    assert store.get([2])[0].data.tobytes() == b"c"
    with pytest.raises(CorruptSampleError, match=r"train/0\.parquet#0/1 cannot be used: its row contains no bytes"):
        store.get([1])
    store.close()


@pytest.mark.parametrize("kind", [pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view(), pyarrow.binary(2)])
def test_bytes_of_each_type_are_samples(tmp_path: Path, kind: Any) -> None:
    write(tmp_path / "source" / "train" / "0.parquet", {"a": pyarrow.array([b"ab", b"cd"], kind), "label": [1, 0]})
    config = config_of(tmp_path / "source")
    assert read(config)[1] == [b"ab", b"cd"]


def test_damaged_row_group_is_named_without_a_timeout(tmp_path: Path) -> None:
    file = tmp_path / "source" / "train" / "0.parquet"
    write(file, {"a": [b"a" * 1000, b"b" * 1000]})
    config = config_of(tmp_path / "source", storage_timeout=600)
    store = SampleStore(config, load_or_list(config, "train"))
    data = file.read_bytes()
    file.write_bytes(data[:4] + b"\xff" * 30 + data[34:])  # the header of the first page
    with pytest.raises(ValueError, match=r"train/0\.parquet cannot be used: it is damaged: "):
        store.get([0])
    store.close()


@pytest.mark.parametrize(
    ("columns", "member", "says"),
    [
        ({"id": [1]}, None, "0 of its columns id contain bytes"),
        ({"a": [b"a"], "b": [b"b"]}, None, "2 of its columns a, b contain bytes. Name the column"),
        ({"a": [b"a"]}, "c", "1 of its columns a contain bytes. Name the column"),
        (None, None, "it is not a Parquet file"),
    ],
)
def test_unsupported_parquet_file_is_refused(
    tmp_path: Path, columns: dict[str, Any] | None, member: str | None, says: str
) -> None:
    file = tmp_path / "source" / "train" / "0.parquet"
    write(file, columns or {"a": [b"a"]})
    if columns is None:
        file.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=says):
        load_or_list(config_of(tmp_path / "source", member=member), "train")


@pytest.mark.parametrize("about", [b"{", b"[" * 100_000])
def test_damaged_metadata_are_named(tmp_path: Path, about: bytes) -> None:
    file = tmp_path / "source" / "train" / "0.parquet"
    write(file, {"a": [b"a"]})
    parquet.write_table(parquet.read_table(file).replace_schema_metadata({b"huggingface": about}), file)
    with pytest.raises(ValueError, match=r"0\.parquet cannot be used: (JSONDecodeError|RecursionError)"):
        load_or_list(config_of(tmp_path / "source"), "train")


def test_column_can_be_chosen_and_labels_may_be_names(tmp_path: Path) -> None:
    columns = {"left": [b"a", b"b"], "right": [b"c", b"d"], "label": ["oak", "beech"], "size": [1, 2]}
    write(tmp_path / "source" / "train" / "0.parquet", columns)
    config = config_of(tmp_path / "source", member="right")
    manifest = load_or_list(config, "train")
    assert (manifest.classes, manifest.labels.tolist()) == (("beech", "oak"), [[1], [0]])
    assert read(config)[1] == [b"c", b"d"]


def test_parquet_without_pyarrow_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(data_set(tmp_path / "source"))
    monkeypatch.setattr(layout, "is_installed", lambda name: False)
    with pytest.raises(ValueError, match="need pyarrow: `pip install pyarrow`"):
        load_or_list(config, "train")


def test_whole_numbers_in_one_file_and_fractions_in_another_are_fractions(tmp_path: Path) -> None:
    write(tmp_path / "source" / "train" / "0.PARQUET", {"x": [b"a", b"b"], "label": [0, 1]})
    write(tmp_path / "source" / "train" / "1.parquet", {"x": [b"c", b"d"], "label": [0.5, 1.75]})
    config = config_of(tmp_path / "source")
    store = SampleStore(config, load_or_list(config, "train"))
    assert [(each.data.tobytes(), each.label) for each in store.get(range(4))] == [
        *((b"a", [0.0]), (b"b", [1.0]), (b"c", [0.5]), (b"d", [1.75])),
    ]
    store.close()


@pytest.mark.parametrize(
    ("column", "labels", "says"),
    [
        ("label", [True, False], "sample 3: the label is True, but the first label is 0"),
        ("label", ["a", "b"], "sample 3: the label is 'a', but the first label is 0"),
        ("label", [[1], [2]], r"sample 3: the label is \[1\], but the first label is 0"),
        ("age", [1, 2], r"1\.parquet has labels in column age, but train/0\.parquet has labels in column label"),
        ("text", ["a", "b"], r"1\.parquet has no column of labels, but"),
    ],
)
def test_files_with_labels_of_other_types_or_columns_are_refused(
    tmp_path: Path, column: str, labels: list[Any], says: str
) -> None:
    write(tmp_path / "source" / "train" / "0.parquet", {"x": [b"a", b"b"], "label": [0, 1]})
    write(tmp_path / "source" / "train" / "1.parquet", {"x": [b"c", b"d"], column: labels})
    with pytest.raises(ValueError, match=says):
        load_or_list(config_of(tmp_path / "source"), "train")


@pytest.mark.parametrize(
    ("labels", "count"),
    [([[0, 1, 0], [1, 0, 0]], 3), ([[1, 1], [0, 5]], 6), ([[0.5, 1.5], [0.0, 1.0]], 0)],
    ids=["0 or 1 for each class", "ids", "numbers"],
)
def test_lists_of_labels_are_rows_of_a_batch(tmp_path: Path, labels: list[list[Any]], count: int) -> None:
    write(tmp_path / "source" / "train" / "0.parquet", {"x": [b"a", b"b"], "labels": labels})
    config = config_of(tmp_path / "source")
    manifest = load_or_list(config, "train")
    assert manifest.labels.tolist() == labels
    assert manifest.num_classes == count
    assert classes_of(config, "train")[1] == count


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[1], [1, 2]], r"sample 2: the label is a list of 2 value\(s\), but the list of the first row has 1"),
        ([[1], [None]], r"sample 2: the label is \[None\]: write lists of numbers"),
        ([1, None], "sample 2: the label has no value"),
        (["a", " b"], "sample 2: the label is ' b': remove the spaces"),
    ],
)
def test_unsupported_label_is_refused_with_its_row(tmp_path: Path, labels: Any, message: str) -> None:
    write(tmp_path / "source" / "train" / "0.parquet", {"x": [b"a", b"b"], "label": labels})
    with pytest.raises(ValueError, match=message):
        load_or_list(config_of(tmp_path / "source"), "train")


def test_columns_that_may_be_the_label_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """CIFAR-100 has such columns. Images are refused; other samples have no labels."""
    write(tmp_path / "source" / "train" / "0.parquet", {"img": [b"a"], "fine_label": [1], "coarse_label": [0]})
    named = r"train/0\.parquet has no column label or labels, and fine_label, coarse_label are whole numbers"
    with pytest.raises(ValueError, match=named):
        load_or_list(config_of(tmp_path / "source", format="jpeg"), "train")
    manifest = load_or_list(config_of(tmp_path / "source"), "train")
    assert manifest.labels.shape == (1, 0)
    assert "fine_label, coarse_label are whole numbers" in caplog.text


def test_cache_warm_verify_reads_row_groups_again(tmp_path: Path) -> None:
    config = config_of(data_set(tmp_path / "source"))
    warm(config, "train")
    assert warm(config, "train", verify=True).differing == []
    store = SampleStore(config, load_or_list(config, "train"))
    key = store.manifest.key(10)
    (kept,) = store.disk.get([key])
    assert kept is not None
    store.disk.put(key, kept._replace(data=b"old"))
    store.close()
    assert warm(config, "train", verify=True).differing == ["train/0001.parquet#0/2"]
    assert warm(config, "train", verify=True).differing == []


@pytest.mark.parametrize(
    "replacement",
    [
        {"image": image_column([payload(each) for each in range(8)]), "label": [1] * 8},
        {"image": image_column([payload(each) for each in range(2)]), "label": [0, 1]},
        {"image": image_column([payload(each) for each in range(8)]), "label": ["dog", "cat"] * 4},
    ],
    ids=["labels", "fewer rows", "names"],
)
def test_parquet_file_replaced_after_it_was_listed_is_an_error(tmp_path: Path, replacement: dict[str, Any]) -> None:
    config = config_of(data_set(tmp_path / "source"))
    store = SampleStore(config, load_or_list(config, "train"))
    write(tmp_path / "source" / "train" / "0000.parquet", replacement)
    with pytest.raises(DataError, match=r"0000\.parquet has changed since it was listed, and contains other samples"):
        store.get([2])
    assert store.get([8])[0].data.tobytes() == payload(8)
    store.close()
    for file in (tmp_path / "source" / "train").iterdir():  # all files of a split have labels of one type
        write(file, replacement)
    again = load_or_list(config, "train")
    names = again.classes or (0, 1)
    assert [names[label] for (label,) in again.labels.tolist()] == replacement["label"] * FILES


def test_parquet_file_with_equal_labels_is_read_after_a_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The store numbers the classes as train/ does, and the file numbers them differently."""
    config = config_of(data_set(tmp_path / "source"))
    manifest = load_or_list(config, "train").relabel(("bird", "cat", "dog"))
    data_set(tmp_path / "source")
    store = SampleStore(config, manifest)
    assert [sample.data.tobytes() for sample in store.get(range(24))] == [payload(number) for number in range(24)]
    assert store.counters().changed == FILES
    assert "parquet has changed since it was listed, but its samples still have the listed places" in caplog.text
    assert store.counters().storage_samples == 24, "each row group is read once"
    store.close()


def test_parquet_file_replaced_by_fewer_row_groups_is_an_error(tmp_path: Path) -> None:
    config = config_of(data_set(tmp_path / "source"))
    store = SampleStore(config, load_or_list(config, "train"))
    write(tmp_path / "source" / "train" / "0000.parquet", {"image": image_column([b"a"]), "label": [0]})
    with pytest.raises(DataError, match=r"0000\.parquet has changed since it was listed, and contains other samples"):
        store.get([ROWS - 1])
    store.close()


def test_other_files_in_the_folder_do_not_matter_for_a_copied_file(tmp_path: Path) -> None:
    config = config_of(data_set(tmp_path / "source"))
    store = SampleStore(config, load_or_list(config, "train"))
    data_set(tmp_path / "source")
    (tmp_path / "source" / "train" / "next.bin").write_bytes(b"a")
    (tmp_path / "source" / "train" / "extra").mkdir()
    assert store.get([0])[0].data.tobytes() == payload(0)
    store.close()


def test_files_that_moved_to_another_folder_are_listed_again(tmp_path: Path) -> None:
    source = data_set(tmp_path / "source")
    config = config_of(source)
    load_or_list(config, "train")
    (source / "data").mkdir()
    for number in range(FILES):
        (source / "train" / f"{number:04}.parquet").rename(source / "data" / f"train-{number:05}-of-{FILES:05}.parquet")
    (source / "train").rmdir()
    assert load_or_list(config, "train").paths[0] == "data/train-00000-of-00003.parquet#0/0"
