"""`lightning-sparse plan`: predictions, recommendation, model names and the command."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_sparse import cli
from lightning_sparse.cli import plan
from lightning_sparse.cli.plan import METHODS, Row, Scenario, parameter_shapes, predict
from lightning_sparse.exchange import TensorSpec
from lightning_sparse.exchange.paths import Dense, Flat, Regional, Sparse, num_selected
from lightning_sparse.kernels import message_bytes
from lightning_sparse.kernels.wire import TWO_BIT

RESNET50 = 25_557_032
CLUSTER = ["--devices", "8", "--inter-gbps", "25", "--intra-gbps", "1200"]


def scenario(**options: float) -> Scenario:
    return Scenario(**{"numel": RESNET50, "devices": 8, "inter_gbps": 25.0, "intra_gbps": 1200.0, **options})  # type: ignore[arg-type]


def here(nodes: int, density: float = 0.01, **options: float) -> tuple[list[Row], float | None]:
    of = scenario(**options)
    return plan.predict_all(of, [nodes], [density]), of.compute_s


# -- the arithmetic ----------------------------------------------------------------------------------------------------


def test_prediction_uses_the_cost_model_of_the_strategies() -> None:
    of = scenario()
    assert of.buckets == 5, "DDP splits ResNet-50 into buckets of 1 MiB, then 25 MiB"
    each = TensorSpec(16, 8, -(-RESNET50 // 5))
    k = math.ceil(0.01 * each.shard_numel)
    assert predict(of, 16, "ddp").sync_s == pytest.approx(5 * Flat(each).seconds(of.rates))
    assert predict(of, 16, "dense").sync_s == pytest.approx(5 * Dense(each).seconds(of.rates))
    assert predict(of, 16, "sparse", 0.01).sync_s == pytest.approx(
        5 * Sparse(each, k, torch.bfloat16).seconds(of.rates)
    )
    assert predict(of, 16, "regional", 0.01).sync_s == pytest.approx(
        5 * Regional(each, k, torch.bfloat16).seconds(of.rates)
    )


def test_predicted_bytes_per_node() -> None:
    assert predict(scenario(), 16, "dense").node_bytes == pytest.approx(2 * 15 / 16 * 4 * RESNET50, rel=1e-5)
    assert predict(scenario(), 16, "ddp").node_bytes == pytest.approx(2 * 127 / 128 * 4 * RESNET50, rel=1e-5)
    assert predict(scenario(), 16, "ddp16").node_bytes == pytest.approx(2 * 127 / 128 * 2 * RESNET50, rel=1e-5)
    sparse = predict(scenario(), 16, "sparse", 0.01).node_bytes
    assert sparse == pytest.approx(15 * 3.43 * 0.01 * RESNET50, rel=0.01), "bytes per pair"
    assert predict(scenario(), 32, "sparse", 0.01).node_bytes == pytest.approx(sparse * 31 / 15, rel=1e-3)
    assert (
        predict(scenario(), 32, "regional", 0.01).node_bytes
        < 1.2 * predict(scenario(), 16, "regional", 0.01).node_bytes
    )


@pytest.mark.parametrize("path", METHODS)
def test_seconds_grow_with_nodes_and_fall_with_the_link_rate(path: str) -> None:
    by_nodes = [predict(scenario(), nodes, path, 0.01).sync_s for nodes in (1, 2, 4, 16, 64)]
    assert by_nodes == sorted(by_nodes)
    by_rate = [predict(scenario(inter_gbps=gbps), 16, path, 0.01).sync_s for gbps in (1.0, 10.0, 100.0)]
    assert by_rate == sorted(by_rate, reverse=True)


def test_step_and_efficiency_have_bounds_for_overlap() -> None:
    row = predict(scenario(compute_s=0.05), 16, "ddp")
    assert row.step_s == pytest.approx(0.05 + row.sync_s)
    assert row.overlapped_step_s == max(0.05, row.sync_s)
    assert row.efficiency == pytest.approx(0.05 / row.step_s)
    assert row.overlapped_efficiency == pytest.approx(0.05 / row.overlapped_step_s)
    assert predict(scenario(), 16, "ddp").step_s is None, "without a compute time there is no step time"


def test_single_node_has_no_traffic() -> None:
    found, _ = here(1)
    assert {row.node_bytes for row in found} == {0.0}
    assert {row.effective_density for row in found} == {1.0}


# -- the recommendation ------------------------------------------------------------------------------------------------


MSTOPK = "strategy='mstopk_hier' with density=0.01"


@pytest.mark.parametrize(
    ("nodes", "options", "parts"),
    [
        (1, {}, ["Use plain DDP: a single node has no traffic between nodes."]),
        (
            16,
            {"inter_gbps": 1.0, "compute_s": 0.1},
            [f"With SGD, use {MSTOPK}. Predicted step: ", "times as fast as DDP)"],
        ),
        (2, {"inter_gbps": 400.0, "compute_s": 0.2}, ["With SGD, use plain DDP. Predicted step: "]),
        (
            16,
            {"compute_s": 0.213},
            ["With SGD, use plain DDP if communication overlaps with backward, otherwise ", MSTOPK, "measure both"],
        ),
        # sparse receives more than dense if the density is above 2 / M, with pairs of 4 bytes
        (256, {"density": 0.05, "inter_gbps": 1.0}, ["With SGD, use strategy='mstopk_hier' with exchange='dense16'"]),
        (16, {}, ["With SGD, use ", "Predicted communication per step: ", "add --compute-ms"]),
    ],
)
def test_recommendation_names_the_method_and_its_predicted_time(
    nodes: int, options: dict[str, float], parts: list[str]
) -> None:
    sgd = plan.recommend(*here(nodes, **options)).splitlines()[-1]
    assert sgd.startswith(parts[0])
    assert all(part in sgd for part in parts)


def test_recommendation_for_adam_is_updates_on_slow_links() -> None:
    slow = scenario(devices=1, inter_gbps=1.0, compute_s=0.1)
    found = [predict(slow, 4, way, 0.01) for way in METHODS]
    said = plan.recommend(found, slow.compute_s)
    updates, ddp = (next(row for row in found if row.path == path) for path in ("updates", "ddp"))
    adam = said.splitlines()[0]
    assert adam.startswith("With AdamW, use strategy='mstopk_local' with density=0.01. Predicted step: ")
    step_s, ddp_s = updates.overlapped_step_s or 0, ddp.overlapped_step_s or 0
    assert f"{1e3 * step_s:.3g} ms ({ddp_s / step_s:.2g} times as fast as DDP) with perfect overlap" in adam
    whole = [replace(row, overlapped_step_s=1e-3) if row.path == "dense16" else row for row in found]
    assert "exchange='dense16' if communication overlaps" in plan.recommend(whole, slow.compute_s)


def test_updates_overlap_with_the_whole_step() -> None:
    for gbps in (0.1, 1.0, 10.0):
        row = predict(scenario(devices=1, inter_gbps=gbps, compute_s=10.0), 4, "updates", 0.01)
        assert row.step_s is not None
        assert row.step_s < 10.0 + row.sync_s or gbps > 1
        k = num_selected(0.01, RESNET50)
        assert row.node_bytes == 3 * message_bytes(RESNET50, k, TWO_BIT), "the default of mstopk_local"


def test_bytes_of_regional_updates_do_not_grow_with_nodes() -> None:
    sparse, regional = (
        predict(scenario(), 16, way, density).node_bytes
        for way, density in (("updates", 0.01), ("updates regional", 0.08))
    )
    assert regional == pytest.approx(sparse, rel=0.25)
    assert predict(scenario(), 64, "updates regional", 0.08).node_bytes < 1.2 * regional


# -- models ------------------------------------------------------------------------------------------------------------


def numel_of(model: str) -> int:
    return sum(shape.numel() for shape in parameter_shapes(model))


def test_models_of_torchvision_and_timm_are_known() -> None:
    assert numel_of("resnet50") == RESNET50
    assert numel_of("vgg19") == 143_667_240
    assert numel_of("mixer_s16_224") == 18_528_264  # from timm


def test_known_sizes_need_no_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    of_torchvision = [name for name in plan.SIZES if "-" not in name and name != "gpt2"]
    assert len(of_torchvision) == 7
    assert all(numel_of(name) == plan.SIZES[name] for name in of_torchvision)
    for package in ("torchvision", "timm"):
        monkeypatch.setitem(sys.modules, package, None)
    words = ["--nodes", "4", "--devices", "8", "--inter-gbps", "10", "--intra-gbps", "1200"]
    assert cli.main(["plan", "--model", "gpt2", *words]) == 0
    assert "124,439,808" in capsys.readouterr().out


def test_unknown_model_is_refused_with_similar_names() -> None:
    with pytest.raises(ValueError, match=r"model='resnet_50' is not a classifier .* resnet50"):
        parameter_shapes("resnet_50")


def test_model_without_torchvision_and_timm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torchvision", "timm"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match="pip install torchvision, give --parameters"):
        parameter_shapes("resnet50")


@pytest.mark.parametrize(
    ("option", "value"),
    [("numel", 0), ("devices", 0), ("inter_gbps", 0.0), ("intra_gbps", math.inf), ("itemsize", 8), ("compute_s", 0.0)],
)
def test_bad_option_is_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option}={value}"):
        scenario(**{option: value})


# -- the command -------------------------------------------------------------------------------------------------------


def test_command_prints_tables_and_a_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--model", "resnet50", "--nodes", "16", *CLUSTER, "--compute-ms", "213"]) == 0
    said = capsys.readouterr().out
    assert "assumed: 600 GB/s" in said
    assert "213 ms (given)" in said
    hier = ("mstopk_hier 1%", "mstopk_hier 0.1%", "mstopk_hier regional 1%")
    for name in ("DDP", "2-D dense", *hier, "mstopk_local 1%"):
        assert any(line.startswith(name) for line in said.splitlines())
    adam, sgd, hint = said.rstrip().splitlines()[-3:]
    assert adam.startswith("With AdamW, use plain DDP if")
    assert sgd.startswith("With SGD, use plain DDP if")
    assert hint == "For the effect on the loss, add --steps."


def test_command_needs_the_intra_node_rate_of_several_devices(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--parameters", "1e6", "--nodes", "2", "--inter-gbps", "1"]
    assert cli.main([*words, "--devices", "1"]) == 0
    assert "inside" not in capsys.readouterr().out
    assert cli.main([*words, "--devices", "2"]) == 2
    assert "--intra-gbps is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "said"),
    [(4600, "46 times on average. Runs that sent each entry as often ended 1% to 4%"), (300, "This is too few")],
)
def test_command_with_steps_tells_how_often_an_entry_is_sent(
    capsys: pytest.CaptureFixture[str], steps: int, said: str
) -> None:
    words = ["plan", "--parameters", "1e6", "--nodes", "4", *CLUSTER, "--steps", str(steps)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert said in out
    assert "times sent" in out


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--parameters", "25.6e6", "--nodes", "4", *CLUSTER, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scenario"]["numel"] == 25_600_000
    assert {row["nodes"] for row in found["rows"]} == {1, 2, 4, 8, 16}
    assert "scaling efficiency needs --compute-ms" in found["assumptions"][-1]
    assert all(row["step_s"] is None for row in found["rows"])


def test_command_plots_or_names_the_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.svg"
    words = ["plan", "--parameters", "1e6", "--nodes", "4", *CLUSTER, "--plot", str(file)]
    for more in ([], ["--compute-ms", "100"]):
        file.unlink(missing_ok=True)
        assert cli.main([*words, *more]) == 0
        assert file.read_text().startswith("<?xml")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(words) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value", "name"), [("--nodes", "0", "nodes=0"), ("--density", "2", "density=2.0")])
def test_command_names_a_bad_option(option: str, value: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--parameters", "1e6", "--nodes", "2", *CLUSTER, option, value]) == 2
    assert name in capsys.readouterr().err
