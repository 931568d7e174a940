"""Counter-based random numbers: a pure function of seed and counters, without state.

``bits`` mixes 64-bit counters with the finalizer of SplitMix64 (Steele et al. 2014). The streams of ``numpy.random``
may change between versions, but a run that resumes after an update of numpy must see the same order of samples.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def bits(seed: int, *counters: ArrayLike) -> NDArray[np.uint64]:
    """Return 64 random bits for each combination of counters. Counters are broadcast; at least one dimension.

    >>> bits(0, [1, 2], 3) == bits(0, [1, 2], [3, 3])
    array([ True,  True])
    """
    state = _mix(np.array([seed % 2**64], np.uint64))
    for counter in counters:
        state = _mix(state ^ (np.atleast_1d(np.asarray(counter)).astype(np.uint64) * _STEP + _FIRST))
    return state


def uniform(seed: int, *counters: ArrayLike) -> NDArray[np.float64]:
    """Return numbers in [0, 1), with 53 random bits each."""
    return (bits(seed, *counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffled(values: NDArray[np.int64], seed: int, *counters: int) -> NDArray[np.int64]:
    """Shuffle distinct `values`. The order depends only on the set of values, the seed and the counters."""
    if len(values) < 2:
        return values.copy()
    values = np.sort(values)
    width = np.uint64(int(len(values) - 1).bit_length())
    # One random key per value. The lowest bits of a key are the position of its value, so one sort suffices.
    keys = bits(seed, *counters, values) >> width << width | np.arange(len(values), dtype=np.uint64)
    keys.sort()
    return values[(keys & ((np.uint64(1) << width) - np.uint64(1))).astype(np.int64)]


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state + _STEP
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))
