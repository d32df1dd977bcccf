"""A process of vLLM's that is started and attached, step by step, with a small random model."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine.attach.engine import AttachedEngine
from penstock.engine.base import RequestRejected
from penstock.wire.frames import FinishReason
from penstock.wire.messages import WireError
from tests.engine.attach.small_engine import (
    EOS,
    PROMPT,
    SLOTS,
    VOCAB,
    Run,
    generate,
    make_model,
    run,
    start_engine,
    step,
)
from tests.engine.support import submit

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttachedEngine]:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    options = {
        "dtype": "float32",
        "max_num_seqs": SLOTS,
        "kv_cache_memory": 16 << 20,
        "max_num_queued_reqs": 2,
    }
    options["profile_dir"] = str(directory / "profiles")
    own = ["--enforce-eager", "--block-size", "32"]
    made = start_engine(directory, directory, own, options)
    yield made
    made.close()


@pytest.fixture
def engine(shared: AttachedEngine) -> Iterator[AttachedEngine]:
    """Without a stream before and after."""
    yield shared
    shared.drop_server(0)
    shared.drop_server(1)
    while shared.has_work():
        step(shared)
    assert shared.load().running == shared.load().waiting == 0


def test_what_it_serves_with(engine: AttachedEngine) -> None:
    info = engine.info
    assert (info.engine, info.vocab_size, info.max_model_len, info.max_num_seqs) == (
        "vllm",
        VOCAB,
        512,
        SLOTS,
    )
    assert (info.eos_token_ids, info.dtype) == ((EOS,), "float32")
    assert info.kv_cache_tokens == (16 << 20) // (2 * 2 * 32 * 4)  # layers, keys and values, head, float32


def test_intervals_change_no_token(engine: AttachedEngine) -> None:
    """Rows fit together (Received sees to that); the first token is not held."""
    expected = generate(engine, max_tokens=23)
    assert len(expected) == 23
    for interval in (2, 5, 50):
        engine.submit(
            0,
            submit(0, 23, prompt=PROMPT, temperature=0.0, ignore_eos=True, interval=interval),
        )
        received = run(engine)
        assert received.tokens[0] == expected
        assert received.finish[0] == FinishReason.LENGTH
        assert received.rows == 1 + -(-22 // interval)


def test_streams_of_two_servers_at_once(engine: AttachedEngine) -> None:
    expected = generate(engine, max_tokens=9)
    for server in (0, 1):
        for stream in range(3):
            engine.submit(server, submit(stream, 9, prompt=PROMPT, temperature=0.0, ignore_eos=True))
    tokens: dict[tuple[int, int], list[int]] = {}
    while engine.has_work():
        rows = step(engine)
        assert rows.count is None or set(rows.count.tolist()) <= {0, 1}
        for server, stream, token in zip(rows.server, rows.stream, rows.tokens, strict=True):
            tokens.setdefault((int(server), int(stream)), []).append(int(token))
    assert tokens == {(server, stream): expected for server in (0, 1) for stream in range(3)}


def test_why_streams_end(engine: AttachedEngine) -> None:
    tokens = generate(engine, max_tokens=12)
    stop = tokens[5]
    end = tokens.index(stop) + 1
    common: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.0}
    engine.submit(0, submit(0, 12, ignore_eos=True, stop_token_ids=(stop,), **common))
    engine.submit(0, submit(1, 12, logit_bias={EOS: 100.0}, **common))
    engine.submit(0, submit(2, 3, logit_bias={EOS: 100.0}, ignore_eos=True, **common))
    engine.submit(0, submit(3, 12, logit_bias={EOS: 100.0}, min_tokens=4, **common))
    engine.submit(0, submit(4, 600, prompt=[5] * 505, temperature=0.0, ignore_eos=True))
    received = run(engine)
    assert (received.finish[0], received.tokens[0]) == (FinishReason.STOP_TOKEN, tokens[:end])
    assert (received.finish[1], received.tokens[1]) == (FinishReason.EOS, [EOS])
    assert (received.finish[2], received.tokens[2]) == (FinishReason.LENGTH, [EOS] * 3)
    assert (received.finish[3], len(received.tokens[3])) == (FinishReason.EOS, 5)
    assert (received.finish[4], len(received.tokens[4])) == (FinishReason.LENGTH, 7)


def test_a_resumed_stream_goes_on_as_it_would_have(engine: AttachedEngine) -> None:
    expected = generate(engine, max_tokens=40)
    for at in (1, 13, 39):
        prompt = [*PROMPT, *expected[:at]]
        received = Run()
        received.tokens[0] = expected[:at]
        engine.submit(0, submit(0, 40, prompt=prompt, resumed=at, temperature=0.0, ignore_eos=True))
        assert run(engine, received).tokens[0] == expected
        assert received.finish[0] == FinishReason.LENGTH


def test_seeds_repeat_and_a_resumed_stream_draws_anew(engine: AttachedEngine) -> None:
    asked: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "seed": 11, "seeded": True}
    first = generate(engine, **asked)
    assert generate(engine, **asked) == first
    assert generate(engine, **asked | {"seed": 12}) != first
    prompt = [*PROMPT, *first[:10]]

    def resumed() -> list[int]:
        received = Run()
        received.tokens[0] = first[:10]
        request = submit(0, prompt=prompt, resumed=10, ignore_eos=True, **asked)
        engine.submit(0, request)
        return run(engine, received).tokens[0]

    assert resumed() == resumed()
    assert resumed()[10:20] != first[:10]


def test_logprobs_stay_with_their_tokens_over_an_interval(engine: AttachedEngine) -> None:
    common: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.0, "ignore_eos": True}
    engine.submit(0, submit(0, 17, logprobs=3, **common))
    engine.submit(0, submit(1, 17, logprobs=1, interval=6, **common))
    engine.submit(0, submit(2, 17, interval=6, **common))
    received = run(engine)
    assert set(received.logprobs) == {0, 1}
    assert [len(received.logprobs[stream]) for stream in (0, 1)] == [17, 17]
    for (ids, values), (fewer, few) in zip(received.logprobs[0], received.logprobs[1], strict=True):
        assert fewer[:2] == ids[:2]
        assert few[:2] == pytest.approx(values[:2], abs=1e-4)
        assert set(fewer[2:]) <= {-1}
        assert ids[0] == ids[1]  # greedy: the most likely one is the token itself


def test_logprobs_of_the_prompt(engine: AttachedEngine) -> None:
    prompt = list(range(30, 80))
    for _ in range(2):  # the second time the prompt is in the cache, from which it must not be taken
        engine.submit(0, submit(0, 3, prompt=prompt, temperature=0.0, ignore_eos=True, prompt_logprobs=2))
        received = run(engine)
        assert [place for place, _ in received.prompts[0]] == list(range(1, 50))
        assert [ids[0] for _, ids in received.prompts[0]] == prompt[1:]
        assert len(received.tokens[0]) == 3


def test_prefixes_are_found_and_kept_apart_by_salt(engine: AttachedEngine) -> None:
    prompt = list(range(100, 200))
    before = engine.metrics()["prefix_cache_hits_total"]
    found = {}
    for stream, salt in enumerate((None, None, "a", "a")):
        engine.submit(0, submit(stream, 2, prompt=prompt, temperature=0.0, salt=salt))
        found[stream] = run(engine).cached.get(stream, 0)
    assert found == {0: 0, 1: 96, 2: 0, 3: 96}
    assert engine.metrics()["prefix_cache_hits_total"] - before == 192
    engine.call("reset_prefix_cache", {})
    engine.submit(0, submit(9, 2, prompt=prompt, temperature=0.0))
    assert 9 not in run(engine).cached


def test_grammars_and_their_resumption(engine: AttachedEngine) -> None:
    """vLLM takes no grammar that has begun."""
    grammar = 'start: "abc" "def" "ghi"'
    whole = list(b"abcdefghi")
    asked: dict[str, Any] = {"prompt": PROMPT, "temperature": 0.0, "grammar": grammar}
    engine.submit(0, submit(0, 20, **asked))
    received = run(engine)
    tokens = received.tokens[0]
    assert received.finish[0] == FinishReason.EOS
    assert (len(tokens), tokens[-1]) == (len(whole) + 1, EOS)
    with pytest.raises(RequestRejected, match=r"structured_outputs: .* send the request again") as refused:
        engine.submit(0, submit(1, 20, resumed=4, **asked | {"prompt": [*PROMPT, *tokens[:4]]}))
    assert refused.value.code == "engine_error"


def test_a_grammar_that_cannot_be_compiled_is_its_streams_alone(engine: AttachedEngine) -> None:
    engine.submit(0, submit(0, 5, prompt=PROMPT, grammar="start: nonsense"))
    engine.submit(0, submit(1, 5, prompt=PROMPT, temperature=0.0, ignore_eos=True))
    received = run(engine)
    assert 0 in received.finish
    assert len(received.tokens[1]) == 5


def test_bad_words_and_allowed_tokens(engine: AttachedEngine) -> None:
    first = generate(engine, max_tokens=1)[0]
    assert generate(engine, max_tokens=1, bad_words=((first,),)) != [first]
    assert set(generate(engine, max_tokens=6, allowed_token_ids=(7, 8))) <= {7, 8}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"prompt": [5] * 512}, "leave no room"),
        ({"prompt": [VOCAB]}, f"token id {VOCAB}"),
        ({"max_tokens": 3, "resumed": 3}, "max_tokens"),
    ],
)
def test_what_cannot_run_is_refused_at_once(
    engine: AttachedEngine, request_: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestRejected, match=message):
        engine.submit(0, submit(0, **{"prompt": PROMPT} | request_))
    assert not engine.has_work()


def test_what_vllm_would_refuse_is_the_clients_error(engine: AttachedEngine) -> None:
    with pytest.raises(RequestRejected, match="logit_bias") as refused:
        engine.submit(0, submit(0, 3, prompt=PROMPT, logit_bias={VOCAB + 5: 1.0}))
    assert refused.value.code == "invalid_request"
    engine.submit(0, submit(1, 3, prompt=PROMPT, temperature=0.0, ignore_eos=True))
    assert len(run(engine).tokens[1]) == 3


def test_a_handle_in_use_is_the_servers_error(engine: AttachedEngine) -> None:
    engine.submit(0, submit(0, 50, prompt=PROMPT))
    with pytest.raises(WireError):
        engine.submit(0, submit(0, 50, prompt=PROMPT))
    step(engine)
    with pytest.raises(WireError):
        engine.submit(0, submit(0, 50, prompt=PROMPT))


def started(engine: AttachedEngine, streams: Sequence[int], received: Run) -> None:
    """Streams that run, each with a token given out."""
    for stream in streams:
        engine.submit(0, submit(stream, 400, prompt=PROMPT, temperature=0.0, ignore_eos=True, interval=100))
    while any(stream not in received.tokens for stream in streams):
        received.take(step(engine))
    assert set(engine.take_admitted()) >= {(0, stream) for stream in streams}


def test_aborted_streams_give_out_what_they_held(engine: AttachedEngine) -> None:
    received = Run()
    started(engine, range(SLOTS), received)
    others = range(20, 20 + engine._ids.slots - SLOTS)  # vLLM has them, and runs them after these
    for stream in (*others, 50):
        engine.submit(0, submit(stream, 5, prompt=PROMPT))  # the last one waits here
    for _ in range(4):
        received.take(step(engine))
    engine.abort(0, [3, 50, 77, *others])
    received.take(step(engine))
    assert (received.finish[3], len(received.tokens[3])) == (FinishReason.ABORT, 5)
    assert (received.finish[50], received.tokens[50]) == (FinishReason.ABORT, [])
    load = engine.load()
    assert load.running + load.waiting == SLOTS - 1


def test_a_server_that_is_gone_gets_no_rows(engine: AttachedEngine) -> None:
    started(engine, range(3), Run())
    engine.submit(1, submit(0, 5, prompt=PROMPT, temperature=0.0, ignore_eos=True))
    engine.drop_server(0)
    servers = set()
    while engine.has_work():
        servers |= set(step(engine).server.tolist())
    assert servers == {1}


def test_a_full_queue_refuses(engine: AttachedEngine) -> None:
    started(engine, range(SLOTS), Run())
    ahead = engine._ids.slots - SLOTS  # vLLM has these already
    for stream in range(20, 20 + ahead + 2):
        engine.submit(0, submit(stream, 5, prompt=PROMPT))
    with pytest.raises(RequestRejected) as caught:
        engine.submit(0, submit(50, 5, prompt=PROMPT))
    assert caught.value.code == "overloaded"
    assert engine.load().waiting == 2


def test_all_streams_fail_with_their_tokens_given_out(engine: AttachedEngine) -> None:
    received = Run()
    started(engine, range(3), received)
    engine.submit(0, submit(20, 5, prompt=PROMPT))
    for _ in range(3):
        received.take(step(engine))
    received.take(engine.fail_all("engine_error", "the reason"))
    assert set(received.failed) == {0, 1, 2} | ({20} - set(received.tokens) or {20})
    assert {failure.message for failure in received.failed.values()} == {"the reason"}
    assert all(len(received.tokens[stream]) == received.failed[stream].position for stream in range(3))
    assert generate(engine, max_tokens=2)


def test_dummy_steps_touch_no_stream(engine: AttachedEngine) -> None:
    engine.dummy_step()
    assert not engine.has_work()


def test_a_profile_is_a_trace_of_the_steps(engine: AttachedEngine, tmp_path: Path) -> None:
    engine.call("start_profile", {})
    generate(engine, max_tokens=2)
    directory = Path(engine.call("stop_profile", {"path": str(tmp_path / "engine")}))
    (path,) = directory.glob("*.pt.trace.json.gz")
    trace = json.loads(gzip.decompress(path.read_bytes()))
    assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])


def test_sleep_needs_vllms_own_flag(engine: AttachedEngine) -> None:
    assert not engine.can_sleep
    for method in ("sleep", "wake_up"):
        with pytest.raises(ValueError, match="--enable-sleep-mode"):
            engine.call(method, {"level": 1})


def test_unknown_operations_are_refused(engine: AttachedEngine) -> None:
    with pytest.raises(ValueError, match="no operation 'fly'"):
        engine.call("fly", {})


def test_columns_have_the_wire_types(engine: AttachedEngine) -> None:
    engine.submit(0, submit(0, 2, prompt=PROMPT, logprobs=1))
    while not len((rows := step(engine)).stream):
        pass
    for column in (rows.server, rows.stream, rows.position, rows.tokens):
        assert column.dtype == np.int32
    assert rows.logprobs is not None
    assert (rows.logprobs.ids.dtype, rows.logprobs.values.dtype) == (np.int32, np.float32)
