"""Rendezvous hashing: which endpoint gets what none is known to have, the same one at every gateway.

Each endpoint has a weight for each key, and the highest one gets it, so an endpoint that comes or goes moves
its own share of the keys and no others. Source: Thaler and Ravishankar, "Using Name-Based Mappings to
Increase Hit Rates", 1998. Nothing here depends on a process: neither Python's hashes nor the order of
endpoints.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]

_FIRST, _SECOND = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)


def stable_hash(text: bytes) -> int:
    """64 bits, the same in all processes."""
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def rendezvous_weights(identities: Keys, key: int) -> Keys:
    """The weight of each endpoint for ``key``, both hashes of 64 bits. They are mixed as at the end of
    MurmurHash3: each bit of either changes half of a weight's."""
    mixed = identities ^ np.uint64(key)
    mixed ^= mixed >> _SHIFT
    mixed *= _FIRST
    mixed ^= mixed >> _SHIFT
    mixed *= _SECOND
    mixed ^= mixed >> _SHIFT
    return mixed
