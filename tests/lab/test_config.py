"""What a lab may be asked for. Pure: nothing on the machine is touched."""

import os
import platform

import pytest

from lightning_sparse import cli, lab
from lightning_sparse.lab import LabConfig, network
from lightning_sparse.lab.network import _shape

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("wrong", "value_and_way_out"),
    [
        ({"nodes": 0}, r"nodes=0 must be 1 to 250\. .* --nodes 2"),
        ({"nodes": 251}, r"nodes=251"),
        ({"devices": 0}, r"devices=0 must be at least 1"),
        ({"gbps": 0.0}, r"gbps=0.0 must be between 0.001 and 100"),
        ({"gbps": float("nan")}, r"gbps=nan"),
        ({"rtt_ms": -1.0}, r"rtt_ms=-1.0 must be 0 to 10,000 milliseconds"),
        ({"rtt_ms": float("nan")}, r"rtt_ms=nan"),
        ({"rtt_ms": 20.0, "network": False}, r"rtt_ms=20.0 needs a network.* --rtt-ms"),
        ({"storage_gbps": 1.0}, r"storage_gbps=1.0 .* --storage DIR"),
    ],
)
def test_wrong_values_name_the_value_the_rule_and_the_way_out(wrong, value_and_way_out):
    with pytest.raises(ValueError, match=value_and_way_out):
        LabConfig(**wrong)


def test_storage_must_be_a_folder_behind_a_network(tmp_path):
    assert LabConfig(storage=tmp_path, storage_gbps=0.5).storage == tmp_path
    with pytest.raises(ValueError, match="is not a folder"):
        LabConfig(storage=tmp_path / "absent")
    with pytest.raises(ValueError, match="--no-net"):
        LabConfig(storage=tmp_path, network=False)
    with pytest.raises(ValueError, match="storage_gbps=0"):
        LabConfig(storage=tmp_path, storage_gbps=0.0)


def test_what_passes_unshaped_is_less_than_a_sparse_message():
    assert _shape(0.1) == ["tbf", "rate", "100000000bit", "burst", "16384b", "latency", "50ms"]
    assert _shape(10.0)[4] == "625000b"


def test_the_reason_names_what_is_missing_and_the_way_out(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert "Darwin" in (network.unavailable_reason() or "")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(network.shutil, "which", lambda tool: None if tool == "tc" else f"/usr/bin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reason = network.unavailable_reason() or ""
    assert "user 1000" in reason, "who is not root may have tc where the PATH does not lead"
    assert "PATH=$PATH" in reason  # sudo would not find a virtual environment's programs
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "tc not found" in (network.unavailable_reason() or "")


def test_without_the_means_the_command_says_why(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(network.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(lab.network, "remove_leftovers", lambda: [])
    assert cli.main(["lab", "--", "true"]) == 2
    said = capsys.readouterr().err
    assert "need root" in said
    assert "--no-net" in said


def test_a_command_is_needed(capsys):
    assert cli.main(["lab", "--no-net"]) == 2
    assert "-- python train.py" in capsys.readouterr().err


def test_a_command_without_its_dashes_is_told_where_they_go(capsys):
    with pytest.raises(SystemExit):
        cli.main(["lab", "--nodes", "2", "python", "train.py"])
    assert "put the command after --" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--nosuch"])
    assert "after --" not in capsys.readouterr().err


def test_a_program_that_is_not_there_is_named_before_anything_starts(capsys):
    assert cli.main(["lab", "--no-net", "--", "nosuchprogram", "train.py"]) == 2
    assert "command='nosuchprogram' is neither a program on PATH" in capsys.readouterr().err
