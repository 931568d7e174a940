"""Training methods for M workers, as code before and after the optimizer's step. Workers are rows of `Models`.

================ ======================================================================================================
`Dense`          averaged gradients in fp32, the reference
`Alone`          no communication; the mean of the M losses counts
`PowerSGD`       gradients as products of rank r, with error feedback and warm start (Vogels et al. 2019); vectors dense
`Updates`        this library: `UpdateState` itself, with messages passed inside the process
`Outer`          an optimizer per worker, and every H steps a step on the mean of their changes: averaged models (Stich
                 2019), DiLoCo (Douillard et al. 2023), in parts Streaming DiLoCo (Douillard et al. 2025)
`SparseOuter`    `Outer` with the largest entries in two bits and error feedback: SparseLoCo (Sarfi et al. 2025)
`DeMo`           the largest coefficients of each worker's momentum in the cosine basis; the sign of their sum is the
                 step (Peng et al. 2024)
================ ======================================================================================================

``bits`` counts a worker's contribution; fp32 gradients have 32 bits per parameter. With a sum by an all-reduce, each
worker receives 2 (M-1)/M times that; with an all-gather of messages, M-1 times (``gathers``). `SparseOuter` uses the
selection and the two-bit values of this library's messages.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from benchmarks.frontier.models import Models
from lightning_sparse.exchange import Exchange
from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.exchange.paths import Sparse, TensorSpec
from lightning_sparse.kernels import accumulate, compress
from lightning_sparse.kernels.wire import TWO_BIT
from lightning_sparse.messages import LogOnce
from lightning_sparse.sharding import Part
from lightning_sparse.topology import Topology
from lightning_sparse.updates import UpdatesConfig
from lightning_sparse.updates.slices import Slices
from lightning_sparse.updates.state import UpdateState, new_state


class Way:
    """Training without communication, and hooks for other methods.

    Args:
        models: models with equal parameters.

    Attributes:
        bits: number of bits that a worker has contributed so far.
        gathers: workers receive the messages of all others, not a sum.
    """

    gathers = False

    steps_itself = False
    """Whether ``after_step`` is the optimizer."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.bits = 0.0

    @property
    def received_times(self) -> float:
        """Return the ratio of a worker's received to contributed bits."""
        others = self.models.num - 1
        return others if self.gathers else 2 * others / self.models.num

    def before_step(self) -> None:
        """Run between backward and the optimizer's step."""

    def after_step(self, step: int, lr: float) -> None:
        """Run after the optimizer's step, counted from 1, with its learning rate."""

    def results(self) -> Tensor:
        """Return the parameters that count: [1, N], or several models."""
        return self.models.flat_MN[:1]

    def close(self) -> None:
        """Release threads."""


class Alone(Way):
    """No communication."""

    def results(self) -> Tensor:
        return self.models.flat_MN


class Dense(Way):
    """Averaged gradients."""

    def before_step(self) -> None:
        self.models.grad_MN.copy_(self.models.grad_MN.mean(0))
        self.bits += 32 * self.models.numel


class PowerSGD(Way):
    """Gradients of low rank. Gradients are dense during the warm-up of the learning rate. Warm start and error feedback
    begin afterwards, as early as torch's hook allows (it suggests a tenth of all steps)."""

    def __init__(self, models: Models, rank: int, start: int) -> None:
        super().__init__(models)
        self._rank, self._start, self._steps = rank, start, 0
        self._error_MN = torch.zeros_like(self.models.grad_MN)
        generator = torch.Generator().manual_seed(0)
        self._matrices = {p: p.shape for p in self.models.places.values() if self._pays(p.shape)}
        self._q = {
            place: torch.randn(shape[1], rank, generator=generator).to(self.models.flat_MN.device)
            for place, shape in self._matrices.items()
        }
        in_matrices = sum(place.end - place.begin for place in self._matrices)
        sent = sum(rank * sum(shape) for shape in self._matrices.values())
        self._bits = 32.0 * (self.models.numel - in_matrices + sent)

    def _pays(self, shape: torch.Size) -> bool:
        return len(shape) == 2 and self._rank * sum(shape) < math.prod(shape)

    def before_step(self) -> None:
        self._steps += 1
        grad_MN = self.models.grad_MN
        if self._steps <= self._start:
            grad_MN.copy_(grad_MN.mean(0))
            self.bits += 32 * self.models.numel
            return
        grad_MN += self._error_MN
        mean_N = grad_MN.mean(0)
        for place, q in self._q.items():
            rows = Models.view(grad_MN, place)
            p, _ = torch.linalg.qr((rows @ q).mean(0))
            q = self._q[place] = (rows.transpose(1, 2) @ p).mean(0)
            mean_N[place.begin : place.end] = (p @ q.T).flatten()
            self._error_MN[:, place.begin : place.end] = (rows - p @ q.T).flatten(1)
        grad_MN.copy_(mean_N)
        self.bits += self._bits


# --- this library


