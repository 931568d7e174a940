"""The collectives of the exchange over a topology. Knows process groups, and nothing of DDP or of compression.

With a tensor of N elements padded to L * S (see lightning_sparse.gradients.hook for the whole step):

=============== ============== =========================== ==========================================
method          group          in -> out                   step
=============== ============== =========================== ==========================================
reduce_scatter  intra          grad_N -> shard_S           1, sums inside the node
exchange        inter          message_B -> messages_MB    3, one fixed-size all-gather between nodes
all_reduce      inter          shard_S -> shard_S          the dense twin of 2 and 3
all_to_all      inter          messages_MB -> messages_MB  regional: each node its region's
gather          intra/outward  shard_S -> grad_N           4
broadcast       intra          tensor -> tensor            none: parameters from the rank that stepped them
node_all_reduce intra          tensor -> tensor            none: what a sharded step must know of the others
flat_all_reduce world          grad_N -> grad_N            the identity: what DDP itself does
world_broadcast world          tensor -> tensor            none: what all ranks begin with
node_broadcast  inter          shard_S -> shard_S          none: the same of a sharded model
=============== ============== =========================== ==========================================
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_sparse.exchange.rates.timing import Stopwatch
from lightning_sparse.sharding import local_of
from lightning_sparse.topology import Topology

# torch renamed these two; the old names warn from 2.13 on and the new ones do not exist before it.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


MAX = dist.ReduceOp.MAX
CHUNK = 1 << 18  # bytes of a message that a node gives on before the rest is there
LONG = 1 << 17  # bytes: messages that take turns on a slow link, rather than meet there


class CommunicationError(RuntimeError):
    """A collective failed: a rank died, a link is down, or a rank stalled past the group's timeout."""


