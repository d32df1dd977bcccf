"""The synthetic engine on a clock of the test's own."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config.serve import ServeConfig
from penstock.engine.base import Load, RequestRejected, StepRows
from penstock.engine.sampling.rng import stream_state, token_indexes
from penstock.engine.synthetic.engine import (
    MAX_PREFILL_STEP_S,
    SyntheticEngine,
)
from penstock.engine.synthetic.faults import InjectedFault
from penstock.engine.synthetic.script_player import EXIT_CODE_OF_FAULT
from penstock.wire.frames import FinishReason
from penstock.wire.messages import WireError
from tests.engine.support import PROMPT, Clock, Received, byte_level_tokenizer, submit

VOCABULARY_SIZE = 260  # two specials, 256 bytes, "é", "<tool>"


class Bench:
    """An engine whose time passes only in its own sleep."""

    def __init__(self, model_dir: Path, **options: Any) -> None:
        self.clock = Clock()
        self.engine = SyntheticEngine(
            ServeConfig(engine="synthetic", **options),
            str(model_dir),
            clock=self.clock,
            sleep=self.clock.sleep,
        )
        self.received = Received()

    def step(self) -> StepRows:
        assert self.engine.has_work()
        rows = self.engine.step()
        self.received.step(rows)
        return rows

    def finish(self) -> Received:
        while self.engine.has_work():
            self.step()
        return self.received


def tokens_of(model_dir: Path, request: Any, **options: Any) -> list[int]:
    bench = Bench(model_dir, **options)
    bench.engine.submit(0, request)
    return bench.finish().tokens[request.stream]


# -- tokens


def splitmix64(seed: int, count: int) -> list[int]:
    """The generator as its authors give it, in Python's integers."""
    state, out = seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        out.append(z ^ (z >> 31))
    return out


@pytest.mark.parametrize("choices", [1, 3, 129, 128_000])
def test_draws_are_splitmix64(choices: int) -> None:
    seeds = [0, 1, 12345, 2**63 - 1]
    for seed in seeds:
        state = np.full(50, stream_state(seed), np.uint64)
        drawn = token_indexes(state, np.arange(50, dtype=np.int32), choices)
        assert drawn.tolist() == [
            (value >> 32) * choices >> 32 for value in splitmix64(stream_state(seed), 50)
        ]
    assert len({stream_state(seed) for seed in seeds}) == len(seeds)


def test_draws_are_even() -> None:
    drawn = token_indexes(
        np.full(100_000, stream_state(1), np.uint64), np.arange(100_000, dtype=np.int32), 10
    )
    assert np.bincount(drawn, minlength=10).min() > 9_600  # four deviations below 10,000


def test_tokens_depend_on_seed_and_position_alone(model_dir: Path) -> None:
    alone = tokens_of(model_dir, submit(5, 40))
    crowd = Bench(model_dir, max_num_seqs=3)
    for stream in range(8):
        crowd.engine.submit(stream % 2, submit(stream, 40, prompt=range(2, 3 + stream), seed=stream))
    while crowd.engine.has_work():
        crowd.step()
    assert crowd.received.tokens[5] == alone
    assert len({tuple(tokens) for tokens in crowd.received.tokens.values()}) == 8


def test_greedy_tokens_depend_on_the_prompt_alone(model_dir: Path) -> None:
    greedy = tokens_of(model_dir, submit(1, 20, seed=3, temperature=0.0))
    assert tokens_of(model_dir, submit(9, 20, seed=4, temperature=0.0), max_num_seqs=3) == greedy
    assert tokens_of(model_dir, submit(1, 20, seed=3, temperature=0.0, prompt=(5, 6, 8))) != greedy
    assert tokens_of(model_dir, submit(1, 20, seed=3)) != greedy
    resumed = submit(2, 20, seed=5, temperature=0.0, prompt=(*PROMPT, *greedy[:7]), resumed=7)
    bench = Bench(model_dir)
    bench.received.tokens[2] = greedy[:7]
    bench.engine.submit(0, resumed)
    assert bench.finish().tokens[2] == greedy


