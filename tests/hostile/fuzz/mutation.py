"""Random changes of inputs, for runs without a fuzzer that measures coverage."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

MAX_BYTES = 4096
_BYTES = bytes((0, 1, 9, 10, 13, 32, 34, 44, 58, 91, 93, 123, 125, 127, 128, 192, 255))


def mutated(seeds: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Inputs without end, the same for the same ``seed``: changed, joined and cut ``seeds``."""
    rng = random.Random(seed)
    while True:
        data = bytearray(rng.choice(seeds))
        for _ in range(1 << rng.randrange(5)):
            _change(data, rng, seeds)
        yield bytes(data[:MAX_BYTES])


def _change(data: bytearray, rng: random.Random, seeds: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(6):
        case 0:
            data[at : at + 1] = bytes((rng.randrange(256),))
        case 1:
            data[at:at] = bytes((rng.choice(_BYTES),))
        case 2:
            del data[at : at + rng.randrange(1, 9)]
        case 3:
            end = at + rng.randrange(1, 17)
            data[at:at] = data[at:end] * rng.randrange(1, 4)
        case 4:
            other = rng.choice(seeds)
            begin = rng.randrange(len(other) + 1)
            data[at:] = other[begin:]
        case _ if data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