class HierCommunicator:
    """The four steps, each a method of a few lines.

    Args:
        topology: where this rank stands, with its groups.

    Attributes:
        stopwatch: times what goes between nodes.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.stopwatch = Stopwatch()
        self._place = threading.local()

    @property
    def where(self) -> str:
        """Told in errors; the hook keeps it up to date. Each thread has its own: they work on different buckets."""
        return getattr(self._place, "where", "before the first round")

    @where.setter
    def where(self, place: str) -> None:
        self._place.where = place

    def reduce_scatter(self, grad_N: Tensor) -> Tensor:
        """Sum over the node's devices; each keeps its shard_S. With one device that is the input itself."""
        devices = self.topology.num_devices
        if devices == 1:
            return grad_N
        shard = -(-grad_N.numel() // devices)
        grad_LS = grad_N if shard * devices == grad_N.numel() else _padded(grad_N, shard * devices)
        with self._named("reduce-scatter inside the node", self._node_ranks()):
            if grad_LS.is_cuda:
                shard_S = grad_N.new_empty(shard)
                _reduce_scatter_single(shard_S, grad_LS, group=self.topology.intra)
                return shard_S
            # Gloo's own all-reduces everything and throws most of it away: 2.5 times slower with two devices.
            pieces_LS = torch.empty_like(grad_LS)
            dist.all_to_all_single(pieces_LS, grad_LS, group=self.topology.intra)
        sum_S = pieces_LS[:shard]
        for device in range(1, devices):
            sum_S += pieces_LS[device * shard : (device + 1) * shard]
        return sum_S

    def exchange(self, message_B: Tensor) -> Tensor:
        """All-gather between nodes: messages of B bytes -> [M, B] in node order."""
        peers, node = self._peer_ranks(), self.topology.node_index
        messages_MB = message_B.new_empty(len(peers), message_B.numel())
        with self._named("all-gather between nodes", peers), self._timed(message_B):
            if message_B.is_cuda:
                _all_gather_single(messages_MB.view(-1), message_B, group=self.topology.inter)
                return self._by_node(messages_MB)
            messages_MB[node].copy_(message_B)
            self._ring(messages_MB)
        return messages_MB

    def _ring(self, messages_MB: Tensor) -> None:
        """Give each chunk on as soon as it is there, so that no link waits for the end of a message: a ring of whole
        messages of 1 MB, and Gloo's own of halves, took up to a tenth longer at 0.1 Gbit/s."""
        peers, node, group = self._peer_ranks(), self.topology.node_index, self.topology.inter
        to, source = peers[(node + 1) % len(peers)], peers[node - 1]
        arriving, last = [], len(peers) - 1
        for step in range(1, len(peers)):
            for chunk in torch.split(messages_MB[node - step], CHUNK):
                arriving.append((step < last, chunk, dist.irecv(chunk, src=source, group=group)))
        sending = [dist.isend(chunk, dst=to, group=group) for chunk in torch.split(messages_MB[node], CHUNK) if last]
        for goes_on, chunk, work in arriving:
            _wait(work)
            if goes_on:
                sending.append(dist.isend(chunk, dst=to, group=group))
        for sent in sending:
            _wait(sent)

    def all_reduce(self, shard_S: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Sum over nodes, in place."""
        with self._named("all-reduce between nodes", self._peer_ranks()), self._timed(shard_S):
            dist.all_reduce(shard_S, op=op, group=self.topology.inter)

    def all_to_all(self, messages_MB: Tensor) -> Tensor:
        """Between nodes: row j goes to node j; what arrives is [M, B] in node order."""
        peers, node = self._peer_ranks(), self.topology.node_index
        arrived_MB = torch.empty_like(messages_MB)
        with self._named("all-to-all between nodes", peers), self._timed(messages_MB):
            if messages_MB.is_cuda or messages_MB[0].nbytes < LONG:
                sent_MB = self._by_rank(messages_MB)
                dist.all_to_all_single(arrived_MB.view(-1), sent_MB.view(-1), group=self.topology.inter)
                return self._by_node(arrived_MB)
            # Gloo's own sends to all at once: where long messages meet at a slow link, packets are lost.
            arrived_MB[node].copy_(messages_MB[node])
            for step in range(1, len(peers)):
                to = (node + step) % len(peers)
                self._pass(messages_MB[to], peers[to], arrived_MB[node - step], peers[node - step])
        return arrived_MB

    def gather(self, shard_S: Tensor, *, last: bool = False, into: Tensor | None = None) -> Tensor:
        """All-gather inside the node: shard_S -> flat tensor of L * S elements.

        Args:
            into: written to instead of a new tensor where its size allows.
            last: this is step 4, which runs while another lane reduce-scatters the next bucket, so it has a group of
                its own.
        """
        if self.topology.num_devices == 1:
            return shard_S
        group = self.topology.outward if last else self.topology.intra
        numel = self.topology.num_devices * shard_S.numel()
        grad_LS = into if into is not None and into.numel() == numel else shard_S.new_empty(numel)
        with self._named("all-gather inside the node", self._node_ranks()):
            if grad_LS.is_cuda:
                _all_gather_single(grad_LS, shard_S, group=group)
                return grad_LS
            # Gloo's own copies more than once: of 100 MB, two devices wait 97 ms for it and 32 ms for these.
            shards = grad_LS.view(self.topology.num_devices, -1).unbind()
            shards[self.topology.device_index].copy_(shard_S)
            under_way = [
                dist.broadcast(shard, src=rank, group=group, async_op=True)
                for rank, shard in zip(self._node_ranks(), shards, strict=True)
            ]
            for work in under_way:
                _wait(work)
        return grad_LS

    def broadcast(self, tensor: Tensor, device_index: int) -> Callable[[], None]:
        """Start a broadcast to the devices of the node, in place, and return a function that waits for it."""
        source, where = self._node_ranks()[device_index], self.where
        with self._named("broadcast inside the node", self._node_ranks()):
            work = dist.broadcast(tensor, src=source, group=self.topology.intra, async_op=True)

        def wait() -> None:
            self.where = where
            with self._named("broadcast inside the node", self._node_ranks()):
                _wait(work)

        return wait

    def node_all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce over the node's devices, in place."""
        with self._named("all-reduce inside the node", self._node_ranks()):
            dist.all_reduce(tensor, op=op, group=self.topology.intra)

    def flat_all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce over all ranks, in place."""
        with self._named("all-reduce over all ranks", tuple(range(self.topology.world_size))), self._timed(tensor):
            dist.all_reduce(tensor, op=op, group=self.topology.world)

    def world_broadcast(self, tensor: Tensor) -> None:
        """What rank 0 has, to all ranks, in place."""
        with self._named("broadcast to all ranks", tuple(range(self.topology.world_size))):
            dist.broadcast(tensor, src=0, group=self.topology.world)

    def node_broadcast(self, tensor: Tensor) -> None:
        """What this device's peer on the first node has, to all its peers, in place."""
        peers = self._peer_ranks()
        with self._named("broadcast to all nodes", peers):
            dist.broadcast(tensor, src=peers[0], group=self.topology.inter)

    def begin_with_first(self, tensor: Tensor) -> None:
        """Give all ranks what rank 0 has of a tensor; of a sharded one all nodes what the first has."""
        if isinstance(tensor, DTensor):
            self.node_broadcast(local_of(tensor.data))
        elif tensor.numel():
            self.world_broadcast(tensor.data)

    def _node_ranks(self) -> tuple[int, ...]:
        return self.topology.nodes[self.topology.node_index]

    def _peer_ranks(self) -> tuple[int, ...]:
        device = self.topology.device_index
        return tuple(node[device] for node in self.topology.nodes)

    def _pass(self, sent_B: Tensor, to: int, arrived_B: Tensor, source: int) -> None:
        """Send a message to one rank while another's arrives."""
        group = self.topology.inter
        for work in (dist.irecv(arrived_B, src=source, group=group), dist.isend(sent_B, dst=to, group=group)):
            _wait(work)

    def _by_rank(self, rows_MB: Tensor) -> Tensor:
        """From node order to that of ranks, which is a group's."""
        peers = self._peer_ranks()
        order = sorted(range(len(peers)), key=peers.__getitem__)
        return rows_MB if order == sorted(order) else torch.stack([rows_MB[node] for node in order])

    def _by_node(self, rows_MB: Tensor) -> Tensor:
        """The inverse."""
        peers = self._peer_ranks()
        places = [sorted(peers).index(rank) for rank in peers]
        return rows_MB if places == sorted(places) else torch.stack([rows_MB[place] for place in places])

    def _timed(self, tensor: Tensor) -> AbstractContextManager[None]:
        return self.stopwatch.running(tensor.device)

    @contextmanager
    def _named(self, step: str, ranks: tuple[int, ...]) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.topology.rank}: {step} (ranks {', '.join(map(str, ranks))}) failed {self.where}. "
                f"A rank died, its link is down, or it stalled past the process group's timeout: look for the first "
                f"error among those ranks. The backend said: {error}"
            ) from error


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def average(tensors: Sequence[Tensor], all_reduce: Callable[[Tensor], None], count: int) -> None:
    """The mean over `count` ranks, in place, by one all-reduce. In fp64: a mean of equal values is that value, so
    constants stay exact."""
    flat = torch.cat([each.flatten().double() for each in tensors])
    all_reduce(flat)
    flat /= count
    for each, mean in zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True):
        each.copy_(mean.view_as(each))


def _padded(flat: Tensor, numel: int) -> Tensor:
    padded = flat.new_empty(numel)
    padded[: flat.numel()] = flat
    padded[flat.numel() :] = 0
    return padded