def test_tokens_are_ordinary(model_dir: Path) -> None:
    tokens = tokens_of(model_dir, submit(1, 500), max_model_len=600)
    text = byte_level_tokenizer().decode(tokens, skip_special_tokens=False)
    assert len(tokens) == 500
    assert "\N{REPLACEMENT CHARACTER}" not in text
    assert not {0, 1, VOCABULARY_SIZE - 1} & set(tokens)
    assert len(set(tokens)) > 100


def test_a_resumed_stream_goes_on_as_it_would_have(model_dir: Path) -> None:
    whole = tokens_of(model_dir, submit(1, 30, prompt=(9, 8)))
    bench = Bench(model_dir)
    bench.received.tokens[1] = whole[:12]
    bench.engine.submit(0, submit(1, 30, prompt=(9, 8, *whole[:12]), resumed=12))
    received = bench.finish()
    assert received.tokens[1] == whole
    assert received.finish[1] == FinishReason.LENGTH


# -- how streams end


def test_max_tokens(model_dir: Path) -> None:
    bench = Bench(model_dir)
    for stream, max_tokens in enumerate([1, 2, 30]):
        bench.engine.submit(0, submit(stream, max_tokens))
    received = bench.finish()
    assert [len(received.tokens[stream]) for stream in range(3)] == [1, 2, 30]
    assert set(received.finish.values()) == {FinishReason.LENGTH}


def test_max_model_len(model_dir: Path) -> None:
    assert len(tokens_of(model_dir, submit(1, 1 << 30, prompt=[5] * 7), max_model_len=20)) == 13
    assert len(tokens_of(model_dir, submit(1, 1 << 30, prompt=[5] * 7))) == 505


def test_stop_token_ids_and_min_tokens(model_dir: Path) -> None:
    tokens = tokens_of(model_dir, submit(1, 200))
    stop = tokens[20]
    first = tokens.index(stop)
    second = first + 1 + tokens[first + 1 :].index(stop)
    for min_tokens, last in [(0, first), (first, first), (first + 1, second)]:
        bench = Bench(model_dir)
        bench.engine.submit(0, submit(1, 200, stop_token_ids=(stop,), min_tokens=min_tokens))
        received = bench.finish()
        assert received.tokens[1] == tokens[: last + 1]
        assert received.finish[1] == FinishReason.STOP_TOKEN


def test_interval(model_dir: Path) -> None:
    bench = Bench(model_dir)
    bench.engine.submit(0, submit(1, 12, interval=5))
    sizes = [len(bench.step().tokens) for _ in range(12)]
    assert sizes == [1, 0, 0, 0, 0, 5, 0, 0, 0, 0, 5, 1]
    assert not bench.engine.has_work()


def test_abort(model_dir: Path) -> None:
    bench = Bench(model_dir, max_num_seqs=2)
    for stream in range(4):
        bench.engine.submit(0, submit(stream, 20, interval=10))
    for _ in range(4):
        bench.step()
    bench.engine.abort(0, [0, 3, 99])
    bench.engine.abort(0, [0, 3])
    bench.engine.abort(1, [1])
    bench.step()
    received = bench.received
    assert received.finish == {0: FinishReason.ABORT, 3: FinishReason.ABORT}
    assert [len(received.tokens[stream]) for stream in (0, 1, 3)] == [4, 1, 0]
    received = bench.finish()
    assert [len(received.tokens[stream]) for stream in range(4)] == [4, 20, 20, 0]


def test_abort_before_the_first_step(model_dir: Path) -> None:
    bench = Bench(model_dir)
    bench.engine.submit(0, submit(1))
    bench.engine.abort(0, [1])
    assert bench.finish().finish == {1: FinishReason.ABORT}


def test_abort_during_prefill(model_dir: Path) -> None:
    bench = Bench(model_dir, synthetic_prefill_tokens_per_s=10)
    bench.received.tokens[1] = [5]
    bench.engine.submit(0, submit(1, resumed=1))
    bench.step()
    bench.engine.abort(0, [1])
    received = bench.finish()
    assert received.finish == {1: FinishReason.ABORT}
    assert received.tokens[1] == [5]


