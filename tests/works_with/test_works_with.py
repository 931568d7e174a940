"""Other libraries train as they do with DDP. `make works-with` installs all of them and prints the results."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.distributed import run_ranks
from tests.works_with import checks, optimizers
from tests.works_with.libraries import LIBRARIES
from tests.works_with.runs import fits

pytestmark = pytest.mark.slow


def skip_without(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: run `make works-with`")


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", LIBRARIES)
def test_library_with_strategies_gives_the_result_of_ddp(name: str, devices: int, tmp_path: Path) -> None:
    package, make = LIBRARIES[name]
    skip_without(package)
    found = run_ranks(fits, make, str(tmp_path), nodes=2, devices=devices, timeout=280, init=False)
    assert checks.problems_of(found) == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("library", optimizers.LIBRARIES)
def test_strategies_train_the_optimizers_that_ddp_trains(library: str) -> None:
    skip_without(library)
    found = run_ranks(optimizers.results_of, library, nodes=2, devices=1, timeout=880)[0]
    assert optimizers.unexplained(library, optimizers.problems_of(found)) == {}
