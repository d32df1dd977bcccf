"""What an engine counts, against streams followed one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.engine.base import ACCEPTED_PER_POSITION, StepRows, StreamFailure
from penstock.engine.batch.rows import concat_rows
from penstock.engine.loop.peers import FIRST_STREAMS
from penstock.engine.loop.stats import EngineStats
from penstock.metrics import families as f
from penstock.metrics.families import MetricFamily
from penstock.metrics.merge import totals
from penstock.metrics.snapshot import Distribution, Labels, Snapshot, decode_snapshot, encode_snapshot
from penstock.wire.frames import FinishReason
from penstock.wire.submits import without_inputs
from penstock.wire.vectors import Vectors
from tests.engine.pooling.support import pooling_submit
from tests.engine.support import PROMPT, submit
from tests.metrics.views import view_of


def rows(*each: tuple[int, int, int, int, FinishReason]) -> StepRows:
    """Of (API server, stream, position, tokens, finish)."""
    server, stream, position, count, finish = (
        np.array(column, np.int32) for column in (zip(*each, strict=True) if each else [()] * 5)
    )
    plain = bool((count == 1).all())
    return StepRows(
        server,
        stream,
        position,
        np.zeros(count.sum(), np.int32),
        None if plain else count,
        finish.astype(np.int8) if finish.any() else None,
    )


def record(stats: EngineStats, made: StepRows, now: float, held: int = 0) -> None:
    """Counts a step whose tokens are all in its rows, except ``held``."""
    stats.on_rows(made, now, stats.generation_tokens + len(made.tokens) + held)


def values(stats: EngineStats, family: MetricFamily, **engine: float) -> dict[Labels, Any]:
    found = totals(view_of(Snapshot("engine 0", 0, 1, list(stats.series(engine, "m", "0")))))
    return found[family.name]


def value(stats: EngineStats, family: MetricFamily, **engine: float) -> Any:
    return values(stats, family, **engine)["m", "0"]


def total(stats: EngineStats, family: MetricFamily) -> tuple[int, float]:
    """Observations and their sum."""
    distribution = value(stats, family)
    assert isinstance(distribution, Distribution)
    return sum(distribution.counts), distribution.total


NONE, LENGTH, ABORT = FinishReason.NONE, FinishReason.LENGTH, FinishReason.ABORT


def test_the_life_of_a_stream() -> None:
    stats = EngineStats()
    stats.arrive(submit(3), 10.0)
    stats.admit([(0, 3)], 12.0)
    record(stats, rows((0, 3, 0, 1, NONE)), 15.0)
    record(stats, rows((0, 3, 1, 1, NONE)), 15.5)
    record(stats, rows((0, 3, 2, 1, LENGTH)), 17.0)
    assert total(stats, f.TTFT) == (1, 5.0)
    assert total(stats, f.ITL) == (2, 2.0)
    assert total(stats, f.TPOT) == (1, 1.0)
    assert total(stats, f.E2E) == (1, 7.0)
    assert total(stats, f.QUEUE_TIME) == (1, 2.0)
    assert total(stats, f.PREFILL_TIME) == (1, 3.0)
    assert total(stats, f.DECODE_TIME) == (1, 2.0)
    assert total(stats, f.INFERENCE_TIME) == (1, 5.0)
    assert total(stats, f.PROMPT_LENGTH) == (1, len(PROMPT))
    assert total(stats, f.GENERATION_LENGTH) == (1, 3)
    assert total(stats, f.ITERATION_TOKENS) == (3, len(PROMPT) + 3)
    assert (value(stats, f.PROMPT_TOKENS), value(stats, f.GENERATION_TOKENS)) == (len(PROMPT), 3)
    assert value(stats, f.STEPS) == 3


def test_a_row_of_several_tokens_is_as_many_latencies() -> None:
    stats = EngineStats()
    stats.arrive(submit(1), 1.0)
    stats.arrive(submit(2), 1.0)
    record(stats, rows((0, 1, 0, 1, NONE), (0, 2, 0, 1, NONE)), 2.0)
    record(stats, rows((0, 1, 1, 4, NONE), (0, 2, 1, 1, NONE)), 4.0)
    assert total(stats, f.ITL) == (5, 4.0)
    distribution = value(stats, f.ITL)
    assert distribution.counts[f.ITL.bounds.index(0.5)] == 4
    assert value(stats, f.GENERATION_TOKENS) == 7


def test_reasons() -> None:
    stats = EngineStats()
    for stream in range(6):
        stats.arrive(submit(stream), 1.0)
    record(stats, rows(*((0, stream, 0, 1, NONE) for stream in range(6))), 2.0)
    stats.stop([3])
    ends = rows(
        (0, 0, 1, 1, FinishReason.EOS),
        (0, 1, 1, 1, FinishReason.STOP_TOKEN),
        (0, 2, 1, 1, LENGTH),
        (0, 3, 1, 0, ABORT),
        (0, 4, 1, 0, ABORT),
    )
    ends.failed = [StreamFailure(0, 5, 1, "engine_error", "it broke")]
    record(stats, ends, 3.0)
    assert {labels[2]: count for labels, count in values(stats, f.SUCCESS).items()} == {
        "stop": 3,
        "length": 1,
        "abort": 1,
        "error": 1,
    }
    assert total(stats, f.E2E) == (5, 10.0)


def test_a_handle_is_used_again() -> None:
    stats = EngineStats()
    for arrival in (10.0, 20.0):
        stats.arrive(submit(3), arrival)
        record(stats, rows((0, 3, 0, 1, LENGTH)), arrival + 1)
    stats.arrive(submit(3), 30.0)
    record(stats, rows((0, 3, 0, 0, ABORT)), 31.0)
    assert values(stats, f.SUCCESS)["m", "0", "abort"] == 1
    assert total(stats, f.E2E) == (3, 3.0)


def test_a_stream_that_never_ran() -> None:
    stats = EngineStats()
    stats.arrive(submit(0), 1.0)
    record(stats, rows((0, 0, 0, 0, ABORT)), 3.0)
    assert total(stats, f.E2E) == (1, 2.0)
    assert total(stats, f.GENERATION_LENGTH) == (1, 0)
    for family in (f.TTFT, f.ITL, f.TPOT, f.QUEUE_TIME, f.INFERENCE_TIME, f.PREFILL_TIME, f.DECODE_TIME):
        assert total(stats, family) == (0, 0.0)
    assert total(stats, f.ITERATION_TOKENS) == (0, 0.0)
    assert value(stats, f.PROMPT_TOKENS) == 0


def test_a_resumed_stream_has_no_first_token_here() -> None:
    stats = EngineStats()
    stats.arrive(submit(0, prompt=[*PROMPT, 50, 51], resumed=2), 1.0)
    stats.admit([(0, 0)], 2.0)
    record(stats, rows((0, 0, 2, 1, NONE)), 4.0)
    record(stats, rows((0, 0, 3, 1, LENGTH)), 5.0)
    assert total(stats, f.TTFT) == (0, 0.0)
    assert total(stats, f.ITL) == (2, 4.0)
    assert value(stats, f.PROMPT_TOKENS) == 0
    assert total(stats, f.PROMPT_LENGTH) == (1, len(PROMPT))
    assert total(stats, f.PREFILL_TIME) == (1, 0.0)
    assert total(stats, f.DECODE_TIME) == (1, 4.0)


def test_there_is_room_for_any_number_of_open_streams() -> None:
    stats = EngineStats()
    streams = [(0, 5), (1, 6), (7, FIRST_STREAMS), (1, 5 * FIRST_STREAMS)]
    for at, (_, stream) in enumerate(streams):
        stats.arrive(submit(stream), float(1 + at))
    stats.admit(streams, 10.0)
    record(stats, rows(*((server, stream, 0, 1, LENGTH) for server, stream in streams)), 20.0)
    assert total(stats, f.TTFT) == (4, 19.0 + 18 + 17 + 16)
    assert total(stats, f.QUEUE_TIME) == (4, 9.0 + 8 + 7 + 6)


def test_streams_of_an_api_server_that_is_gone_count_as_aborted() -> None:
    stats = EngineStats()
    for stream in (1, 2, 3):
        stats.arrive(submit(stream), 1.0)
    record(stats, rows((1, 3, 0, 1, LENGTH)), 2.0)
    changes = stats.changes
    stats.drop([1, 2])
    assert values(stats, f.SUCCESS)["m", "0", "abort"] == 2
    assert stats.changes > changes, "or it would not be reported"


def test_invalid_messages() -> None:
    stats = EngineStats()
    stats.refuse()
    assert value(stats, f.REFUSED_MESSAGES) == 1
    assert stats.changes == 1


def test_counters_of_the_engine_itself() -> None:
    engine = {"preemptions_total": 3, "prefix_cache_queries_total": 40, "prefix_cache_hits_total": 16}
    assert value(EngineStats(), f.PREEMPTIONS, **engine) == 3
    assert value(EngineStats(), f.PREFIX_QUERIES, **engine) == 40
    assert value(EngineStats(), f.PREFIX_HITS, **engine) == 16
    assert value(EngineStats(), f.PREFIX_HITS) == 0


def test_accepted_tokens_by_their_position_in_the_draft() -> None:
    engine = {
        "spec_decode_accepted_tokens_total": 9,
        **{f"{ACCEPTED_PER_POSITION}{n}": 6 - 3 * n for n in (0, 1)},
    }
    stats = EngineStats()
    assert values(stats, f.SPEC_ACCEPTED_PER_POSITION, **engine) == {("m", "0", "0"): 6, ("m", "0", "1"): 3}
    assert f.SPEC_ACCEPTED_PER_POSITION.name not in totals(
        view_of(Snapshot("engine 0", 0, 1, list(stats.series({}, "m", "0"))))
    )
    first = Snapshot("engine 0", 0, 1, list(stats.series(engine, "m", "0")))
    longer = engine | {f"{ACCEPTED_PER_POSITION}10": 1}
    second = Snapshot("engine 0", 1, 1, list(stats.series(longer, "m", "0")))
    both = totals(view_of(decode_snapshot(encode_snapshot(first)), decode_snapshot(encode_snapshot(second))))
    assert both[f.SPEC_ACCEPTED_PER_POSITION.name] == {
        ("m", "0", "0"): 12,
        ("m", "0", "1"): 6,
        ("m", "0", "10"): 1,
    }, "of an engine's two starts"


@pytest.mark.parametrize("seed", range(5))
def test_against_streams_followed_one_by_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    stats = EngineStats()
    now, alive, latencies, first, spans = 1.0, {}, [], [], []  # type: ignore[var-annotated]
    handles = list(range(40))
    for _ in range(300):
        now += float(random.exponential(0.05))
        if handles and random.random() < 0.3:
            handle = handles.pop()
            stats.arrive(submit(handle), now)
            alive[handle] = [now, now, 0]
        now += 0.01
        step = []
        for handle, (arrived, last, position) in list(alive.items()):
            count = int(random.integers(0, 4)) if position else 1
            if not count:
                continue
            ends = random.random() < 0.1
            step.append((handle % 3, handle, position, count, LENGTH if ends else NONE))
            if position:
                latencies += [(now - last) / count] * count
            else:
                first.append(now - arrived)
            alive[handle] = [arrived, now, position + count]
            if ends:
                spans.append(now - arrived)
                del alive[handle]
                handles.append(handle)
        if step:
            record(stats, concat_rows([rows(*step)]), now)
    assert total(stats, f.ITL) == (len(latencies), pytest.approx(sum(latencies)))
    assert total(stats, f.TTFT) == (len(first), pytest.approx(sum(first)))
    assert total(stats, f.E2E) == (len(spans), pytest.approx(sum(spans)))
    places = np.searchsorted(f.ITL.bounds, latencies)
    assert list(value(stats, f.ITL).counts) == np.bincount(places, minlength=len(f.ITL.bounds) + 1).tolist()


def test_a_step_counts_the_tokens_that_it_made_whenever_they_are_sent() -> None:
    """A stream with an interval: its first token, then 255 steps whose tokens come as one row."""
    stats = EngineStats()
    stats.arrive(submit(1), 0.0)
    record(stats, rows((0, 1, 0, 1, NONE)), 1.0)
    for step in range(254):
        record(stats, rows(), 1.0 + step, held=1)
        assert value(stats, f.GENERATION_TOKENS) == 2 + step
    record(stats, rows((0, 1, 1, 255, LENGTH)), 300.0, held=1 - 255)
    assert value(stats, f.GENERATION_TOKENS) == 256
    assert total(stats, f.ITERATION_TOKENS) == (256, len(PROMPT) + 256)
    assert value(stats, f.ITERATION_TOKENS).counts[0] == 255, "steps of one token"


def test_prompt_tokens_by_source() -> None:
    stats = EngineStats()
    for stream in (1, 2):
        stats.arrive(submit(stream), 0.0)
    first = rows((0, 1, 0, 1, NONE), (0, 2, 0, 1, NONE))
    first.cached = np.array([0, 2], np.int32)
    record(stats, first, 1.0)
    record(stats, rows((0, 1, 1, 1, LENGTH), (0, 2, 1, 1, LENGTH)), 2.0)
    computed = 2 * len(PROMPT) - 2
    by_source = values(stats, f.PROMPT_TOKENS_BY_SOURCE, external_prompt_tokens_total=1)
    assert {labels[2]: count for labels, count in by_source.items()} == {
        "local_compute": computed,
        "local_cache_hit": 1,
        "external_kv_transfer": 1,
    }
    assert value(stats, f.PROMPT_TOKENS_CACHED) == 2
    assert value(stats, f.PROMPT_TOKENS) == 2 * len(PROMPT)
    assert total(stats, f.PREFILL_COMPUTED) == (2, computed)
    assert total(stats, f.ITERATION_TOKENS) == (2, computed + 4)


def test_preemptions_and_limits_of_a_stream() -> None:
    stats = EngineStats()
    for _ in range(2):  # the number is used again
        stats.arrive(submit(1, 7), 0.0)
        record(stats, rows((0, 1, 0, 1, NONE)), 1.0)
        stats.preempt([(0, 1), (0, 1)])
        record(stats, rows((0, 1, 1, 1, LENGTH)), 2.0)
    assert total(stats, f.REQUEST_PREEMPTIONS) == (2, 4)
    assert total(stats, f.PARAMS_MAX_TOKENS) == (2, 14)


def test_inputs_count_as_prompts_and_not_as_tokens_of_text() -> None:
    stats = EngineStats()
    stats.arrive(pooling_submit(7, [5, 6]), 1.0)
    stats.arrive(without_inputs(pooling_submit(8, [5, 6]), 1), 1.0)
    stats.admit([(0, 7), (0, 8)], 2.0)
    made = rows((0, 7, 0, 2, FinishReason.EOS), (0, 8, 1, 1, FinishReason.EOS))
    made.vectors = Vectors(np.array([3, 3], np.int32), np.zeros(9, np.float32))
    stats.on_rows(made, 4.0, 0)
    assert value(stats, f.PROMPT_TOKENS) == 17
    assert value(stats, f.GENERATION_TOKENS) == 0
    assert values(stats, f.SUCCESS)["m", "0", "stop"] == 2
    assert total(stats, f.QUEUE_TIME) == (2, 2.0)
    assert total(stats, f.E2E) == (2, 6.0)
    for family in (f.TTFT, f.ITL, f.TPOT, f.GENERATION_LENGTH, f.PARAMS_MAX_TOKENS):
        assert total(stats, family) == (0, 0.0)
