"""The command `lightning-sparse` prints its version, and errors without tracebacks."""

from importlib.metadata import version
from pathlib import Path

import pytest

from lightning_sparse import __version__, cli


def test_version_is_printed_with_torch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"lightning-sparse {__version__} (torch {version('torch')})\n"


CLUSTER = ["--devices", "1", "--inter-gbps", "1", "--intra-gbps", "10"]


@pytest.mark.parametrize(
    "words",
    [
        ["doctor"],
        ["plan", "--parameters", "1e6", "--nodes", "0", *CLUSTER],
        ["plan", "--parameters", "1e6", "--nodes", "2", *CLUSTER, "--plot", "{file}/below/plan.svg"],
        *(["plan", "--parameters", odd, "--nodes", "2", *CLUSTER] for odd in ("inf", "nan", "0.5", "1e300")),
        ["plan", "--parameters", "1e6", "--nodes", "2", *CLUSTER, "--plot", "."],
        ["plan", "--parameters", "1e6", "--nodes", "2", *CLUSTER, "--plot", "{file}plan"],  # without a suffix
        ["lab", "--nodes", "0", "--", "true"],
        ["lab", "--no-net", "--report", "{file}/below/report.json", "--", "true"],
        ["lab", "--no-net", "--gbps", "10", "--", "true"],  # a rate without links
        ["cache", "warm", "{file}/below", "{file}/cache"],
        ["cache", "warm", "{file}", "{file}cache", "--threads", "0"],
        ["cache", "clear", "{file}/cache"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_command_line_error_is_one_message_and_exit_code_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    if words == ["doctor"]:
        monkeypatch.setenv("RANK", "0")  # without a rendezvous address
        monkeypatch.delenv("MASTER_ADDR", raising=False)
    file = tmp_path / "file"
    file.write_text("not a folder")
    code = cli.main([word.format(file=file) for word in words])
    printed = capsys.readouterr()
    assert code == 2, printed
    assert printed.err.startswith(f"lightning-sparse {words[0]}: ")
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["plan", "--parameters", "nan", "--nodes", "2", *CLUSTER],
            "--parameters nan must be the number of parameters",
        ),
        (["lab", "--no-net", "--gbps", "1", "--", "true"], "omit --no-net or --gbps"),
        (["lab", "--nodes", "0", "--", "true"], "nodes=0 must be from 1 to 250. Use 2 or more to emulate a network."),
    ],
)
def test_command_line_error_names_the_fix(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lab", "--nodes", "2", "x.py"], "usage: lightning-sparse lab [options] -- COMMAND"),
        (["cache", "warm", "a", "b", "--storage-options", "key=1"], """'key=1' must be JSON, such as {"key": 1}"""),
        (["cache", "warm", "a", "b", "--storage-options", "1"], """'1' must be JSON, such as {"key": 1}"""),
    ],
)
def test_wrong_arguments_print_the_usage_of_the_command(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert says in capsys.readouterr().err


def test_cache_warm_refuses_a_node_beyond_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "source" / "train" / "cats").mkdir(parents=True)
    folders = [str(tmp_path / "source"), str(tmp_path / "cache")]
    assert cli.main(["cache", "warm", *folders, "--nodes", "2", "--node", "2"]) == 2
    assert "node 2 must be from 0 to 1, because there are 2 nodes." in capsys.readouterr().err
