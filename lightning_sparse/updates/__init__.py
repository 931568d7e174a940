"""Exchange updates instead of gradients: each node runs its own optimizer, and sends what that did to the parameters.

An optimizer that divides by the size of recent gradients (Adam and its family) cannot stand behind a compressor: a
gradient that arrives once in 100 steps, as the sum of 100, moves its parameter by about 10 steps' worth instead of 100.
So here the compressor stands behind the optimizer. With M nodes of L devices, each device holds a slice S of the
parameters:

==== ======================================================================= ==========================================
step what                                                                    where
==== ======================================================================= ==========================================
1    gradients are averaged inside the node                                  DistributedDataParallel on its group
2    u = x_before - x_after of the optimizer's step                          the node; or each device its slice
3    message, pending_S = compress(pending_S + u, K)                         lightning_sparse.exchange
4    global_S -= 1/M * sum over nodes of the messages sent last time         they had a step and a selection to arrive
5    the all-gather of messages between nodes begins                         beside the next forward and backward
6    x = global_S - step_ahead * pending_S - what is in flight; slices are   the node
     gathered
==== ======================================================================= ==========================================

*global* weights are bit-identical on all nodes; every node trains a model of its own, x. *pending* are updates that the
node has not sent; nothing is lost: shared(0) - shared(t) + mean over nodes of (pending + in flight) is the mean of all
updates. The form of step 6 for SGD is step-ahead error feedback (Xu, Huo, Huang, AAAI 2021).
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
