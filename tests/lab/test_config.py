"""Options of a lab, and the reasons why a machine cannot run one."""

import os
import platform
from pathlib import Path

import pytest

from lightning_sparse import cli, lab
from lightning_sparse.lab import LabConfig, network
from lightning_sparse.lab.network import _shape

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("option", "value", "more"),
    [
        ("nodes", 0, {}),
        ("nodes", 251, {}),
        ("nodes", 2.5, {}),
        ("nodes", "2", {}),
        ("devices", 0, {}),
        ("gbps", 0.0, {}),
        ("gbps", float("nan"), {}),
        ("gbps", "1", {}),
        ("rtt_ms", "20", {}),
        ("rtt_ms", -1.0, {}),
        ("rtt_ms", float("nan"), {}),
        ("rtt_ms", 20.0, {"network": False}),
        ("storage_gbps", 1.0, {}),
        ("storage_gbps", 0.0, {"storage": Path.cwd()}),
    ],
)
def test_bad_option_is_refused(option, value, more):
    fix = r"(must be|needs) .*(Use 2|for example|Omit one|Set storage)"
    with pytest.raises(ValueError, match=f"{option}={value!r} {fix}"):
        LabConfig(**{option: value, **more})


def test_storage_must_be_a_folder_with_a_network(tmp_path):
    assert LabConfig(storage=tmp_path, storage_gbps=0.5).storage == tmp_path
    with pytest.raises(ValueError, match="is not a folder"):
        LabConfig(storage=tmp_path / "absent")
    with pytest.raises(ValueError, match="--no-net"):
        LabConfig(storage=tmp_path, network=False)


def test_link_burst_is_smaller_than_a_sparse_message():
    assert _shape(0.1) == ["tbf", "rate", "100000000bit", "burst", "16384b", "latency", "50ms"]
    assert _shape(10.0)[4] == "625000b"


def test_unavailable_reason_names_the_missing_part(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert "Darwin" in (network.unavailable_reason() or "")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(network.shutil, "which", lambda tool: None if tool == "tc" else f"/usr/bin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reason = network.unavailable_reason() or ""
    assert "user 1000" in reason, "without root, tc may exist outside of the PATH"
    assert "PATH=$PATH" in reason  # sudo would not find a virtual environment's programs
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "tc not found" in (network.unavailable_reason() or "")


def test_command_without_root_names_the_reason(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(network.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(lab.network, "remove_leftovers", lambda: [])
    assert cli.main(["lab", "--", "true"]) == 2
    said = capsys.readouterr().err
    assert "need root" in said
    assert "--no-net" in said


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "-- python train.py"),
        (["--", "nosuchprogram", "train.py"], "command='nosuchprogram' is neither a program on PATH"),
    ],
)
def test_command_that_cannot_run_is_refused_before_the_start(words, error, capsys):
    assert cli.main(["lab", "--no-net", *words]) == 2
    assert error in capsys.readouterr().err


def test_command_without_dashes_is_refused_with_their_place(capsys):
    with pytest.raises(SystemExit):
        cli.main(["lab", "--nodes", "2", "python", "train.py"])
    assert "put the command after --" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--nosuch"])
    assert "after --" not in capsys.readouterr().err
