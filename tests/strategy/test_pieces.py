"""Ranges of parameters are read from the pieces of a node's devices as they would be cut from the whole."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sparse.engine import Piece, State, flattened, read
from lightning_sparse.fsdp import residual_of


@given(st.data())
def test_a_range_is_what_a_cut_of_the_whole_gives(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    saved, now = (list(data.draw(st.permutations(range(len(shape))))) for _ in range(2))
    whole = torch.arange(1.0, prod(shape) + 1).view(shape)
    numel, flat = whole.numel(), flattened(whole, (shape, saved))
    edges = st.integers(0, numel)
    cuts = sorted({0, numel, *data.draw(st.lists(edges, max_size=5))})
    devices = [State(layouts={"w": (shape, saved)}) for _ in range(data.draw(st.integers(1, 3)))]
    missing = torch.zeros(numel, dtype=torch.bool)
    for first, last in zip(cuts, cuts[1:], strict=False):
        index = data.draw(st.integers(-1, len(devices) - 1))
        if index < 0:
            missing[first:last] = True
        else:
            devices[index].pieces.setdefault("residual", []).append(Piece("w", first, last, flat[first:last]))
    begin, end = sorted(data.draw(st.tuples(edges, edges)))
    flat[missing] = 0.0
    there = flat.view([shape[dim] for dim in saved]).permute([saved.index(dim) for dim in range(len(shape))])
    expected = flattened(there, (shape, now))[begin:end]
    found = read(devices, residual_of, "w", begin, end, (shape, now))
    assert torch.equal(torch.zeros(end - begin) if found is None else found, expected)
    assert read(devices, residual_of, "other", begin, end, (shape, now)) is None
    assert read(devices, residual_of, "w", begin, end, ([*shape, 2], [*now, len(now)])) is None
