"""Seeds of requests to vLLM, whose random numbers depend on the number of tokens that it has drawn."""

from __future__ import annotations

from penstock.wire.messages import Submit

SEED_STEP = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: keeps the seeds of resumed streams far apart."""
SEED_MASK = (1 << 63) - 1


def seed_of(request: Submit) -> int | None:
    """The seed for vLLM; None: the request has set none."""
    sampling = request.sampling
    return (sampling.seed + SEED_STEP * request.resumed) & SEED_MASK if sampling.seeded else None
