"""Run several scripts of this folder in the same process, because importing Lightning takes as long as a run.

torchrun --nproc-per-node 2 examples/demo_ranks.py plan.json     # [[script, argument...], ...]
"""

import json
import runpy
import sys
from pathlib import Path


def main() -> None:
    for script, *words in json.loads(Path(sys.argv[1]).read_text()):
        sys.argv = [script, *words]
        runpy.run_path(str(Path(__file__).with_name(script)), run_name="__main__")


if __name__ == "__main__":
    main()
