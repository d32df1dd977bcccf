"""W3C trace context: whose trace a request belongs to, and what the model server is told about it.

Level 1 of the recommendation: https://www.w3.org/TR/trace-context/. ``tracestate`` and ``baggage`` are the
business of others and are passed on as they are.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from penstock.gateway.upstream.http_client import Headers

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
SAMPLED = 1
_FIELDS = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Of one request. Ids are numbers, of 128 and 64 bits."""

    trace_id: int
    parent_id: int | None
    """The client's span; None: the trace begins here."""
    span_id: int | None = None
    """The gateway's; None: it makes none."""
    sampled: bool = False
    """Whether spans are to be kept."""

    @property
    def trace_id_hex(self) -> str:
        """The trace's id as logs have it."""
        return f"{self.trace_id:032x}"

    @property
    def is_root(self) -> bool:
        """There is no valid context that a ``tracestate`` would belong to."""
        return self.parent_id is None

    @property
    def traceparent(self) -> bytes:
        """The ``traceparent`` that makes the gateway's span the parent."""
        return f"00-{self.trace_id_hex}-{self.span_id:016x}-{int(self.sampled):02x}".encode()


def read_traceparent(value: bytes) -> TraceContext | None:
    """None for what is no ``traceparent``. Later versions may have more fields at the end; their flags are
    those of version 00."""
    found = _FIELDS.fullmatch(value)
    if found is None or (found[1] == b"00" and found[5] is not None):
        return None
    return TraceContext(int(found[2], 16), int(found[3], 16), sampled=bool(int(found[4], 16) & SAMPLED))


class TracePropagator:
    """What the gateway does with trace contexts.

    Without ``spans`` it has no part in traces: contexts are passed on as they are, and none is made (its span
    would be the parent of others without being there, and its flag would decide for model servers whether to
    keep theirs).
    """

    def __init__(self, *, spans: bool, ratio: float = 1.0, rng: random.Random | None = None) -> None:
        """``ratio`` is the share of traces that begin here and are kept; others' are kept if they say so."""
        self._spans = spans
        self._ratio = ratio
        self._rng = rng or random.Random()

    def extract(self, headers: Headers) -> TraceContext | None:
        """The trace that a request with ``headers`` belongs to; None: nobody traces it."""
        given = [value for name, value in headers if name == TRACEPARENT]
        parent = read_traceparent(given[0]) if len(given) == 1 else None
        if not self._spans:
            return parent
        bits = self._rng.getrandbits
        span_id = bits(64) or 1
        if parent is not None:
            return TraceContext(parent.trace_id, parent.parent_id, span_id, parent.sampled)
        return TraceContext(bits(128) or 1, None, span_id, self._rng.random() < self._ratio)


def inject_trace_context(headers: Headers, trace: TraceContext | None) -> Headers:
    """The headers that the model server gets: with the gateway's span as parent if there is one."""
    if trace is None or trace.span_id is None:
        return headers
    dropped = {TRACEPARENT, TRACESTATE} if trace.is_root else {TRACEPARENT}
    kept = [(name, value) for name, value in headers if name not in dropped]
    return [*kept, (TRACEPARENT, trace.traceparent)]