def test_drop_server(model_dir: Path) -> None:
    bench = Bench(model_dir, max_num_seqs=3)
    for stream in range(6):
        bench.engine.submit(stream % 2, submit(stream, 10))
    bench.step()
    bench.engine.abort(1, [1, 5])
    bench.engine.drop_server(1)
    received = bench.finish()
    assert {stream: len(tokens) for stream, tokens in received.tokens.items()} == {0: 10, 1: 1, 2: 10, 4: 10}
    assert bench.engine.load().running == 0


def test_fail_all(model_dir: Path) -> None:
    bench = Bench(model_dir, max_num_seqs=2)
    for stream in range(4):
        bench.engine.submit(0, submit(stream, 20, interval=10))
    for _ in range(4):
        bench.step()
    bench.engine.abort(0, [1, 3])
    bench.received.step(bench.engine.fail_all("engine_error", "over"))
    assert not bench.engine.has_work()
    assert {stream: failure.message for stream, failure in bench.received.failed.items()} == dict.fromkeys(
        range(4), "over"
    )
    assert [len(bench.received.tokens.get(stream, [])) for stream in range(4)] == [4, 4, 0, 0]
    bench.engine.submit(0, submit(7))
    assert len(bench.finish().tokens[7]) == 10


def test_fail_all_with_logprobs(model_dir: Path) -> None:
    bench = Bench(model_dir, max_num_seqs=3)
    for stream, logprobs in enumerate((2, -1, 0)):
        bench.engine.submit(0, submit(stream, 20, interval=10, logprobs=logprobs))
    for _ in range(4):
        bench.step()
    rows = bench.engine.fail_all("engine_error", "over")
    assert rows.logprobs is not None
    owner = np.repeat(rows.stream, 3 if rows.count is None else rows.count)
    assert owner[rows.logprobs.token].tolist() == [0, 0, 0, 2, 2, 2]
    assert rows.logprobs.ids[:, 0].tolist() == rows.tokens[rows.logprobs.token].tolist()
    assert (rows.logprobs.ids[3:, 1:] == -1).all()
    bench.engine.submit(0, submit(7, 3))
    assert bench.engine.step().logprobs is None


# -- time


def test_a_step_takes_its_time(model_dir: Path) -> None:
    bench = Bench(model_dir, synthetic_step_ms=15)
    bench.engine.submit(0, submit(1, 4))
    start = bench.clock.now
    bench.finish()
    assert bench.clock.now - start == pytest.approx(4 * 0.015)


def test_a_step_sleeps_only_what_is_left(model_dir: Path) -> None:
    clock = Clock()
    spent = itertools.cycle([0.0, 0.004])  # the clock is read at the start and before the sleep

    def slow_clock() -> float:
        clock.now += next(spent)
        return clock.now

    engine = SyntheticEngine(
        ServeConfig(engine="synthetic", synthetic_step_ms=15),
        str(model_dir),
        clock=slow_clock,
        sleep=clock.sleep,
    )
    engine.submit(0, submit(1, 3))
    next(spent)  # the submit of an idle engine read the clock once
    for _ in range(3):
        engine.step()
    assert clock.naps == pytest.approx([0.011] * 3)


def test_no_sleep_without_a_duration(model_dir: Path) -> None:
    bench = Bench(model_dir, synthetic_step_ms=0)
    bench.engine.submit(0, submit(1, 50))
    bench.finish()
    assert bench.clock.naps == []


def test_slots_are_limited(model_dir: Path) -> None:
    bench = Bench(model_dir, max_num_seqs=2)
    for stream in range(5):
        bench.engine.submit(0, submit(stream, 3))
    seen = []
    while bench.engine.has_work():
        bench.step()
        load = bench.engine.load()
        seen.append((load.waiting, load.running))
    assert seen == [(3, 2), (3, 2), (3, 0), (1, 2), (1, 2), (1, 0), (0, 1), (0, 1), (0, 0)]


