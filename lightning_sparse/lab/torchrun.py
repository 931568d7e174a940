"""torchrun as the lab starts it on each node: the launcher of node 0 ends last.

When their ranks have ended, launchers meet once more at a store that the launcher of node 0 serves. If it ended first,
the others could lose the store while they wait, and would print a C++ traceback though nothing failed.
"""

import sys
import time

from torch.distributed import TCPStore, run  # type: ignore[attr-defined]  # the store is re-exported, unannounced

WAIT_S = 5.0  # for launchers that were killed


def main() -> None:
    words = run.get_args_parser().parse_args(sys.argv[1:])
    first = words.node_rank == 0
    # torch's own handle of the store, which it drops at the end, shares the server with this one
    at = words.master_addr, words.master_port
    store = TCPStore(*at, is_master=first, wait_for_workers=False, multi_tenant=True)
    run.main(sys.argv[1:])
    store.add("ended", 1)
    deadline = time.monotonic() + WAIT_S
    while first and store.add("ended", 0) < int(words.nnodes) and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    main()
