"""W3C trace context: reads the trace of a request, and writes it for those that serve its parts.

Level 1 of the recommendation: https://www.w3.org/TR/trace-context/. ``tracestate`` and ``baggage`` are
passed on unchanged.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

Headers: TypeAlias = list[tuple[bytes, bytes]]
TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
SAMPLED = 1
MAX_TRACESTATE = 512
"""Characters of a tracestate that is kept; the recommendation asks for as many."""
_FIELDS = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Trace context of one request. Trace ids have 128 bits, span ids 64."""

    trace_id: int
    parent_id: int | None
    """The client's span; None: the trace starts here."""
    span_id: int | None = None
    """This process's span; None: it creates none."""
    sampled: bool = False
    """Whether spans of this trace are recorded."""
    state: str = ""
    """The client's tracestate."""

    @property
    def trace_id_hex(self) -> str:
        """The trace id as 32 hexadecimal digits, the form used in logs."""
        return f"{self.trace_id:032x}"

    @property
    def is_root(self) -> bool:
        """Whether the trace starts here, so that a received ``tracestate`` belongs to no valid context."""
        return self.parent_id is None

    @property
    def traceparent(self) -> bytes:
        """The ``traceparent`` header with this process's span as parent."""
        return f"00-{self.trace_id_hex}-{self.span_id:016x}-{int(self.sampled):02x}".encode()

    @property
    def sent(self) -> str:
        """The context for another process of the server: ``traceparent``, a space and ``tracestate``."""
        return f"{self.traceparent.decode()} {self.state}"


def read_sent(value: str, rng: random.Random) -> TraceContext | None:
    """The context of a span whose parent is that of a :attr:`TraceContext.sent`; None when it is invalid."""
    traceparent, _, state = value.partition(" ")
    parent = read_traceparent(traceparent.encode())
    if parent is None:
        return None
    return TraceContext(parent.trace_id, parent.parent_id, rng.getrandbits(64) or 1, parent.sampled, state)


def read_traceparent(value: bytes) -> TraceContext | None:
    """Parse a ``traceparent`` header; None when it is invalid. Later versions may append fields; their flags
    are those of version 00."""
    found = _FIELDS.fullmatch(value)
    if found is None or (found[1] == b"00" and found[5] is not None):
        return None
    return TraceContext(int(found[2], 16), int(found[3], 16), sampled=bool(int(found[4], 16) & SAMPLED))


class TracePropagator:
    """Continues the traces of clients and starts new ones.

    Without ``spans`` a gateway passes contexts on unchanged and starts no trace: its span would be a parent
    that is never exported, and its sampling flag would decide for the spans of model servers.
    """

    def __init__(self, *, spans: bool, ratio: float = 1.0, rng: random.Random | None = None) -> None:
        """``ratio`` is the sampled share of traces that start here; clients' traces keep their own flag."""
        self._spans = spans
        self._ratio = ratio
        self._rng = rng or random.Random()

    def extract(self, headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
        """The trace context of a request with ``headers``; None: it is not traced."""
        headers = list(headers)
        given = [value for name, value in headers if name == TRACEPARENT]
        parent = read_traceparent(given[0]) if len(given) == 1 else None
        if not self._spans:
            return parent
        bits = self._rng.getrandbits
        span_id = bits(64) or 1
        if parent is not None:
            state = b",".join(value for name, value in headers if name == TRACESTATE)
            kept = state.decode("latin-1") if len(state) <= MAX_TRACESTATE else ""
            return TraceContext(parent.trace_id, parent.parent_id, span_id, parent.sampled, kept)
        return TraceContext(bits(128) or 1, None, span_id, self._rng.random() < self._ratio)


def inject_trace_context(headers: Headers, trace: TraceContext | None) -> Headers:
    """The headers for the model server, with the gateway's span as parent if it has one."""
    if trace is None or trace.span_id is None:
        return headers
    dropped = {TRACEPARENT, TRACESTATE} if trace.is_root else {TRACEPARENT}
    kept = [(name, value) for name, value in headers if name not in dropped]
    return [*kept, (TRACEPARENT, trace.traceparent)]