class Meeting:
    """Lets M threads exchange tensors."""

    def __init__(self, num: int) -> None:
        self._barrier = threading.Barrier(num, timeout=600)
        self._rows: list[Tensor] = [torch.empty(0)] * num

    def all_gather(self, row: Tensor, place: int) -> Tensor:
        """Return the rows of all threads, [M, ...]."""
        self._rows[place] = row
        self._barrier.wait()
        rows = torch.stack(self._rows)
        self._barrier.wait()
        return rows

    def abort(self) -> None:
        """Let the other threads fail, too."""
        self._barrier.abort()


class InProcess(HierCommunicator):
    """The collectives between nodes, for workers that are threads."""

    def __init__(self, topology: Topology, meeting: Meeting) -> None:
        super().__init__(topology)
        self._meeting = meeting

    def exchange(self, message_B: Tensor) -> Tensor:
        return self._meeting.all_gather(message_B, self.topology.node_index)

    def all_reduce(self, shard_S: Tensor, op: Any = None) -> None:
        shard_S.copy_(self._meeting.all_gather(shard_S, self.topology.node_index).sum(0))

    def all_to_all(self, messages_MB: Tensor) -> Tensor:
        return self._meeting.all_gather(messages_MB, self.topology.node_index)[:, self.topology.node_index]


class Updates(Way):
    """`UpdateState` of each worker, in its own thread, with collectives as between processes."""

    def __init__(self, models: Models, **options: Any) -> None:
        super().__init__(models)
        self._config, num = UpdatesConfig(overlap=False, **options), self.models.num
        self.gathers = self._config.path is Sparse
        self._meeting = Meeting(num)
        self._threads = ThreadPoolExecutor(num, initializer=torch.set_num_threads, initargs=(1,))
        self.states: list[UpdateState] = []
        self._exchanges: list[Exchange] = []
        for rank in range(num):
            topology = Topology(tuple((each,) for each in range(num)), rank)
            row_N = self.models.flat_MN[rank]
            exchange = Exchange(self._config, topology, row_N.device, row_N.numel(), LogOnce(rank))
            exchange.communicator = InProcess(topology, self._meeting)
            self._exchanges.append(exchange)
            self.states.append(new_state(Slices([row_N], [Part(0, 0, row_N.numel())]), exchange, self._config))

    def after_step(self, step: int, lr: float) -> None:
        since = step % self._config.sync_every
        if since == 0:
            self._all(lambda state: state.exchange_step())
        elif self._config.changes_without_exchange(since, self.models.num):
            self._all(lambda state: state.step_without_exchange(since))
        self.bits = 8 * self._exchanges[0].stats.bytes_between_nodes / self.received_times

    def results(self) -> Tensor:
        return self.states[0].read_global()[None]

    def close(self) -> None:
        self._threads.shutdown()

    def _all(self, call: Callable[[UpdateState], None]) -> None:
        def one(state: UpdateState) -> None:
            try:
                with torch.no_grad():
                    call(state)
            except BaseException:
                self._meeting.abort()
                raise

        raised = [future.exception() for future in [self._threads.submit(one, state) for state in self.states]]
        for error in sorted(filter(None, raised), key=lambda each: isinstance(each, threading.BrokenBarrierError)):
            raise error


# --- models that meet every H steps