def test_priorities_decide_who_gets_a_slot(model_dir: Path) -> None:
    bench = Bench(model_dir, max_num_seqs=1, scheduling_policy="priority", max_num_queued_reqs=2)
    ends = []
    for stream, priority in enumerate((0, 9, 5, 7)):
        bench.engine.submit(0, submit(stream, 2, priority=priority))
        rows = bench.step() if stream == 0 else None
        assert rows is None or len(rows.stream) == 1
    while bench.engine.has_work():
        rows = bench.step()
        ends += [failure.stream for failure in rows.failed]
        if rows.finish is not None:
            ends += rows.stream[rows.finish != 0].tolist()
    assert ends == [1, 0, 2, 3]
    assert bench.received.failed[1].code == "overloaded"


def test_what_a_full_queue_refuses_owes_no_row(model_dir: Path) -> None:
    bench = Bench(model_dir, max_num_seqs=1, max_num_queued_reqs=1)
    for stream in range(2):
        bench.engine.submit(0, submit(stream, 2))
    with pytest.raises(RequestRejected, match="--max-num-queued-reqs") as refusal:
        bench.engine.submit(0, submit(2, 2))
    assert refusal.value.code == "overloaded"
    assert bench.finish().finish.keys() == {0, 1}


def first_token_times(bench: Bench) -> dict[int, float]:
    start, times = bench.clock.now, {}
    while bench.engine.has_work():
        for stream in bench.step().stream.tolist():
            times.setdefault(stream, bench.clock.now - start)
    return times


def test_prompts_are_taken_one_after_the_other(model_dir: Path) -> None:
    bench = Bench(model_dir, synthetic_step_ms=10, synthetic_prefill_tokens_per_s=1000)
    for stream in range(3):
        bench.engine.submit(0, submit(stream, 30, prompt=[5] * 100))
    # a prompt takes 100 ms; the next step of 10 ms gives its first token
    assert first_token_times(bench) == pytest.approx({0: 0.11, 1: 0.21, 2: 0.31}, abs=0.011)


def test_prompts_without_a_rate_are_taken_at_once(model_dir: Path) -> None:
    bench = Bench(model_dir, synthetic_step_ms=10)
    for stream in range(3):
        bench.engine.submit(0, submit(stream, 2, prompt=[5] * 400))
    assert first_token_times(bench) == pytest.approx(dict.fromkeys(range(3), 0.01))


def test_batched_tokens_limit_what_a_step_takes(model_dir: Path) -> None:
    bench = Bench(
        model_dir,
        synthetic_step_ms=10,
        synthetic_prefill_tokens_per_s=1_000_000,
        max_num_batched_tokens=50,
    )
    bench.engine.submit(0, submit(0, 1, prompt=[5] * 200))
    # 50 tokens become due per step: four steps, the first of which earns nothing, and one for the token
    assert first_token_times(bench) == pytest.approx({0: 0.05}, abs=0.011)


def test_time_without_work_earns_no_prompt_tokens(model_dir: Path) -> None:
    bench = Bench(model_dir, synthetic_step_ms=10, synthetic_prefill_tokens_per_s=1000)
    bench.engine.submit(0, submit(0, 1, prompt=[5] * 100))
    first_token_times(bench)
    bench.clock.now += 60
    bench.engine.submit(0, submit(1, 1, prompt=[5] * 100))
    assert first_token_times(bench) == pytest.approx({1: 0.11}, abs=0.011)


def test_a_long_prefill_alone_neither_spins_nor_blocks(model_dir: Path) -> None:
    bench = Bench(model_dir, synthetic_step_ms=0, synthetic_prefill_tokens_per_s=100)
    bench.engine.submit(0, submit(0, 1, prompt=[5] * 100))
    start = bench.clock.now
    bench.finish()
    assert bench.clock.now - start == pytest.approx(1.0, abs=0.011)
    assert max(bench.clock.naps) <= MAX_PREFILL_STEP_S
    assert len(bench.clock.naps) <= 1.0 / MAX_PREFILL_STEP_S + 2


# -- logprobs


