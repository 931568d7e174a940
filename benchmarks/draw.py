"""Draw the pictures of result files again, without measuring.

python -m benchmarks.draw [FOLDER]      # default: benchmarks/results
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any

# beginning of a picture's name -> the module of this folder that draws it; the longest one counts
BY = {
    "convergence": "convergence.images",
    "convergence-text": "convergence.text",
    "time-to-loss": "convergence.time_to_loss",
    "exchange": "exchange.gradients",
    "kernels": "exchange.kernels",
    "pto": "exchange.pto",
    "data": "data.tiers",
    "data-storage": "data.storage",
}
SUFFIXES = (".svg", ".png", "-time.png", "-bytes.png")
GONE = ("data-learning", "peers")
"""Their benchmarks are no longer here."""


def draw(file: Path, record: dict[str, Any]) -> None:
    """Draw one picture of a record, by the benchmark that wrote the record."""
    name = max((each for each in BY if file.name.startswith(each)), key=len)
    import_module(f"benchmarks.{BY[name]}").plot(record, file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of result files again.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "results")
    for record in sorted(parser.parse_args().folder.glob("*.json")):
        for file in (record.with_name(record.stem + suffix) for suffix in SUFFIXES):
            if file.exists() and not file.name.startswith(GONE):
                draw(file, json.loads(record.read_text()))
                print(f"wrote {file}")


if __name__ == "__main__":
    main()
