"""All elastic nodes gather rows of equal length, for models of any size."""

from __future__ import annotations

import os
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse.elastic.lighthouse import Member, NodeStatus
from lightning_sparse.elastic.quorum import Sizes, quorum_of
from lightning_sparse.updates.agreement import UpdateCorrelation

SHAPES = {"ResNet-50": 25_557_032, "ViT-B/16": 86_567_656, "BERT-base": 109_482_240, "odd": 3_000_001}


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("model", SHAPES)
def test_sample_of_known_model_has_one_length_at_every_exchange(model: str, devices: int) -> None:
    agreement = UpdateCorrelation(-(-SHAPES[model] // devices))
    period = agreement.places(1).step  # places repeat after so many exchanges
    lengths = {len(range(agreement.numel)[agreement.places(exchange)]) for exchange in range(1, period + 1)}
    assert {4 * each for each in lengths} == {agreement.sample_bytes}


@given(st.integers(1, 30_000), st.integers(1, 10**6))
def test_sample_of_any_size_has_the_reserved_length(numel: int, exchange: int) -> None:
    model_S = torch.zeros(numel)
    agreement = UpdateCorrelation(numel)
    assert agreement.sample(exchange, model_S, model_S).numel() == agreement.sample_bytes


said = st.fixed_dictionaries(
    {"observes": st.booleans(), "flushes": st.booleans(), "sampled": st.booleans(), "exchanges": st.integers(0, 2)}
)


@given(st.lists(said, min_size=1, max_size=5), st.data())
def test_rows_of_all_members_are_equally_long_whatever_each_holds(
    each_said: list[dict[str, int]], data: st.DataObject
) -> None:
    """Rows stay equally long if a node holds more or less than it said."""
    sizes = Sizes(48, 20, 7)
    members = [Member(f"{place}", "", NodeStatus("token", 1, **said)) for place, said in enumerate(each_said)]  # type: ignore[arg-type]
    lengths = st.sampled_from([None, 0, 40, 48, 64, 68, 72])
    held = [
        None if length is None else torch.ones(length, dtype=torch.uint8)
        for length in data.draw(st.lists(lengths, min_size=len(members), max_size=len(members)))
    ]
    rows = {len(quorum_of(members).row_of(each, sizes)) for each in [*held, torch.ones(7)]}
    assert rows <= {48, 68}
    assert len(rows) == 1


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_nodes_join_validate_and_die_with_models_of_random_sizes() -> None:
    """A sample rides along with every message, and the node that joins or validates only observes. LS_SIZES is the
    number of random sizes. LS_SHAPES names known models."""
    pytest.importorskip("torchft", reason="needs torchft")
    from tests.helpers.nodes import nodes_of
    from tests.updates.elastic_node import main
    from tests.updates.test_elastic import check, of

    generator = random.Random(0)
    sizes: list[dict[str, int]] = []
    for _ in range(int(os.environ.get("LS_SIZES", "3"))):
        sizes.append({"width": int(2 ** generator.uniform(7.6, 14))})  # 21 * width + 4 elements: 4,000 to 344,000
    sizes += [{"numel": SHAPES[name]} for name in os.environ.get("LS_SHAPES", "").split()]
    for size in sizes:
        options = {
            "timeout": 5 if "width" in size else 60,
            "density": 0.1,
            "pause": 0.01,
            "sample_always": True,
            **size,
        }
        few, more = (10, 30) if "width" in size else (2, 4)
        with nodes_of(main, join_timeout_ms=1000) as nodes:
            nodes.start("a", **options)
            after = generator.randint(2, more)
            nodes.wait_for("a", lambda report, after=after: report.get("step", 0) > after, timeout=300)
            nodes.start("b", seed=1, validate_every=generator.randint(3, 9), **options)
            begun = nodes.wait_for("b", of(2), timeout=300)["number"]
            nodes.wait_for("a", of(2, begun + generator.randint(few, more)), timeout=300)
            nodes.kill("b")
            last = nodes.reports("a")[-1]["step"]
            nodes.wait_for("a", lambda report, last=last: report["step"] > last + 2, timeout=300)
            assert nodes.reports("b")[0]["begins"] > 0, f"{size}: the node that joins begins where the other is"
            check(nodes, "ab")