def test_logprobs(model_dir: Path) -> None:
    bench = Bench(model_dir)
    bench.engine.submit(0, submit(1, 4, logprobs=2, interval=3))
    bench.engine.submit(0, submit(2, 4))
    bench.engine.submit(0, submit(3, 4, logprobs=0))
    ordinary = bench.engine._draws._ordinary.tolist()
    given: dict[int, list[list[int]]] = {1: [], 2: [], 3: []}
    while bench.engine.has_work():
        rows = bench.step()
        counts = np.ones(len(rows.stream), np.int32) if rows.count is None else rows.count
        owners = np.repeat(rows.stream, counts)
        if rows.logprobs is None:
            continue
        assert rows.logprobs.rank.tolist() == [1] * len(rows.logprobs.token)
        assert (np.diff(rows.logprobs.token) > 0).all()
        for at, token in enumerate(rows.logprobs.token.tolist()):
            ids = rows.logprobs.ids[at].tolist()
            width = 3 if owners[token] == 1 else 1
            sampled = int(rows.tokens[token])
            place = ordinary.index(sampled)
            following = ordinary[(place + 1) % len(ordinary)]
            assert ids[:width] == [sampled, sampled, following][:width]
            assert set(ids[width:]) <= {-1}
            values = np.exp(rows.logprobs.values[at, :width])
            assert values.tolist() == pytest.approx([0.5, 0.5, 0.25][:width])
            given[int(owners[token])].append(sampled)
    received = bench.received
    assert given == {1: received.tokens[1], 2: [], 3: received.tokens[3]}
    bench.engine.submit(0, submit(4, 4))
    assert bench.step().logprobs is None


def test_listed_tokens_have_the_logprobs_that_they_have_among_all(model_dir: Path) -> None:
    bench = Bench(model_dir)
    ordinary = bench.engine._draws._ordinary.tolist()
    common: dict[str, Any] = {"seed": 5, "temperature": 1.0}
    bench.engine.submit(0, submit(1, 4, logprobs=3, **common))
    bench.engine.submit(
        0, submit(2, 4, logprobs=4, logprob_token_ids=(ordinary[7], 0, ordinary[7], 1), **common)
    )
    seen = {1: 0, 2: 0}
    while bench.engine.has_work():
        rows = bench.step()
        assert rows.logprobs is not None
        for owner, ids, values in zip(rows.stream, rows.logprobs.ids, rows.logprobs.values, strict=True):
            seen[int(owner)] += 1
            assert values[0] == pytest.approx(np.log(0.5))
            if owner == 2:
                place = ordinary.index(ids[0])
                assert ids[1:].tolist() == [ordinary[7], 0, ordinary[7], 1]
                distance = (7 - place) % len(ordinary)
                assert values[[1, 3]] == pytest.approx([(distance + 1) * np.log(0.5)] * 2)
    assert seen == {1: 4, 2: 4}
    assert not len(bench.engine._logprobs._listed._rows)
    bench.engine.submit(0, submit(3, 4, logprobs=1, logprob_token_ids=(5,)))
    bench.step()
    bench.engine.fail_all("engine_error", "it ends")
    assert not len(bench.engine._logprobs._listed._rows)


# -- what is refused


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (submit(1, prompt=[5] * 512), "512 tokens leave no room for output"),
        (submit(1, prompt=[5, VOCABULARY_SIZE]), "token id 260, but the vocabulary has 260"),
        (submit(1, prompt=[5, -1]), "token id -1, but the vocabulary has 260"),
        (submit(1, max_tokens=0), "max_tokens: 0, but must be more than 0"),
        (submit(1, max_tokens=2, resumed=2), "max_tokens: 2, but must be more than 2"),
        (submit(1, resumed=4), "of which resumed are output"),
        (submit(1, logit_bias={5: 1.0}), "logit_bias: the synthetic engine"),
        (submit(1, allowed_token_ids=(5,)), "allowed_token_ids: the synthetic engine"),
        (submit(1, bad_words=((5,),)), "bad_words: the synthetic engine"),
        (submit(1, prompt_logprobs=0), "prompt_logprobs: the synthetic engine"),
    ],
)
def test_rejected(model_dir: Path, request_: Any, reason: str) -> None:
    engine = Bench(model_dir).engine
    with pytest.raises(RequestRejected, match=reason) as caught:
        engine.submit(0, request_)
    assert caught.value.code == "invalid_request"
    assert not engine.has_work()


