"""vLLM's engine behind a real server. The recorded replies are replayed in test_golden.py."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.clients import Streams, texts_of
from tests.integration.server import VLLM_START_S, Server, in_vllm, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

COMMON: dict[str, Any] = {"prompt": "The with statement", "max_tokens": 1500, "ignore_eos": True}
GREEDY = COMMON | {"temperature": 0}
UNTIED = [GREEDY | {"prompt": f"{place}: {GREEDY['prompt']}"} for place in (0, 7, 10, 15, 19, 40, 51, 56)]
"""Outputs without near ties: the logits of the best token and the next one differ by at least 4.7e-5
everywhere. Other batches and a prefill of what was decoded before change that by 2.4e-7 at most; of the first
64 prompts seven have a difference below 3e-6."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
}


@pytest.fixture(scope="module")
def pair(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two engines, of which tests kill one."""
    patient = ("--resume-timeout", str(VLLM_START_S))
    arguments = in_vllm(vllm_model, "--data-parallel-size", "2", *patient)
    directory = tmp_path_factory.mktemp("pair")
    with Server(*arguments, directory=directory, start_s=VLLM_START_S) as running:
        yield running


def kill_one(pair: Server, bodies: list[dict[str, Any]]) -> list[str]:
    """What the streams gave, over the kill of one of the two engines."""
    wait_until(lambda: pair.metric("penstock:engine_up") == 2, VLLM_START_S, "both engines being up")
    before = pair.metric("penstock:streams_interrupted_total", outcome="resumed")
    with Streams(pair.url, bodies) as streams:
        streams.until_each_has(3)
        pair.children("engine")[0].kill()
        streams.until_all_ended(300)
    assert streams.failures == []
    assert pair.metric("penstock:streams_interrupted_total", outcome="resumed") > before
    return streams.texts


def test_greedy_streams_of_a_killed_engine_go_on_as_they_would_have(pair: Server) -> None:
    undisturbed = texts_of(pair.url, UNTIED)
    assert kill_one(pair, UNTIED) == undisturbed


def test_structured_output_of_a_killed_engine_ends_with_an_error(pair: Server) -> None:
    """vLLM continues no grammar. A stream that has ended before is whole."""
    choice = {"choice": ["ab " * 600, "cd " * 600]}
    bodies = [GREEDY | {"ignore_eos": False, "structured_outputs": choice} for _ in range(8)]
    wait_until(lambda: pair.metric("penstock:engine_up") == 2, VLLM_START_S, "both engines being up")
    with Streams(pair.url, bodies) as streams:
        streams.until_each_has(1)
        for engine in pair.children("engine"):
            engine.kill()
        streams.until_all_ended(300)
    whole = [text for text in streams.texts if text in choice["choice"]]
    assert streams.failures
    assert all("send the request again" in str(failure) for failure in streams.failures)
    assert len(whole) == len(bodies) - len(streams.failures)


def test_vllms_own_death_is_one_of_its_engine(pair: Server) -> None:
    """Of the process that computes, behind the one that was started."""
    wait_until(lambda: pair.metric("penstock:engine_up") == 2, VLLM_START_S, "both engines being up")
    undisturbed = texts_of(pair.url, UNTIED)
    with Streams(pair.url, UNTIED) as streams:
        streams.until_each_has(3)
        [core] = [each for each in pair.children("engine")[1].children(recursive=True) if is_core(each)]
        core.kill()
        streams.until_all_ended(300)
    assert (streams.failures, streams.texts) == ([], undisturbed)
    wait_until(lambda: pair.metric("penstock:engine_up") == 2, VLLM_START_S, "both engines being up")


def test_seeded_streams_are_repeatable(vllm_server: Server) -> None:
    body = COMMON | {"max_tokens": 20, "temperature": 1.0, "seed": 7}
    first, again = (vllm_server.complete(**body)["choices"][0]["text"] for _ in range(2))
    assert first == again
    assert vllm_server.complete(**body | {"seed": 8})["choices"][0]["text"] != first


def test_json_by_schema(vllm_server: Server) -> None:
    """Without whitespace, with which random weights would fill all of their output."""
    asked = {"json": SCHEMA, "disable_any_whitespace": True}
    body = {"temperature": 0, "max_tokens": 200, "structured_outputs": asked}
    choice = vllm_server.complete("A person as JSON:", **body)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert set(json.loads(choice["text"])) == {"name", "age"}


def test_metrics_have_what_vllm_counts(vllm_server: Server) -> None:
    server = vllm_server
    prompt = "one two three four five six seven eight nine ten " * 30
    server.complete(prompt, max_tokens=2)
    reply = server.complete(prompt, max_tokens=2)
    found = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found > 0
    wait_until(lambda: server.metric("vllm:prefix_cache_hits_total") >= found, 90, "counting hits")
    assert server.metric("vllm:prefix_cache_queries_total") >= found
    assert server.metric("vllm:num_preemptions_total") == 0


def test_tensor_parallel_workers_serve_and_end_with_their_engine(
    vllm_model: Path, tmp_path: Path, tiny_llama_in_vllm: Server
) -> None:
    """On a CPU vLLM wants to be told which cores each worker has, when there is one NUMA node."""
    environ = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    patient = ("--resume-timeout", str(VLLM_START_S))
    arguments = in_vllm(vllm_model, *patient, own=("--tensor-parallel-size", "2"))
    expected = texts_of(tiny_llama_in_vllm.url, [GREEDY])
    with Server(*arguments, directory=tmp_path, environ=environ, start_s=VLLM_START_S) as server:
        assert texts_of(server.url, [GREEDY]) == expected
        (engine,) = server.children("engine")
        below = engine.children(recursive=True)
        workers = [child for child in below if child.cmdline()[0].startswith("VLLM::Worker")]
        assert len(workers) == 2
        assert any(map(is_core, below))
        with Streams(server.url, [GREEDY]) as streams:
            streams.until_each_has(3)
            engine.kill()
            wait_until(lambda: not any(map(alive, below)), 60, "ending all of a killed engine's vLLM")
            streams.until_all_ended(VLLM_START_S)
        assert (streams.failures, streams.texts) == ([], expected)


def is_core(process: Any) -> bool:
    return bool(process.cmdline()[0].startswith("VLLM::EngineCore"))


def alive(process: Any) -> bool:
    return bool(process.is_running()) and process.status() != "zombie"


def test_an_unknown_argument_is_told_in_vllms_words(vllm_model: Path, tmp_path: Path) -> None:
    server = Server(*in_vllm(vllm_model, own=("--no-such-flag",)), directory=tmp_path)
    assert server.process.wait(VLLM_START_S) != 0
    server.end()
    assert "unrecognized arguments: --no-such-flag" in server.log


def test_drafts_give_rows_of_several_tokens(
    vllm_model: Path, tmp_path: Path, tiny_llama_in_vllm: Server
) -> None:
    """Speculative decoding changes no greedy token; logprobs and intervals stay with their tokens."""
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
    bodies = [GREEDY, GREEDY | {"prompt": "a b c d " * 20, "stream_interval": 5}]
    asked = {"prompt": "a b c d " * 20, "temperature": 0, "max_tokens": 100, "logprobs": 2}
    expected = texts_of(tiny_llama_in_vllm.url, bodies)
    wanted = tiny_llama_in_vllm.complete(**asked)["choices"][0]["logprobs"]
    arguments = in_vllm(vllm_model, own=("--speculative-config", drafts))
    with Server(*arguments, directory=tmp_path, start_s=VLLM_START_S) as server:
        assert texts_of(server.url, bodies) == expected
        given = server.complete(**asked)["choices"][0]["logprobs"]
        assert given["tokens"] == wanted["tokens"]
        assert given["token_logprobs"] == pytest.approx(wanted["token_logprobs"], abs=1e-3)
        wait_until(
            lambda: server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0, 90, "accepting drafts"
        )
        drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
        assert 0 < server.metric("vllm:spec_decode_num_drafts_total") <= drafted
        positions = [
            server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(place))
            for place in range(3)
        ]
        assert positions[0] >= positions[1] >= positions[2] > 0
        assert sum(positions) == server.metric("vllm:spec_decode_num_accepted_tokens_total")
        _check_events(server, asked, wanted)
        refused = server.post("/v1/completions", {"prompt": "x", "min_p": 0.1, "max_tokens": 2})
        assert (refused.status_code, "min_p" in refused.text) == (400, True)


def _check_events(server: Server, asked: dict[str, Any], wanted: dict[str, Any]) -> None:
    """An event has all tokens of its row, with their logprobs and ids."""
    names = ("penstock:stream_event_tokens_count", "penstock:stream_event_tokens_sum")
    before = [server.metric(name) for name in names]
    events = [json.loads(data)["choices"][0] for data in server.stream(**asked, return_token_ids=True)[:-1]]
    sizes = [len(event["token_ids"]) for event in events]
    assert max(sizes) > 1
    assert [len(event["logprobs"]["tokens"]) for event in events] == sizes
    tokens = [token for event in events for token in event["logprobs"]["tokens"]]
    assert tokens == wanted["tokens"]
    values = [value for event in events for value in event["logprobs"]["token_logprobs"]]
    assert values == pytest.approx(wanted["token_logprobs"], abs=1e-3)
    offsets = [offset for event in events for offset in event["logprobs"]["text_offset"]]
    assert offsets == wanted["text_offset"]
    rows, told = (server.metric(name) - past for name, past in zip(names, before, strict=True))
    assert told == asked["max_tokens"]
    assert rows < told
