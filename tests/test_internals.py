"""Private names of torch and Lightning exist, are used in one file, and are listed if missing."""

import importlib
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import lightning_sparse
from lightning_sparse import internals, messages
from tests.helpers.lines import Lines

PRIVATE = re.compile(
    r"torch\._C|_execution_engine|\._optimizer_step_post|\._get_scale|utils\._|\._get_default_store|options\._timeout"
)


def test_missing_names_of_torch_are_listed() -> None:
    assert internals.missing() == []
    assert internals.missing(["_C._gone", "nn.Linear", "gone.entirely"]) == ["torch._C._gone", "torch.gone.entirely"]


def test_slow_operation_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = Lines().lines
    monkeypatch.setattr(messages, "SLOW_AFTER", timedelta(seconds=0.05))
    with messages.log_if_slow("reading"):
        time.sleep(0.5)
    with messages.log_if_slow("writing"):
        pass
    time.sleep(0.1)
    assert ["reading has taken" in line for line in lines] == [True]


def test_private_names_of_torch_are_in_one_file() -> None:
    root = Path(lightning_sparse.__file__).parent
    found = {}
    for file in root.rglob("*.py"):
        place = file.relative_to(root).as_posix()
        used = PRIVATE.findall(file.read_text())
        if used and place != "internals.py" and not place.startswith("data/"):
            found[place] = used
    assert found == {}


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_lightning_has_the_attributes_that_adapters_use(package: str) -> None:
    strategies = importlib.import_module(f"{package}.strategies")
    ddp: Any = strategies.DDPStrategy(parallel_devices=[])
    shards: Any = strategies.ModelParallelStrategy()
    wanted = {"_ddp_kwargs", "_timeout", "_register_ddp_hooks", "_setup_model", "_ddp_comm_hook", "_ddp_comm_state"}
    assert [name for name in sorted(wanted) if not hasattr(ddp, name)] == []
    assert [name for name in ("_device_mesh", "_save_distributed_checkpoint") if name not in vars(shards)] == []
