"""The pictures of results come out of the result files again."""

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "name", ["exchange-8x1-2026-11-22.svg", "kernels-2026-11-21.svg", "convergence-long-2026-11-22.svg"]
)
def test_a_picture_is_drawn_again(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import pictures

    record = json.loads((BENCHMARKS / "results" / name).with_suffix(".json").read_text())
    pictures.draw(tmp_path / name, record)
    drawn = (tmp_path / name).read_text()
    assert drawn.startswith("<?xml")
    assert "#ffffff" not in drawn, "transparent"
    published = BENCHMARKS / "results" / name
    if published.exists():
        assert len(drawn) == pytest.approx(len(published.read_text()), rel=0.1)


def test_every_picture_has_a_record_and_a_benchmark_that_draws_it() -> None:
    from benchmarks.pictures import BY, GONE, SUFFIXES

    for file in (BENCHMARKS / "results").glob("*.[sp][vn]g"):
        assert file.name.startswith((*BY, *GONE)), file
        records = [file.name.removesuffix(suffix) + ".json" for suffix in SUFFIXES if file.name.endswith(suffix)]
        assert any((file.parent / record).exists() for record in records), file
