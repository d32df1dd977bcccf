"""Trace contexts: which are valid, which are made, and what is passed on."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.upstream.exchange import Headers
from penstock.telemetry.trace_context import (
    TraceContext,
    TracePropagator,
    inject_trace_context,
    read_traceparent,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01".encode()
OTHERS: Headers = [(b"tracestate", b"v=1"), (b"baggage", b"user=a"), (b"x-other", b"o")]


def test_a_valid_context() -> None:
    assert read_traceparent(VALID) == TraceContext(int(TRACE, 16), int(SPAN, 16), sampled=True)
    for flags, sampled in ((b"00", False), (b"03", True), (b"fe", False)):
        trace = read_traceparent(VALID[:-2] + flags)
        assert trace is not None
        assert trace.sampled == sampled


def test_later_versions_may_say_more() -> None:
    for value in (b"01" + VALID[2:], b"cc" + VALID[2:] + b"-what-ever"):
        trace = read_traceparent(value)
        assert trace is not None
        assert trace.trace_id_hex == TRACE


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"ff" + VALID[2:],
        VALID + b"-more",
        VALID + b"0",
        b"01" + VALID[2:] + b"more",
        VALID.upper(),
        VALID[:-1],
        f"00-{'0' * 32}-{SPAN}-01".encode(),
        f"00-{TRACE}-{'0' * 16}-01".encode(),
        VALID.replace(b"-", b"_"),
    ],
)
def test_no_valid_context(value: bytes) -> None:
    assert read_traceparent(value) is None


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_what_is_made_can_be_read(trace_id: int, span_id: int, sampled: bool) -> None:
    made = TraceContext(trace_id, None, span_id, sampled)
    assert read_traceparent(made.traceparent) == TraceContext(trace_id, span_id, sampled=sampled)


def test_without_spans_contexts_pass_and_none_is_made() -> None:
    tracing = TracePropagator(spans=False)
    headers = [(b"traceparent", VALID), *OTHERS]
    trace = tracing.extract(headers)
    assert trace is not None
    assert trace.trace_id_hex == TRACE
    assert inject_trace_context(headers, trace) == headers
    assert tracing.extract(OTHERS) is None
    assert inject_trace_context(OTHERS, None) == OTHERS


def test_the_span_is_the_parent_of_what_comes_behind() -> None:
    headers = [(b"traceparent", VALID), *OTHERS]
    trace = TracePropagator(spans=True, rng=random.Random(0)).extract(headers)
    assert trace is not None
    assert (trace.trace_id_hex, trace.parent_id, trace.sampled) == (TRACE, int(SPAN, 16), True)
    passed = inject_trace_context(headers, trace)
    assert passed == [*OTHERS, (b"traceparent", trace.traceparent)]
    assert trace.traceparent not in (VALID, b"")
    assert trace.traceparent.startswith(f"00-{TRACE}-".encode())


@pytest.mark.parametrize("given", [[], [(b"traceparent", b"nonsense")], [(b"traceparent", VALID)] * 2])
def test_a_trace_begins_here(given: Headers) -> None:
    """The state of a context that is not valid is not passed on; baggage is no part of it."""
    tracing = TracePropagator(spans=True)
    first, second = tracing.extract([*given, *OTHERS]), tracing.extract([*given, *OTHERS])
    assert first is not None
    assert second is not None
    assert first.parent_id is None
    assert first.trace_id != second.trace_id
    assert inject_trace_context([*given, *OTHERS], first) == [
        *OTHERS[1:],
        (b"traceparent", first.traceparent),
    ]


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.0, 0, 0), (1.0, 1000, 1000), (0.5, 400, 600)])
def test_the_ratio_is_for_traces_that_begin_here(ratio: float, low: int, high: int) -> None:
    tracing = TracePropagator(spans=True, ratio=ratio, rng=random.Random(0))
    kept = [trace for _ in range(1000) if (trace := tracing.extract([])) is not None and trace.sampled]
    assert low <= len(kept) <= high
    others = tracing.extract([(b"traceparent", VALID)])
    assert others is not None
    assert others.sampled
