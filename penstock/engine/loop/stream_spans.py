"""Spans of an engine's part of requests: one for each stream whose trace is sampled.

Names are those of vLLM's spans. A stream costs a few microseconds when it begins and when it ends; nothing is
done per token, and nothing at all while no stream is traced.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from penstock.engine.base import StepRows
from penstock.engine.loop.stats import EngineStats, StreamTimes
from penstock.telemetry.spans import Attribute, BatchSpanExporter, SpanData, present
from penstock.telemetry.trace_context import TraceContext, read_sent
from penstock.wire.frames import FinishReason
from penstock.wire.messages import Submit

_REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.GRAMMAR: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


@dataclass(frozen=True, slots=True)
class _Begun:
    trace: TraceContext
    resumed: int
    adapter: str | None
    temperature: float
    top_p: float


@dataclass(frozen=True, slots=True)
class EndedStream:
    """A traced stream that has ended. Times are seconds of the monotonic clock."""

    trace: TraceContext | None
    ended_at: float
    rank: int
    model: str
    begun: _Begun
    times: StreamTimes
    generated: int
    reason: str
    """As in finish reasons; of one that failed, the error's code. Messages are left out: they may quote the
    request."""
    failed: bool

    @property
    def began_at(self) -> float:
        return self.times.arrived


def describe(stream: EndedStream) -> SpanData:
    """The contents of the stream's span."""
    times, end, begun = stream.times, stream.ended_at, stream.begun
    text = times.max_tokens > 0
    ran, decoded = times.admitted > 0, text and times.admitted > 0 and times.first > 0
    attributes: dict[str, Attribute | None] = {
        "gen_ai.request.model": begun.adapter or stream.model,
        "gen_ai.response.finish_reasons": [stream.reason],
        "gen_ai.request.max_tokens": times.max_tokens if text else None,
        "gen_ai.request.temperature": begun.temperature if text else None,
        "gen_ai.request.top_p": begun.top_p if text else None,
        "gen_ai.usage.prompt_tokens": times.prompt,
        "gen_ai.usage.completion_tokens": stream.generated if text else None,
        "gen_ai.latency.e2e": end - times.arrived,
        "gen_ai.latency.time_in_queue": times.admitted - times.arrived if ran else None,
        "gen_ai.latency.time_to_first_token": times.first - times.arrived if decoded else None,
        "gen_ai.latency.time_in_model_prefill": max(0.0, times.first - times.admitted) if decoded else None,
        "gen_ai.latency.time_in_model_decode": end - times.first if decoded else None,
        "gen_ai.latency.time_in_model_inference": end - times.admitted if ran else None,
        "error.type": stream.reason if stream.failed else None,
        "penstock.engine": stream.rank,
        "penstock.cached_tokens": times.cached,
        "penstock.preemptions": times.preemptions,
        "penstock.resumed_tokens": (begun.resumed if text else 0) or None,
    }
    events: list[tuple[str, float, dict[str, Attribute]]] = []
    if ran:
        events.append(("admitted", times.admitted, {}))
    if decoded and not begun.resumed:
        events.append(("first_token", times.first, {}))
    error = stream.reason if stream.failed else None
    return SpanData("llm_request", present(attributes), events, error, kind="internal")


class StreamSpans:
    """The traced streams of one engine, by their numbers."""

    def __init__(
        self, exporter: BatchSpanExporter[EndedStream] | None, stats: EngineStats, rank: int, model: str
    ) -> None:
        """``exporter`` None: no stream is traced."""
        self._exporter = exporter
        self._stats = stats
        self._rank = rank
        self._model = model
        self._random = random.Random()
        self._begun: dict[int, _Begun] = {}

    def begin(self, request: Submit) -> None:
        """The engine has accepted a stream."""
        trace = read_sent(request.trace, self._random) if request.trace and self._exporter else None
        if trace is not None:
            sampling = request.sampling
            self._begun[request.stream] = _Begun(
                trace, request.resumed, request.adapter, sampling.temperature, sampling.top_p
            )

    def on_rows(self, rows: StepRows, now: float) -> None:
        """The step's rows, which :class:`EngineStats` has counted."""
        if not self._begun or (rows.finish is None and not rows.failed):
            return
        if rows.finish is not None:
            for row in np.flatnonzero(rows.finish).tolist():
                begun = self._begun.pop(int(rows.stream[row]), None)
                if begun is not None:
                    self._end(begun, rows, row, now)
        for failure in rows.failed:
            begun = self._begun.pop(failure.stream, None)
            if begun is not None:
                times = self._stats.times_of(failure.stream)
                self._add(begun, times, now, failure.position, failure.code, failed=True)

    def _end(self, begun: _Begun, rows: StepRows, row: int, now: float) -> None:
        assert rows.finish is not None
        times = self._stats.times_of(int(rows.stream[row]))
        reason = "stop" if times.stopped else _REASONS[FinishReason(int(rows.finish[row]))]
        count = 1 if rows.count is None else int(rows.count[row])
        self._add(begun, times, now, int(rows.position[row]) + count, reason, failed=reason == "abort")

    def _add(
        self, begun: _Begun, times: StreamTimes, now: float, generated: int, reason: str, *, failed: bool
    ) -> None:
        assert self._exporter is not None, "the stream is traced"
        self._exporter.add(
            EndedStream(
                trace=begun.trace,
                ended_at=now,
                rank=self._rank,
                model=self._model,
                begun=begun,
                times=times,
                generated=generated,
                reason=reason,
                failed=failed,
            )
        )

    def drop(self, streams: Iterable[int]) -> None:
        """Streams of an API server that is gone: nobody waits for their spans' parents."""
        for stream in streams:
            self._begun.pop(stream, None)

    @property
    def counts(self) -> Counter[str]:
        """Spans by state: exported, failed, dropped."""
        return self._exporter.counts if self._exporter else Counter()

    def close(self) -> None:
        """Export what waits, for at most 2 seconds."""
        if self._exporter is not None:
            self._exporter.close()
