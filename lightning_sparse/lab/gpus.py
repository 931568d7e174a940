"""The GPUs of a lab's ranks, and the environment variables for CUDA and NCCL.

If the machine has a GPU for every rank, each node sees its own GPUs. Otherwise rank r uses GPU ``r % count``. So
``LOCAL_RANK % torch.cuda.device_count()`` is the device of a rank in every lab.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_sparse.lab.shared_gpus import VARIABLE as SHARED_GPUS

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEV = Path("/dev")
DEVICE_FILES = ("nvidia[0-9]*", "nvidiactl", "dxg")  # dxg: Windows Subsystem for Linux
# After init(), device_count() asks CUDA instead of NVML, which also counts GPUs that CUDA cannot use (MIG).
COUNT = """
import torch
usable = torch.cuda.is_available()
if usable:
    torch.cuda.init()
print(torch.cuda.device_count() if usable else 0)
"""


def find_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the GPUs that processes with this environment see, as entries for `VISIBLE`.

    Raises:
        RuntimeError: if there are GPUs, but torch cannot count them.
    """
    listed = environment.get(VISIBLE)
    if listed == "" or not any(any(DEV.glob(pattern)) for pattern in DEVICE_FILES):
        return []
    done = subprocess.run([sys.executable, "-c", COUNT], env=environment, stdout=subprocess.PIPE, text=True)
    words = done.stdout.split()
    if done.returncode != 0 or not words:
        raise RuntimeError(
            f"torch cannot count the GPUs: its process ended with code {done.returncode}; the error is above. Pass "
            f"--cpu (in Python: cpu=True) to hide all GPUs."
        )
    count = int(words[-1])
    entries = map(str, range(count)) if listed is None else map(str.strip, listed.split(","))
    return list(entries)[:count]  # CUDA ignores the entries after the first invalid one


@dataclass(frozen=True)
class GPUPlan:
    """The GPUs of all ranks. `gpus` are entries for `VISIBLE`; `cpu` hides all GPUs."""

    nodes: int
    devices: int
    gpus: Sequence[str] = ()
    cpu: bool = False

    @property
    def shared(self) -> bool:
        return not self.cpu and 0 < len(self.gpus) < self.nodes * self.devices

    def message(self) -> str:
        gpus = "1 GPU" if len(self.gpus) == 1 else f"{len(self.gpus)} GPUs"
        return f"lab: {self.nodes * self.devices} ranks share {gpus}; NCCL uses sockets between them"

    def defaults(self) -> dict[str, str]:
        """Return variables that the user's environment may override."""
        variables = {"NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
        if self.shared:
            variables.update(NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
        return variables

    def variables(self, node: int, interface: str) -> dict[str, str]:
        """Return the variables of a node. With other values, NCCL fails or bypasses the emulated link."""
        # NCCL_NET, because network plugins ignore NCCL_IB_DISABLE
        variables = {"NCCL_SOCKET_IFNAME": interface, "NCCL_NET": "Socket", "NCCL_HOSTID": f"node{node}"}
        if self.cpu:
            return {**variables, VISIBLE: ""}
        if self.gpus:
            first = node * self.devices
            of_ranks = [self.gpus[rank % len(self.gpus)] for rank in range(first, first + self.devices)]
            visible = list(dict.fromkeys(of_ranks))
            variables[VISIBLE] = ",".join(visible)
            if len(visible) < self.devices:
                variables[SHARED_GPUS] = ",".join(str(visible.index(gpu)) for gpu in of_ranks)
        return variables

    def wrap_rank(self, command: list[str]) -> list[str]:
        if not self.shared:
            return command
        # NCCL refuses two ranks of one host on the same GPU, and treats all nodes of a lab as one host. With one
        # NCCL_HOSTID per node, or per rank if ranks share GPUs, it connects them by sockets over the emulated network.
        return ["sh", "-c", 'export NCCL_HOSTID="$NCCL_HOSTID-$LOCAL_RANK"; exec "$@"', "sh", *command]
