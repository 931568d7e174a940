"""Print the tables of `benchmarks/results/works-with.md`: libraries and optimizers with DDP and both strategies.

Usage: python -m tests.works_with.table [DEVICES]
"""

import sys
import tempfile
from collections import Counter
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec

from tests.helpers.distributed import run_ranks
from tests.works_with import checks, optimizers
from tests.works_with.libraries import LIBRARIES
from tests.works_with.runs import fits


def row_of(name: str, devices: int) -> tuple[str, list[str]]:
    """Return the row of a library, and its problems."""
    package, make = LIBRARIES[name]
    if find_spec(package) is None:
        return f"| {name} | not installed |", []
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(fits, make, folder, nodes=2, devices=devices, timeout=280, init=False)
    problems = checks.problems_of(found)
    losses = {each: checks.ends_of(fit) for each, fit in found[0].items()}
    ends = " | ".join(f"{losses[each][1]:.3f}" for each in ("ddp", "mstopk_hier", "mstopk_local"))
    release = version(packages_distributions()[package][0])
    return f"| {name} | {release} | {losses['ddp'][0]:.3f} | {ends} | {'; '.join(problems) or 'none'} |", problems


def count_of(library: str) -> tuple[str, dict[str, str]]:
    """Return the row of a library's optimizers, and the optimizers that a strategy does not train."""
    if find_spec(library) is None:
        return f"| {library} | not installed |", {}
    results = run_ranks(optimizers.results_of, library, nodes=2, devices=1, timeout=880)[0]
    problems = optimizers.problems_of(results)
    trained: Counter[str] = Counter()
    for found in results.values():
        trained.update(each for each, result in found.items() if optimizers.trains(result))
    counts = " | ".join(str(trained[each]) for each in ("ddp", "mstopk_hier", "mstopk_local"))
    return f"| {library} | {version(packages_distributions()[library][0])} | {len(results)} | {counts} |", problems


def main() -> int:
    """Print both tables; return 1 if a library differs from DDP or an optimizer fails without a known reason."""
    devices, failed = int((sys.argv[1:] or ["1"])[0]), False
    print(f"2 nodes x {devices}: library, version, first loss, last losses (DDP, hier, local), problems")
    for name in LIBRARIES:
        row, problems = row_of(name, devices)
        failed |= bool(problems)
        print(row, flush=True)
    print("\noptimizers: library, version, listed, trained by DDP, hier, local")
    for library in optimizers.LIBRARIES:
        row, found = count_of(library)
        failed |= bool(optimizers.unexplained(library, found))
        print(row, *(f"    {name}: {problem}" for name, problem in found.items()), sep="\n", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
