"""What a fit exchanged between nodes, as a short table at its end: of one device, which speaks for the others."""

import torch
from torch import Tensor, nn

from lightning_sparse.exchange import CommStats
from lightning_sparse.gradients.groups import in_bucket_order
from lightning_sparse.gradients.state import HierState

_MB = 1e6


def shard_gradient_norm(state: HierState, module: nn.Module) -> Tensor:
    """L2 norm of this device's shards of the gradients that the module has now, a 0-dim tensor (no host sync).

    It is the counterpart of ``state.residual_norm()``: both are of the same shards. Gradients that the user clips or
    scales are met as they are then; of parameters without one nothing is counted.
    """
    topology = state.topology
    grads = {name: p.grad.detach() for name, p in module.named_parameters() if p.grad is not None}
    pieces = [
        in_bucket_order(grads[name])[there]
        for group in state.layout.settled
        for name, _, there in group.shard_slices(group.names, topology.device_index, topology.num_devices)
        if name in grads and not grads[name].is_complex()
    ]
    return (
        torch.stack([torch.linalg.vector_norm(each).float() for each in pieces]).norm() if pieces else torch.zeros(())
    )


def table(stats: CommStats, seconds: float, unsent: float, ratio: float = 0.0) -> str:
    """One heading, and a line for each thing to know.

    Args:
        stats: of the fit.
        seconds: that this device spent in collectives between nodes.
        unsent: norm of what was not sent at the end, of gradients or updates.
        ratio: the same over the norm of the gradient; 0 where that is not known.
    """
    rounds, total = max(1, stats.rounds), max(1, sum(stats.paths.values()))
    here, ddp = stats.bytes_between_nodes / rounds / _MB, stats.dense_equivalent_bytes / rounds / _MB
    fewer = f": {ddp / here:,.1f} times as much" if here else ""
    paths = ", ".join(f"{count / total:.1%} {path}" for path, count in stats.paths.most_common())
    lines = [
        f"what one device exchanged with other nodes, in {stats.rounds:,} rounds:",
        f"  received a round    {here:,.3f} MB; plain DDP {ddp:,.3f} MB{fewer}",
        f"  paths               {paths} (share of entries)",
        f"  density             {stats.sent / total:.2%} sent, at most {stats.applied / total:.2%} applied",
        f"  between nodes       {1e3 * seconds / rounds:,.1f} ms a round, waiting for other nodes included",
    ]
    if unsent:
        compared = f", {ratio:.1f} times that of the gradient" if ratio else ""
        lines.append(f"  not sent yet        norm {unsent:.3g}{compared}")
    return "\n".join(lines)
