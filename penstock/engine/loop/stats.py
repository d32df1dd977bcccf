"""Engine metrics: token counters and latency histograms (TTFT, ITL, TPOT, queue time and so on).

A step costs a few array operations, and no Python code per token or row. Streams are identified by their
numbers in the engine (:mod:`.peers`), as in :class:`StepRows`, so this serves every engine. Metrics have
vLLM's names, labels and meaning, see :mod:`penstock.metrics.families`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.engine.base import ACCEPTED_PER_POSITION, StepRows
from penstock.engine.loop.peers import FIRST_STREAMS
from penstock.metrics import families as f
from penstock.metrics.histogram import Histogram
from penstock.metrics.snapshot import Series, histogram_series
from penstock.wire.arrays import I8, I32
from penstock.wire.frames import FinishReason
from penstock.wire.messages import OVERLOADED, UNAVAILABLE, Submit
from penstock.wire.vectors import Vectors

REASONS = ("stop", "length", "abort", "error")
_REASON = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}

_STREAM = np.dtype(
    [
        # times in seconds of the loop's clock; 0: not yet
        ("arrived", np.float64),
        ("admitted", np.float64),
        ("first", np.float64),  # first token; for a resumed stream, arrival
        ("last", np.float64),  # latest tokens; before them, arrival
        ("prompt", np.int32),  # prompt tokens, without the output that a resumed stream brings
        ("cached", np.int32),  # of these, found in a prefix cache
        ("max_tokens", np.int32),  # 0: of inputs, which become vectors
        ("preemptions", np.int32),
        ("stopped", np.bool_),  # aborted because its text contains a stop string
    ],
    align=True,
)


class StreamTimes(NamedTuple):
    """What is known of one stream; times in seconds of the loop's clock, 0: not yet."""

    arrived: float
    admitted: float
    first: float
    prompt: int
    cached: int
    max_tokens: int
    preemptions: int
    stopped: bool


