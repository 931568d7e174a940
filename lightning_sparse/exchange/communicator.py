"""The collectives of the exchange over a topology."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_sparse.messages import listed
from lightning_sparse.sharding import local_of
from lightning_sparse.topology import Topology
from lightning_sparse.waits import waiting

# torch 2.13 renamed these two functions. It warns about the old names; older versions lack the new names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


MAX = dist.ReduceOp.MAX
CHUNK = 1 << 18  # bytes that a node forwards before the rest of the message has arrived
UNIT_WITHIN = 1e-2  # tolerance of a unit vector's length, more than the rounding error of bfloat16
LONG = 1 << 17  # bytes; longer messages of an all-to-all are sent one after the other


class CommunicationError(RuntimeError):
    """A collective failed: a rank died, a link is down, or a rank stalled past the group's timeout."""


class Group(NamedTuple):
    """Ranks that communicate with each other.

    Args:
        ranks: in our order, by node or by device of the node.
        handle: their process group, which sorts ranks; None for the default group.
    """

    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def place(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def in_process_group(self) -> tuple[int, ...]:
        order = sorted(self.ranks)
        return tuple(order.index(rank) for rank in self.ranks)

    def by_rank(self, rows_MB: Tensor) -> Tensor:
        """Reorder rows from the order of ``ranks`` to the order of the process group."""
        order = sorted(range(self.size), key=self.ranks.__getitem__)
        return rows_MB if order == sorted(order) else torch.stack([rows_MB[place] for place in order])

    def by_place(self, rows_MB: Tensor) -> Tensor:
        """Reorder rows from the order of the process group to the order of ``ranks``."""
        places = self.in_process_group
        return rows_MB if places == tuple(sorted(places)) else torch.stack([rows_MB[place] for place in places])


class Collectives:
    """The collectives of one group. Rows are in the order of ``Group.ranks``."""

    def reduce_scatter(self, grad_LS: Tensor, group: Group) -> Tensor:
        shard_S = grad_LS.new_empty(grad_LS.numel() // group.size)
        _reduce_scatter_single(shard_S, grad_LS, group=group.handle)
        return shard_S

    def gather(self, shard_S: Tensor, grad_LS: Tensor, group: Group) -> None:
        """Write the shards of all ranks to ``grad_LS``. ``Group.ranks`` must be sorted."""
        _all_gather_single(grad_LS, shard_S, group=group.handle)

    def all_gather(self, row_B: Tensor, group: Group) -> Tensor:
        rows_MB = row_B.new_empty(group.size, row_B.numel())
        _all_gather_single(rows_MB.view(-1), row_B, group=group.handle)
        return group.by_place(rows_MB)

    def all_to_all(self, rows_MB: Tensor, group: Group) -> Tensor:
        arrived_MB, sent_MB = torch.empty_like(rows_MB), group.by_rank(rows_MB)
        dist.all_to_all_single(arrived_MB.view(-1), sent_MB.view(-1), group=group.handle)
        return group.by_place(arrived_MB)


class GlooCollectives(Collectives):
    """Collectives of CPU tensors, faster than Gloo's own."""

    def reduce_scatter(self, grad_LS: Tensor, group: Group) -> Tensor:
        # Gloo's own reduce-scatter all-reduces the whole tensor: 2.5 times slower with two devices.
        shard, pieces_LS = grad_LS.numel() // group.size, torch.empty_like(grad_LS)
        dist.all_to_all_single(pieces_LS, grad_LS, group=group.handle)
        sum_S = pieces_LS[:shard]
        for device in range(1, group.size):
            sum_S += pieces_LS[device * shard : (device + 1) * shard]
        return sum_S

    def gather(self, shard_S: Tensor, grad_LS: Tensor, group: Group) -> None:
        # Gloo's own all-gather copies the data more than once: 97 ms instead of 32 ms for 100 MB on two devices.
        shards = grad_LS.view(group.size, -1).unbind()
        shards[group.place].copy_(shard_S)
        under_way = [
            dist.broadcast(shard, src=rank, group=group.handle, async_op=True)
            for rank, shard in zip(group.ranks, shards, strict=True)
        ]
        for work in under_way:
            _wait(work)

    def all_gather(self, row_B: Tensor, group: Group) -> Tensor:
        # A ring that forwards each chunk at once, so that no link waits for the end of a message. At 0.1 Gbit/s, a ring
        # of whole messages of 1 MB, and Gloo's own all-gather, took up to 10% longer.
        ranks, own = group.in_process_group, group.place
        rows_MB = row_B.new_empty(group.size, row_B.numel())
        rows_MB[own].copy_(row_B)
        to, source = ranks[(own + 1) % group.size], ranks[own - 1]
        arriving, last = [], group.size - 1
        for step in range(1, group.size):
            for chunk in torch.split(rows_MB[own - step], CHUNK):
                arriving.append((step < last, chunk, dist.irecv(chunk, group=group.handle, group_src=source)))
        chunks = torch.split(rows_MB[own], CHUNK) if last else ()
        sending = [dist.isend(chunk, group=group.handle, group_dst=to) for chunk in chunks]
        for is_forwarded, chunk, work in arriving:
            _wait(work)
            if is_forwarded:
                sending.append(dist.isend(chunk, group=group.handle, group_dst=to))
        for sent in sending:
            _wait(sent)
        return rows_MB

    def all_to_all(self, rows_MB: Tensor, group: Group) -> Tensor:
        if rows_MB[0].nbytes < LONG:
            return super().all_to_all(rows_MB, group)
        # Gloo's own all-to-all sends to all ranks at once. Long messages then meet at a slow link, which drops packets.
        arrived_MB, own = torch.empty_like(rows_MB), group.place
        arrived_MB[own].copy_(rows_MB[own])
        for step in range(1, group.size):
            to, source = (own + step) % group.size, own - step
            arriving = dist.irecv(arrived_MB[source], src=group.ranks[source], group=group.handle)
            sending = dist.isend(rows_MB[to], dst=group.ranks[to], group=group.handle)
            _wait(arriving)
            _wait(sending)
        return arrived_MB


def _collectives(tensor: Tensor) -> Collectives:
    return Collectives() if tensor.is_cuda else GlooCollectives()


class HierCommunicator:
    """The collectives between nodes, inside the node and over all ranks.

    Args:
        node: ranks to use as the node; default: this rank's node.
        world: ranks to use as the world; default: all ranks.
    """

    def __init__(self, topology: Topology, *, node: Group | None = None, world: Group | None = None) -> None:
        rank = topology.rank
        peers = tuple(ranks[topology.device_index] for ranks in topology.nodes if len(ranks) > topology.device_index)
        self.topology = topology
        self.node = node or Group(topology.nodes[topology.node_index], rank, topology.intra)
        self.peers = Group(peers, rank, topology.inter)
        self.world = world or Group(tuple(range(topology.world_size)), rank, topology.world)
        self.stopwatch = Stopwatch()
        self._place = threading.local()

    @property
    def error_context(self) -> str:
        """Where the run is, for error messages."""
        # Each thread has its own value, because threads work on different buckets.
        return getattr(self._place, "error_context", "before the first round")

    @error_context.setter
    def error_context(self, place: str) -> None:
        self._place.error_context = place

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context that logs where ranks wait, if the wait takes long."""
        return waiting(self.error_context) if self.topology.kind == "hierarchical" else nullcontext()

    def reduce_scatter(self, grad_N: Tensor) -> Tensor:
        """Sum over the node's devices. Each device keeps its shard [S]; a single device keeps the input."""
        if self.node.size == 1:
            return grad_N
        numel = self.node.size * -(-grad_N.numel() // self.node.size)
        grad_LS = grad_N if numel == grad_N.numel() else _padded(grad_N, numel)
        with self._named("reduce-scatter inside the node", self.node):
            return _collectives(grad_N).reduce_scatter(grad_LS, self.node)

    def exchange(self, message_B: Tensor) -> Tensor:
        """All-gather messages of B bytes between nodes -> [M, B] in node order."""
        with self._named("all-gather between nodes", self.peers), self._timed(message_B):
            return _collectives(message_B).all_gather(message_B, self.peers)

    def all_reduce(self, shard_S: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Sum over nodes, in place."""
        if self.peers.size == 1:
            return  # a single peer has no process group, and torch would sum over all ranks
        with self._named("all-reduce between nodes", self.peers), self._timed(shard_S):
            dist.all_reduce(shard_S, op=op, group=self.peers.handle)

    def all_to_all(self, messages_MB: Tensor) -> Tensor:
        """Send row j to node j -> the received rows, [M, B] in node order."""
        with self._named("all-to-all between nodes", self.peers), self._timed(messages_MB):
            return _collectives(messages_MB).all_to_all(messages_MB, self.peers)

    def gather(self, shard_S: Tensor, *, last: bool = False, into: Tensor | None = None) -> Tensor:
        """All-gather inside the node: shard_S -> flat tensor of L * S elements.

        Args:
            into: written to if its size allows.
            last: use a separate process group, for the last stage of a reduction.
        """
        if self.node.size == 1:
            return shard_S
        # At the same time, another lane reduce-scatters the next bucket. Two lanes must not share a process group.
        group = self.node._replace(handle=self.topology.intra_gather) if last else self.node
        numel = group.size * shard_S.numel()
        grad_LS = into if into is not None and into.numel() == numel else shard_S.new_empty(numel)
        with self._named("all-gather inside the node", group):
            _collectives(shard_S).gather(shard_S, grad_LS, group)
        return grad_LS

    def broadcast(self, tensor: Tensor, device_index: int) -> Callable[[], None]:
        """Start a broadcast to the node's devices, in place. Return a function that waits for it."""
        source, where = self.node.ranks[device_index], self.error_context
        with self._named("broadcast inside the node", self.node):
            work = dist.broadcast(tensor, src=source, group=self.node.handle, async_op=True)

        def wait() -> None:
            self.error_context = where
            with self._named("broadcast inside the node", self.node):
                _wait(work)

        return wait

    def flat_all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce over all ranks, in place."""
        with self._named("all-reduce over all ranks", self.world), self._timed(tensor):
            dist.all_reduce(tensor, op=op, group=self.world.handle)

    @torch.no_grad()
    def broadcast_from_rank0(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors from rank 0. Sharded tensors go from the first node to the others."""
        for tensor in tensors:
            to, group = ("nodes", self.peers) if isinstance(tensor, DTensor) else ("ranks", self.world)
            if tensor.numel() and group.size > 1:
                with self._named(f"broadcast to all {to}", group):
                    dist.broadcast(local_of(tensor.data), src=group.ranks[0], group=group.handle)

    def _timed(self, tensor: Tensor) -> AbstractContextManager[None]:
        return self.stopwatch.running(tensor.device)

    @contextmanager
    def _named(self, step: str, group: Group) -> Iterator[None]:
        between_nodes = group.ranks != self.topology.nodes[self.topology.node_index]
        if between_nodes:
            self.topology.traffic.begin()
        try:
            yield
            if between_nodes:
                self.topology.traffic.end()
        except torch.OutOfMemoryError:  # an error of this device, not of the communication
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.topology.rank}: {step} (ranks {listed(group.ranks)}) failed "
                f"{self.error_context}. A rank died, its link is down, or it stalled past the process group's timeout. "
                f"Look for the first error of these ranks. Backend: {error}"
            ) from error


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def average(tensors: Sequence[Tensor], all_reduce: Callable[..., None], count: int, *, is_first: bool) -> None:
    """Replace the tensors by their mean over ``count`` ranks.

    Args:
        is_first: whether this rank is the first rank.
    """
    # The mean of unit vectors (`spectral_norm`, rows of a codebook) is not a unit vector. So all ranks take those
    # vectors from the first rank.
    off = torch.stack([_off_unit_length(tensor) for tensor in tensors])
    all_reduce(off, op=MAX)
    # In fp64, constants stay exact.
    flat = torch.cat([tensor.flatten().double() for tensor in tensors])
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for part, is_unit in zip(parts, (off < UNIT_WITHIN).tolist(), strict=True):
        if is_unit:
            part *= count * is_first
    all_reduce(flat)
    flat /= count
    for tensor, mean in zip(tensors, parts, strict=True):
        tensor.copy_(mean.view_as(tensor))


def _off_unit_length(tensor: Tensor) -> Tensor:
    if tensor.dim() == 0 or tensor.shape[-1] < 2:
        return torch.full((), torch.inf, dtype=torch.float64, device=tensor.device)
    # The largest deviation from unit length of the vectors along the last dim.
    off: Tensor = (torch.linalg.vector_norm(tensor.double(), dim=-1) - 1).abs().max()
    return off.nan_to_num(nan=torch.inf)


def _padded(flat: Tensor, numel: int) -> Tensor:
    padded = flat.new_empty(numel)
    padded[: flat.numel()] = flat
    padded[flat.numel() :] = 0
    return padded


# -- time in collectives -----------------------------------------------------------------------------------------------


class Stopwatch:
    """Adds up seconds over all threads and streams."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._open: deque[tuple[Any, Any]] = deque()  # pairs of marks that the device has not passed yet

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        begin = _mark(device)
        yield
        end = _mark(device)
        with self._lock:
            self._open.append((begin, end))
            self._read()

    def seconds(self) -> float:
        with self._lock:
            self._read()
            return self._seconds

    def _read(self) -> None:
        # Reading only events that the device has passed never makes the host wait.
        while self._open and _has_passed(self._open[0][1]):
            self._seconds += _between(*self._open.popleft())


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _has_passed(mark: Any) -> bool:
    return isinstance(mark, float) or bool(mark.query())


def _between(begin: Any, end: Any) -> float:
    if isinstance(end, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3
