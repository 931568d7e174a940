"""Gather the updated parameters of all ranks, packed into flat buffers or in place.

Rank w packs its parameters, of all dtypes, aligned to `ALIGN` bytes. Shares are padded to the largest share:

    share_B of rank w     [ p0 | p4 | p7 | padding ]
    gathered              share_B of rank 0, share_B of rank 1, ... share_B of rank W-1

Each collective gathers at most `PIECE` bytes, to bound the buffer. All ranks compute the sizes from shapes and owners.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.exchange.communicator import HierCommunicator
from lightning_sparse.sharding import Parts, flat_view

ALIGN = 16
PIECE = 16 * 2**20
PIECE_CUDA = 128 * 2**20
"""An NCCL collective takes about 20 us at any size, and a GPU has memory for a larger buffer."""
LARGE = 2**18


@dataclass
class Piece:
    """One all-gather: for each owner, the bytes that it sends (`segments`) and their place in its buffer."""

    nbytes: int
    segments: list[list[Tensor]]
    places: list[list[slice]]

    def exchange(self, communicator: HierCommunicator, index: int, buffer_B: Tensor) -> None:
        """Send the segments of rank `index`, and overwrite the segments of other ranks."""
        _copy([buffer_B[place] for place in self.places[index]], self.segments[index])
        gathered_WB = communicator.gather(buffer_B[: self.nbytes]).view(len(self.segments), self.nbytes)
        for owner, received_B in enumerate(gathered_WB):
            if owner != index:
                _copy(self.segments[owner], [received_B[place] for place in self.places[owner]])


class FlatGather:
    """Gathers the parts that each rank owns.

    Args:
        parameters: all parameters, in the same order and with the same strides on all ranks.
        piece: maximum bytes of one packed collective.
        large: minimum bytes of a part on a CPU that is broadcast in place.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        parts: Sequence[Parts],
        index: int,
        size: int,
        *,
        piece: int | None = None,
        large: int = LARGE,
    ) -> None:
        self.index = index
        self._size = size
        self._in_place_from = large
        if piece is None:
            piece = PIECE_CUDA if any(p.is_cuda for p in parameters) else PIECE
        self._cut = max(ALIGN, piece // size // ALIGN * ALIGN)
        self._parameters, self._parts = parameters, parts
        self._addresses: list[int] = []
        self._prepare()

    @property
    def nbytes(self) -> int:
        """Bytes that this rank receives per gather."""
        packed = sum((self._size - 1) * piece.nbytes for pieces in self._pieces.values() for piece in pieces)
        return packed + sum(flat.numel() for owner, flat in self._large if owner != self.index)

    @torch.no_grad()
    def __call__(self, communicator: HierCommunicator) -> None:
        """Update all parameters from their owners. Collectives of the scope."""
        if self._size == 1:
            return
        if [p.data_ptr() for p in self._parameters] != self._addresses:  # the user replaced p.data
            self._prepare()
        under_way = [communicator.broadcast(flat, owner) for owner, flat in self._large]
        for device, pieces in self._pieces.items():
            buffer_B = torch.empty(pieces[0].nbytes, dtype=torch.uint8, device=device)
            for piece in pieces:
                piece.exchange(communicator, self.index, buffer_B)
        for wait in under_way:
            wait()

    def _prepare(self) -> None:
        self._addresses = [p.data_ptr() for p in self._parameters]
        self._large: list[tuple[int, Tensor]] = []
        shares: dict[torch.device, list[list[Tensor]]] = {}  # by device, in order of first appearance; then by owner
        for parameter, parts in zip(self._parameters, self._parts, strict=True):
            for part in parts if parameter.numel() else ():
                flat = flat_view(parameter)[part.begin : part.end].view(torch.uint8)
                if flat.numel() >= self._in_place_from and flat.device.type == "cpu":
                    # Packing and Gloo's all-gather copy the data: 88 ms packed and 32 ms in place for 100 MB between
                    # two ranks of a machine.
                    self._large.append((part.owner, flat))
                else:
                    shares.setdefault(parameter.device, [[] for _ in range(self._size)])[part.owner].append(flat)
        self._pieces = {device: self._cut_up(of_device) for device, of_device in shares.items()}

    def _cut_up(self, shares: list[list[Tensor]]) -> list[Piece]:
        total = max(sum(aligned(flat.numel()) for flat in share) for share in shares)
        begins = range(0, total, self._cut)
        pieces = [Piece(min(self._cut, total - b), [[] for _ in shares], [[] for _ in shares]) for b in begins]
        for owner, share in enumerate(shares):
            at = 0
            for flat in share:
                self._lay(flat, at, owner, pieces)
                at += aligned(flat.numel())
        return pieces

    def _lay(self, flat: Tensor, at: int, owner: int, pieces: list[Piece]) -> None:
        done = 0
        while done < flat.numel():
            index, begin = divmod(at + done, self._cut)
            count = min(flat.numel() - done, self._cut - begin)
            pieces[index].segments[owner].append(flat[done : done + count])
            pieces[index].places[owner].append(slice(begin, begin + count))
            done += count


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)