class EngineStats:
    """Updated by the engine loop. ``now`` is monotonic seconds throughout."""

    def __init__(self) -> None:
        self.changes = 0
        """Increases with every event that is counted."""
        self.steps = self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.waves = self.dummy_steps = 0
        """Waves and dummy steps of a rank in a wave group."""
        self.ended = dict.fromkeys(REASONS, 0)
        """Finished streams by reason."""
        self._iteration_tokens = Histogram(f.ITERATION_TOKENS.bounds)
        self._prompt_length = Histogram(f.PROMPT_LENGTH.bounds)
        self._generation_length = Histogram(f.GENERATION_LENGTH.bounds)
        self._max_tokens_asked = Histogram(f.PARAMS_MAX_TOKENS.bounds)
        self._preemption_count = Histogram(f.REQUEST_PREEMPTIONS.bounds)
        self._prefill_computed = Histogram(f.PREFILL_COMPUTED.bounds)
        self._ttft = Histogram(f.TTFT.bounds)
        self._itl = Histogram(f.ITL.bounds)
        self._tpot = Histogram(f.TPOT.bounds)
        self._e2e = Histogram(f.E2E.bounds)
        self._queue_time = Histogram(f.QUEUE_TIME.bounds)
        self._inference_time = Histogram(f.INFERENCE_TIME.bounds)
        self._prefill_time = Histogram(f.PREFILL_TIME.bounds)
        self._decode_time = Histogram(f.DECODE_TIME.bounds)

        self.refused_messages = 0
        """Messages of API servers that were invalid."""

        # -- per stream
        self._set_table(np.zeros(FIRST_STREAMS, _STREAM))

    def _set_table(self, table: NDArray[np.void]) -> None:
        """``table`` is indexed by stream; the attributes are views of its fields."""
        self._table = table
        self._arrived: NDArray[np.float64] = table["arrived"]
        self._admitted: NDArray[np.float64] = table["admitted"]
        self._first: NDArray[np.float64] = table["first"]
        self._last: NDArray[np.float64] = table["last"]
        self._prompt: I32 = table["prompt"]
        self._cached: I32 = table["cached"]
        self._max_tokens: I32 = table["max_tokens"]
        self._preemptions: I32 = table["preemptions"]
        self._stopped: NDArray[np.bool_] = table["stopped"]

    def refuse(self) -> None:
        """Count an invalid message of an API server."""
        self.changes += 1
        self.refused_messages += 1

    # -- streams come and go

    def arrive(self, request: Submit, now: float) -> None:
        """The engine has accepted a stream."""
        self.changes += 1
        while request.stream >= len(self._table):
            self._set_table(np.concatenate((self._table, np.zeros_like(self._table))))
        first, prompt, most = 0.0, len(request.prompt) // 4, request.sampling.max_tokens
        if request.pooling is not None:
            most = 0
        elif request.resumed:
            first, prompt = now, prompt - request.resumed
        self._table[request.stream] = (now, 0.0, first, now, prompt, 0, most, 0, False)

    def admit(self, streams: Iterable[tuple[int, int]], now: float) -> None:
        """Streams, as (API server, stream), have been given slots."""
        for _, stream in streams:
            self._admitted[stream] = now

    def preempt(self, streams: Iterable[tuple[int, int]]) -> None:
        """Streams, as (API server, stream), gave their KV blocks back, and wait for new ones."""
        for _, stream in streams:
            self._preemptions[stream] += 1

    def stop(self, streams: Iterable[int]) -> None:
        """Streams aborted because their text contains a stop string: they count as stopped."""
        for stream in streams:
            self._stopped[stream] = True

    def times_of(self, stream: int) -> StreamTimes:
        """Times of a stream whose end was counted last, or that runs."""
        entry = self._table[stream]
        return StreamTimes(*(entry[name].item() for name in StreamTimes._fields))

    def drop(self, streams: Collection[int]) -> None:
        """Count the streams of an API server that is gone as aborted."""
        self.changes += 1
        self.ended["abort"] += len(streams)

    # -- the step

    def on_rows(self, rows: StepRows, now: float, generated: int) -> None:
        """Count a step. ``generated``: tokens that the engine has generated since its start. Those of the
        step may be in later rows, where streams have a stream interval."""
        self.changes += 1
        self.steps += 1
        computed = self.prompt_tokens - self.cached_tokens
        tokens, self.generation_tokens = generated - self.generation_tokens, generated
        if len(rows.stream):
            at = rows.stream.astype(np.intp)
            if rows.vectors is None:
                self._on_tokens(at, rows, now)
            else:
                self._on_vectors(at, rows.vectors, now)
            if rows.finish is not None:
                ended = np.flatnonzero(rows.finish)
                counts = 1 if rows.count is None else rows.count[ended]
                self._on_ends(at[ended], rows.finish[ended], rows.position[ended] + counts, now)
        if tokens:
            self._iteration_tokens.add(tokens + self.prompt_tokens - self.cached_tokens - computed)
        for failure in rows.failed:
            if failure.code not in (OVERLOADED, UNAVAILABLE):  # it was displaced from the queue: it never ran
                self.ended["error"] += 1

    def on_dummy_step(self) -> None:
        """Count a step without work, made for the other ranks of the group."""
        self.changes += 1
        self.dummy_steps += 1

    def _on_tokens(self, at: NDArray[np.intp], rows: StepRows, now: float) -> None:
        since = now - self._last[at]
        self._last[at] = now
        begins = rows.position == 0
        if rows.count is not None:
            begins &= rows.count > 0
        if begins.any():
            self._on_first_tokens(at[begins], None if rows.cached is None else rows.cached[begins], now)
            since = since[~begins]
            count = None if rows.count is None else rows.count[~begins]
        else:
            count = rows.count
        if count is None:
            self._itl.observe(since)
        else:
            self._itl.observe_times(since / np.maximum(count, 1), count)

    def _on_vectors(self, at: NDArray[np.intp], vectors: Vectors, now: float) -> None:
        """Prompts count when the first of their inputs has become a vector."""
        begins = at[(vectors.width > 0) & (self._first[at] == 0)]
        self._first[begins] = now
        self.prompt_tokens += int(self._prompt[begins].sum())

    def _on_first_tokens(self, at: NDArray[np.intp], cached: I32 | None, now: float) -> None:
        self._first[at] = now
        self.prompt_tokens += int(self._prompt[at].sum())
        if cached is not None:
            self._cached[at] = cached
            self.cached_tokens += int(cached.sum())
        self._ttft.observe(now - self._arrived[at])

    def _on_ends(self, at: NDArray[np.intp], finish: I8, generated: I32, now: float) -> None:
        stopped = int(np.count_nonzero((finish == FinishReason.ABORT) & self._stopped[at]))
        self.ended["stop"] += stopped
        self.ended["abort"] -= stopped
        counts = np.bincount(finish, minlength=len(FinishReason)).tolist()
        for reason, name in _REASON.items():
            self.ended[name] += counts[reason]
        self._e2e.observe(now - self._arrived[at])
        self._prompt_length.observe(self._prompt[at])
        text = self._max_tokens[at] > 0
        if not text.all():
            computed = at[~text & (self._admitted[at] > 0)]
            self._queue_time.observe(self._admitted[computed] - self._arrived[computed])
            self._inference_time.observe(now - self._admitted[computed])
            at, generated = at[text], generated[text]
        arrived, admitted, first = self._arrived[at], self._admitted[at], self._first[at]
        self._generation_length.observe(generated)
        self._max_tokens_asked.observe(self._max_tokens[at])
        self._preemption_count.observe(self._preemptions[at])
        self._prefill_computed.observe(self._prompt[at] - self._cached[at])
        ran = admitted > 0
        self._queue_time.observe((admitted - arrived)[ran])
        self._inference_time.observe(now - admitted[ran])
        decoded = ran & (first > 0)
        self._prefill_time.observe(np.maximum(first - admitted, 0.0)[decoded])
        self._decode_time.observe(now - first[decoded])
        several = decoded & (generated > 1)
        self._tpot.observe((now - first[several]) / (generated[several] - 1))

    # -- reporting

    def series(self, engine: Mapping[str, float], *labels: str) -> Iterable[Series]:
        """All engine metrics except gauges. ``engine``: the counters of ``Engine.metrics()``; ``labels``: the
        values of ``model_name`` and ``engine``."""
        yield Series(f.STEPS.name, labels, self.steps)
        yield Series(f.DUMMY_STEPS.name, labels, self.dummy_steps)
        yield Series(f.WAVES.name, labels, self.waves)
        yield Series(f.REFUSED_MESSAGES.name, labels, self.refused_messages)
        yield Series(f.PROMPT_TOKENS.name, labels, self.prompt_tokens)
        external = engine.get("external_prompt_tokens_total", 0)
        for source, count in (
            ("local_compute", self.prompt_tokens - self.cached_tokens),
            ("local_cache_hit", max(0, self.cached_tokens - external)),
            ("external_kv_transfer", external),
        ):
            yield Series(f.PROMPT_TOKENS_BY_SOURCE.name, (*labels, source), count)
        yield Series(f.PROMPT_TOKENS_CACHED.name, labels, self.cached_tokens)
        yield Series(f.GENERATION_TOKENS.name, labels, self.generation_tokens)
        yield Series(f.PREEMPTIONS.name, labels, engine.get("preemptions_total", 0))
        yield Series(f.PREFIX_QUERIES.name, labels, engine.get("prefix_cache_queries_total", 0))
        yield Series(f.PREFIX_HITS.name, labels, engine.get("prefix_cache_hits_total", 0))
        yield Series(f.EXTERNAL_QUERIES.name, labels, engine.get("external_prefix_cache_queries_total", 0))
        yield Series(f.EXTERNAL_HITS.name, labels, engine.get("external_prefix_cache_hits_total", 0))
        yield Series(f.MM_QUERIES.name, labels, engine.get("mm_cache_queries_total", 0))
        yield Series(f.MM_HITS.name, labels, engine.get("mm_cache_hits_total", 0))
        yield Series(f.SPEC_DRAFTS.name, labels, engine.get("spec_decode_drafts_total", 0))
        yield Series(f.SPEC_DRAFT_TOKENS.name, labels, engine.get("spec_decode_draft_tokens_total", 0))
        yield Series(f.SPEC_ACCEPTED.name, labels, engine.get("spec_decode_accepted_tokens_total", 0))
        for family, counter in (
            (f.ENCODED_IMAGES, "pictures_encoded_total"),
            (f.ENCODER_CACHE_QUERIES, "encoder_cache_queries_total"),
            (f.ENCODER_CACHE_HITS, "encoder_cache_hits_total"),
            (f.ENCODER_CACHE_TOKENS, "encoder_cache_tokens"),
            (f.PAGES_WANTED, "pages_wanted_total"),
        ):
            yield Series(family.name, labels, engine.get(counter, 0))
        for name, count in engine.items():
            if name.startswith(ACCEPTED_PER_POSITION):
                position = name.removeprefix(ACCEPTED_PER_POSITION)
                yield Series(f.SPEC_ACCEPTED_PER_POSITION.name, (*labels, position), count)
        for reason, count in self.ended.items():
            yield Series(f.SUCCESS.name, (*labels, reason), count)
        for family, histogram in (
            (f.ITERATION_TOKENS, self._iteration_tokens),
            (f.PROMPT_LENGTH, self._prompt_length),
            (f.GENERATION_LENGTH, self._generation_length),
            (f.PARAMS_MAX_TOKENS, self._max_tokens_asked),
            (f.REQUEST_PREEMPTIONS, self._preemption_count),
            (f.PREFILL_COMPUTED, self._prefill_computed),
            (f.TTFT, self._ttft),
            (f.ITL, self._itl),
            (f.TPOT, self._tpot),
            (f.E2E, self._e2e),
            (f.QUEUE_TIME, self._queue_time),
            (f.INFERENCE_TIME, self._inference_time),
            (f.PREFILL_TIME, self._prefill_time),
            (f.DECODE_TIME, self._decode_time),
        ):
            yield histogram_series(family, labels, histogram)
