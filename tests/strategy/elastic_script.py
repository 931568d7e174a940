"""Trains under torchrun with a checkpoint after every step; in its first life one rank dies. Run by test_killed.py."""

import os
import sys

import torch

from tests.strategy.test_killed import fit


def main(folder: str) -> None:
    # One agent starts all ranks, and each of them plays a node of its own.
    os.environ.update(GROUP_RANK=os.environ["LOCAL_RANK"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kill = None if restarts else {"point": "in a step", "step": 6, "rank": 1}
    result = fit(folder, "32-true", kill, 20)
    torch.save({**result, "restarts": restarts}, f"{folder}/result{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
