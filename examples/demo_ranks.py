"""Run several example scripts in one process per rank, for `make demo`, so that Lightning is imported only once.

torchrun --nproc-per-node 2 examples/demo_ranks.py plan.json     # [[heading, [script, words...]], ...]
"""

import json
import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    for heading, (script, *words) in json.loads(Path(sys.argv[1]).read_text()):
        if os.environ["RANK"] == "0":
            print(f"== {heading} ==", flush=True)
        sys.argv = [script, *words]
        runpy.run_path(str(Path(__file__).with_name(script)), run_name="__main__")


if __name__ == "__main__":
    main()