def test_a_stream_is_not_submitted_twice(model_dir: Path) -> None:
    bench = Bench(model_dir)
    bench.engine.submit(0, submit(1))
    bench.engine.submit(1, submit(1))
    for _ in range(2):
        with pytest.raises(WireError, match=r"Submit\.stream 1"):
            bench.engine.submit(0, submit(1))
        bench.engine.step()


def test_unknown_call(model_dir: Path) -> None:
    with pytest.raises(ValueError, match="no operation 'fly'"):
        Bench(model_dir).engine.call("fly", {})


# -- faults


def test_error(model_dir: Path) -> None:
    bench = Bench(model_dir, synthetic_fault="error@3")
    bench.engine.submit(0, submit(1))
    for _ in range(3):
        bench.step()
    with pytest.raises(InjectedFault, match="error@3"):
        bench.engine.step()
    bench.received.step(bench.engine.fail_all("engine_error", "x"))
    assert bench.received.failed[1].position == 3


def test_stream_error(model_dir: Path) -> None:
    bench = Bench(model_dir, synthetic_fault="stream-error@3")
    for stream in (4, 2):
        bench.engine.submit(0, submit(stream, interval=8))
    received = bench.finish()
    assert list(received.failed) == [4]
    assert received.failed[4].position == len(received.tokens[4]) == 4
    assert received.finish == {2: FinishReason.LENGTH}


def test_stream_error_does_not_end_a_stream_twice(model_dir: Path) -> None:
    bench = Bench(model_dir, synthetic_fault="stream-error@0")
    bench.engine.submit(0, submit(4, 1))
    received = bench.finish()
    assert received.finish == {4: FinishReason.LENGTH}
    assert received.failed == {}


def test_hang(model_dir: Path) -> None:
    class StillThereError(Exception):
        pass

    naps = iter(range(3))

    def sleep(seconds: float) -> None:
        if next(naps, None) is None:
            raise StillThereError

    engine = SyntheticEngine(
        ServeConfig(engine="synthetic", synthetic_step_ms=0, synthetic_fault="hang@0"),
        str(model_dir),
        sleep=sleep,
    )
    engine.submit(0, submit(1))
    with pytest.raises(StillThereError):
        engine.step()


def test_exit_and_no_torch(model_dir: Path) -> None:
    code = f"""
import sys
from penstock.config.serve import ServeConfig
from penstock.engine.synthetic.engine import SyntheticEngine
from penstock.wire.messages import SamplingParams, Submit
engine = SyntheticEngine(ServeConfig(engine="synthetic", synthetic_fault="exit@1"), {str(model_dir)!r})
engine.submit(0, Submit(1, bytes(4), SamplingParams(5, 0)))
engine.step()
print(*sorted({{"torch", "transformers"}} & sys.modules.keys()), "one step", flush=True)
engine.step()
print("not reached")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == EXIT_CODE_OF_FAULT, ended.stderr
    assert ended.stdout == "one step\n"


# -- what it reports


def test_info(model_dir: Path) -> None:
    info = Bench(model_dir, max_num_seqs=7).engine.info
    assert (info.engine, info.max_model_len, info.vocab_size) == ("synthetic", 512, VOCABULARY_SIZE)
    assert (info.max_num_seqs, info.eos_token_ids, info.device) == (7, (1,), "cpu")


def test_tokenizer_of_another_directory(model_dir: Path, tmp_path: Path) -> None:
    engine = SyntheticEngine(ServeConfig(), str(tmp_path), tokenizer_dir=str(model_dir))
    assert engine.info.vocab_size == VOCABULARY_SIZE
    assert engine.info.eos_token_ids == ()


def test_load(model_dir: Path) -> None:
    bench = Bench(model_dir, max_num_seqs=1)
    for stream in range(2):
        bench.engine.submit(0, submit(stream, 4))
    bench.step()
    assert bench.engine.load() == Load(waiting=1, running=1, generated=1)
    bench.finish()
    assert bench.engine.load() == Load(generated=8)