class Outer(Way):
    """DiLoCo: every ``every`` steps, the mean of the workers' changes is the gradient of an SGD with Nesterov momentum
    on the shared parameters, from which all workers continue.

    With ``parts`` > 1, Streaming DiLoCo without its overlap: contiguous parts of the parameters take turns, so that
    each is exchanged every ``every`` steps. With ``bits=4``, a worker sends its change in E3M0, as there.
    """

    def __init__(
        self, models: Models, every: int, outer_lr: float = 1.0, momentum: float = 0.0, parts: int = 1, bits: int = 32
    ) -> None:
        super().__init__(models)
        if bits not in (4, 32):
            raise ValueError(f"bits={bits} must be 4 or 32")
        self._value_bits = bits
        self._every, self._outer_lr, self._momentum = every, outer_lr, momentum
        self.shared_N = self.models.flat_MN[0].clone()
        self._velocity_N = torch.zeros_like(self.shared_N)
        cuts = [round(part * self.models.numel / parts) for part in range(parts + 1)]
        self._parts = [slice(begin, end) for begin, end in zip(cuts, cuts[1:], strict=False)]

    def after_step(self, step: int, lr: float) -> None:
        for index, part in enumerate(self._parts):
            if (step - index * self._every // len(self._parts)) % self._every == 0:
                self._meet(part)

    def _meet(self, part: slice) -> None:
        shared, velocity = self.shared_N[part], self._velocity_N[part]
        change = self._mean_change(part)
        velocity.mul_(self._momentum).add_(change)
        shared.sub_(change + self._momentum * velocity, alpha=self._outer_lr)
        self.models.flat_MN[:, part] = shared

    def _mean_change(self, part: slice) -> Tensor:
        """Return the mean change of the shared parameters, before the outer step."""
        self.bits += self._value_bits * (part.stop - part.start)
        change_MN = self.shared_N[part] - self.models.flat_MN[:, part]
        return (e3m0(change_MN) if self._value_bits == 4 else change_MN).mean(0)

    def results(self) -> Tensor:
        return self.models.flat_MN.mean(0, keepdim=True)


def e3m0(rows_MN: Tensor) -> Tensor:
    """Round to a sign and one of seven powers of two from each row's largest down, or to 0: 4 bits per value."""
    power_MN = rows_MN.abs().clamp_min(1e-30).log2().round()
    kept_MN = power_MN > power_MN.amax(1, keepdim=True) - 7
    return rows_MN.sign() * power_MN.exp2() * kept_MN


class SparseOuter(Outer):
    """SparseLoCo: the ``density`` largest entries of a worker's change plus ``decay`` times its unsent rest, in two
    bits. As in the published code, an entry changes by the mean over the workers that sent it."""

    gathers = True

    def __init__(self, models: Models, every: int, density: float, decay: float = 0.95, outer_lr: float = 1.0) -> None:
        super().__init__(models, every, outer_lr)
        self._decay = decay
        path = Sparse.of(TensorSpec(self.models.num, 1, self.models.numel), density, TWO_BIT)
        assert path is not None
        self._path = path
        self._error_MN = torch.zeros_like(self.models.flat_MN)

    def _mean_change(self, part: slice) -> Tensor:
        messages = []
        for row_N, error_N in zip(self.models.flat_MN, self._error_MN, strict=True):
            change_N = self.shared_N - row_N
            kept_N = error_N.mul(self._decay)
            messages.append(compress(change_N, kept_N, error_N, self._path.k, TWO_BIT))
        sent_MN = torch.empty_like(self._error_MN)
        for message, sent_N in zip(messages, sent_MN, strict=True):
            accumulate(message[None], sent_N, self._path.k, TWO_BIT)
        self.bits += 8 * self._path.message_bytes
        return sent_MN.sum(0) / sent_MN.count_nonzero(0).clamp_min(1)

    def results(self) -> Tensor:
        return self.shared_N[None]


# --- DeMo


class DeMo(Way):
    """The reference's rule on square blocks of each matrix, at most 64 wide: momentum gains the gradient and loses the
    sent entries, and the parameters lose lr times the sign of the sum of the sent entries."""

    steps_itself = gathers = True

    def __init__(self, models: Models, density: float, decay: float = 0.999) -> None:
        super().__init__(models)
        self._decay = decay
        self._momentum_MN = torch.zeros_like(self.models.flat_MN)
        self._blocks = {place: self._block_of(place.shape) for place in self.models.places.values()}
        self._k = {place: max(1, round(density * math.prod(block))) for place, block in self._blocks.items()}
        sides = {side for block in self._blocks.values() for side in block}
        self._basis = {side: cosines(side).to(self.models.flat_MN.device) for side in sides}
        pairs = sum(
            self._k[place] * math.prod(place.shape) // math.prod(block) for place, block in self._blocks.items()
        )
        self._bits = pairs * (16 + 12.0)  # a bfloat16 value, and an index into a block of 4,096

    @staticmethod
    def _block_of(shape: torch.Size) -> tuple[int, int]:
        rows, columns = (1, *shape)[-2:]
        return math.gcd(rows, 64), math.gcd(columns, 64)

    def after_step(self, step: int, lr: float) -> None:
        models = self.models
        self._momentum_MN.mul_(self._decay).add_(models.grad_MN, alpha=lr)
        for place, (rows, columns) in self._blocks.items():
            grid = (models.num, -1, rows, place.shape[-1] // columns, columns)
            momentum = self._momentum_MN[:, place.begin : place.end].view(grid).transpose(2, 3)
            sent = self._largest(momentum, rows, columns, self._k[place])
            momentum.sub_(sent)
            sign = sent.sum(0, keepdim=True).sign_().transpose(2, 3).reshape(1, *place.shape)
            models.view(models.flat_MN, place).sub_(sign, alpha=lr)
        self.bits += self._bits

    def _largest(self, blocks: Tensor, rows: int, columns: int, k: int) -> Tensor:
        """Return each block's ``k`` largest coefficients, as entries."""
        left, right = self._basis[rows], self._basis[columns]
        coefficients = (left @ blocks @ right.T).flatten(-2)
        places = coefficients.abs().topk(k).indices
        kept = torch.zeros_like(coefficients).scatter_(-1, places, coefficients.gather(-1, places))
        entries: Tensor = left.T @ kept.view(blocks.shape) @ right
        return entries


def cosines(side: int) -> Tensor:
    """Return the orthonormal cosine basis (DCT-II), one row per frequency."""
    frequency, place = torch.arange(side)[:, None], torch.arange(side)
    basis = torch.cos(math.pi * (place + 0.5) * frequency / side) * math.sqrt(2 / side)
    basis[0] = 1 / math.sqrt(side)
    return basis
