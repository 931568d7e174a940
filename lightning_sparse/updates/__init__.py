"""Exchange updates instead of gradients: each node runs its own optimizer, and sends the change of the parameters.

An optimizer that divides by the size of recent gradients, such as Adam, does not work well after a compressor: a
gradient entry that arrives once in 100 steps, as a sum, moves its parameter by about 10 steps instead of 100. So here
the compressor comes after the optimizer. With M nodes of L devices, each device holds a slice S of the parameters:

==== ======================================================================= ==========================================
step action                                                                  where
==== ======================================================================= ==========================================
1    gradients are averaged inside the node                                  DistributedDataParallel on its group
2    u = x_before - x_after of the optimizer's step                          the node; or each device its slice
3    message, pending_S = compress(pending_S + u, K)                         lightning_sparse.exchange
4    global_S -= 1/M * sum over nodes of the messages sent last time         they arrive during a step and a selection
5    the all-gather of messages between nodes begins                         during the next forward and backward
6    x = global_S - step_ahead * pending_S - updates in flight               the node gathers its slices
==== ======================================================================= ==========================================

The *global* weights are bit-identical on all nodes. Each node trains its own model x. *Pending* updates are not sent
yet. Nothing is lost: global(0) - global(t) + mean over nodes of (pending + in flight) is the mean of all updates. For
SGD, step 6 is step-ahead error feedback (Xu, Huo, Huang, AAAI 2021).
"""

from lightning_sparse.updates.config import UpdatesConfig
from lightning_sparse.updates.local import LocalUpdates

__all__ = ["LocalUpdates", "UpdatesConfig"]


def __getattr__(name: str) -> object:
    if name != "ElasticSampler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import warnings
    from importlib import import_module

    # until version 0.3
    warnings.warn("import ElasticSampler from lightning_sparse.elastic", DeprecationWarning, stacklevel=2)
    return getattr(import_module("lightning_sparse.elastic"), name)
