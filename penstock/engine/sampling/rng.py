"""Random numbers from a seed and a token position: splitmix64, for every engine that samples here.

A draw is a function of (seed, position) alone, so a stream gets the same tokens whatever runs beside it, and
continues unchanged when another engine resumes it. Constants are those of splitmix64 (Steele, Lea, Flood:
Fast splittable pseudorandom number generators, 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import I32

U64 = NDArray[np.uint64]

GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio."""
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(values: U64) -> U64:
    """The finalizer of splitmix64, in place: uint64[N] to well-mixed uint64[N]."""
    values ^= values >> np.uint64(30)
    values *= _MIX_1
    values ^= values >> np.uint64(27)
    values *= _MIX_2
    values ^= values >> np.uint64(31)
    return values


def uniform(seed: U64, position: U64) -> NDArray[np.float64]:
    """float64[N] in [0, 1) with 52 random bits, from uint64[N] seeds and positions.

    52 and not 53 bits: the product with a float64 total then stays below the total after rounding.
    """
    bits = mix(mix(seed + GAMMA) + position * GAMMA)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def stream_state(seed: int) -> int:
    """uint64: where the generator of a stream with ``seed`` starts, for :func:`token_indexes`."""
    return int(mix(np.array([seed], np.uint64))[0])


def token_indexes(state: U64, position: I32, choices: int) -> I32:
    """int32[N] in [0, choices): the draw at ``position`` of streams with :func:`stream_state` ``state``."""
    drawn = position.astype(np.uint64)
    drawn += np.uint64(1)
    drawn *= GAMMA
    drawn += state
    mix(drawn)
    drawn >>= np.uint64(32)
    drawn *= np.uint64(choices)
    drawn >>= np.uint64(32)
    return drawn.astype(np.int32)
