"""Experimental: nodes that leave and join exchange updates through torchft, as `mstopk_local` does on fixed nodes.

    pip install torchft
    python examples/torchft_local.py              # three nodes on this machine, one of which is killed and comes back

Each node runs an optimizer of its own and sends the largest 1 % of what it did to the weights. torchft's manager says
before each step who takes part, and after it whether all of them got through. A step that did not get through changes
neither the shared weights nor what is pending; a node that joins begins with the shared weights and nothing pending, so
what it had not sent before it was killed is lost. A node here is one process; what is learned is a toy.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import time
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions, TCPStore
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from lightning_sparse.kernels import accumulate, compress

DENSITY = 0.01
DTYPE = torch.bfloat16
TIMEOUT = timedelta(seconds=10)


class Node:
    """
    Attributes:
        shared_N: the same on all nodes after a step that got through.
        pending_N: what this node has not sent; its own weights are the sum of the two.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.shared_N = parameters_to_vector(model.parameters()).detach().clone()
        self.pending_N, self.rest_N = torch.zeros_like(self.shared_N), torch.zeros_like(self.shared_N)
        self.k = max(1, int(DENSITY * self.shared_N.numel()))

    def state_dict(self) -> dict[str, object]:
        return {"shared": self.shared_N, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take over the state of another node: this one joins."""
        shared_N, optimizer = state["shared"], state["optimizer"]
        assert isinstance(shared_N, Tensor)
        assert isinstance(optimizer, dict)
        self.shared_N.copy_(shared_N)
        self.pending_N.zero_()
        self.optimizer.load_state_dict(optimizer)
        self.show_own()

    def show_own(self) -> None:
        vector_to_parameters(self.shared_N + self.pending_N, self.model.parameters())

    @torch.no_grad()
    def exchange(self, manager: Manager, group: ProcessGroupGloo) -> bool:
        """After the optimizer's step. False when the step did not get through."""
        change_N = parameters_to_vector(self.model.parameters()) - self.shared_N - self.pending_N
        message_B = compress(change_N, self.pending_N, self.rest_N, self.k, DTYPE)
        messages_MB = message_B.new_empty(manager.num_participants(), message_B.numel())
        try:
            group.allgather([list(messages_MB)], [message_B], AllgatherOptions()).wait()
        except RuntimeError as error:  # a node has gone
            print(f"the exchange failed, and its step is made again: {error!r:.200}", flush=True)
            manager.report_error(error)
        done: bool = manager.should_commit()
        if done:
            accumulate(messages_MB, self.shared_N, self.k, DTYPE, alpha=1 / len(messages_MB))
            self.pending_N, self.rest_N = self.rest_N, self.pending_N
        else:
            self.pending_N += change_N
        self.show_own()
        return done


def train(name: str, lighthouse: str, steps: int) -> None:
    """One node."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    teacher, model = (nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 8)) for _ in range(2))
    node = Node(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=TIMEOUT)
    manager = Manager(
        pg=group,
        load_state_dict=node.load_state_dict,
        state_dict=node.state_dict,
        min_replica_size=2,
        use_async_quorum=False,  # a node that joins has the shared weights before its first step
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
    )
    data = torch.Generator().manual_seed(sum(name.encode()))
    while manager.current_step() < steps:
        manager.start_quorum()
        x = torch.randn(64, 32, generator=data)
        node.optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), teacher(x).detach())
        loss.backward()  # type: ignore[no-untyped-call]
        node.optimizer.step()
        if node.exchange(manager, group):
            digest = hashlib.sha256(node.shared_N.numpy().tobytes()).hexdigest()[:8]
            step, size = manager.current_step(), manager.num_participants()
            print(f"node {name} step {step} of {size} nodes: loss {loss:.4f}, shared weights {digest}", flush=True)
        time.sleep(0.05)  # else the toy is over before anything happens
    manager.shutdown(wait=False)


def start(name: str, lighthouse: str, steps: int) -> subprocess.Popen[str]:
    words = ["--name", name, "--lighthouse", lighthouse, "--steps", str(steps)]
    output = subprocess.PIPE if name == "a" else None
    return subprocess.Popen([sys.executable, __file__, *words], stdout=output, text=True)


def direct(nodes: dict[str, subprocess.Popen[str]], lighthouse: str, steps: int) -> None:
    """Watch what node a says: kill c after a quarter of the steps, and start it again a quarter later."""
    reports = nodes["a"].stdout
    assert reports is not None
    killed = 0
    for line in reports:
        print(line, end="", flush=True)
        found = re.match(r"node a step (\d+) of (\d)", line)
        step, size = map(int, found.groups()) if found else (0, 0)
        if not killed and step >= steps // 4 and size == len(nodes):
            print("node c is killed", flush=True)
            nodes["c"].kill()
            nodes["c"].wait()
            killed = step
        elif killed and nodes["c"].returncode is not None and step >= killed + steps // 4:
            print("node c comes back", flush=True)
            nodes["c"] = start("c", lighthouse, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--name", help="be this node")
    parser.add_argument("--lighthouse", help="the address of torchft's lighthouse")
    args = parser.parse_args()
    if args.name:
        return train(args.name, args.lighthouse, args.steps)
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000, heartbeat_timeout_ms=1000)
    nodes = {name: start(name, lighthouse.address(), args.steps) for name in "abc"}
    try:
        direct(nodes, lighthouse.address(), args.steps)
        sys.exit(max(each.wait() for each in nodes.values()))
    finally:
        for each in nodes.values():
            each.kill()
        lighthouse.shutdown()


if __name__ == "__main__":
    main()
