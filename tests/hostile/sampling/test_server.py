"""Constraints that nothing satisfies, sent to a server with a model: each request gets its own end, and
nobody else notices."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hostile.bystander import Bystander
from tests.integration.clients import Streams, texts_of
from tests.integration.server import Server, data_of

pytest.importorskip("torch")

OPTIONS = ("--dtype", "float32", "--threads", "1", "--max-num-batched-tokens", "256")
BYSTANDERS: list[dict[str, Any]] = [
    {"prompt": "Return the", "max_tokens": 40, "seed": seed, "ignore_eos": True} for seed in range(4)
]
NOTHING: list[dict[str, Any]] = [
    {"structured_outputs": {"json": {"$ref": "#"}}},
    {"structured_outputs": {"grammar": "start: a\na: a"}},
    {"structured_outputs": {"regex": "[0-9]+"}, "allowed_token_ids": [5]},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(*OPTIONS, directory=tmp_path_factory.mktemp("demo")) as running:
        yield running


@pytest.fixture(scope="module")
def ids(server: Server) -> dict[str, int]:
    """Token ids of single characters."""

    def of(text: str) -> int:
        body = {"prompt": text, "add_special_tokens": False}
        tokens: list[int] = server.post("/tokenize", body).json()["tokens"]
        assert len(tokens) == 1, text
        return tokens[0]

    return {text: of(text) for text in "abc01"}


def complete(server: Server, **body: Any) -> httpx.Response:
    return server.post("/v1/completions", {"prompt": "x", **body}, timeout=60)


@pytest.mark.timeout(120)
def test_grammars_that_break_at_once_are_errors_of_their_requests_alone(server: Server) -> None:
    expected = texts_of(server.url, BYSTANDERS)
    hostile = [
        {**fields, "max_tokens": most, "stream": stream, "seed": seed}
        for seed, (fields, most, stream) in enumerate(itertools.product(NOTHING, (1, 2), (False, True)))
    ]
    with Streams(server.url, BYSTANDERS) as bystanders, ThreadPoolExecutor(4) as pool:
        bystanders.until_each_has(3)
        for reply in pool.map(lambda body: complete(server, **body), hostile):
            assert reply.status_code == 400, reply.text
            assert "structured_outputs" in reply.json()["error"]["message"]
        bystanders.until_all_ended()
        assert bystanders.failures == []
        assert bystanders.texts == expected
    assert server.metric("penstock:engine_up") == 1
    assert "traceback" not in server.log.lower()


def test_a_grammar_that_exceeds_a_limit_later_is_the_requests_error(server: Server) -> None:
    """A 500 would make a gateway take the server for broken."""
    reply = complete(server, max_tokens=100, structured_outputs={"regex": "(a?){3000}(a){3000}"})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"].startswith("structured output (structured_outputs.regex): ")


def test_contradictions_known_at_the_start_name_both_fields(server: Server) -> None:
    reply = complete(server, structured_outputs={"regex": "[0-9]+"}, allowed_token_ids=[5])
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert "structured_outputs" in message
    assert "allowed_token_ids" in message
    eos = int(json.loads((Path("penstock/demo/config.json")).read_text())["eos_token_id"])
    reply = complete(server, allowed_token_ids=[eos], min_tokens=3)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "allowed_token_ids and min_tokens"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("regex", "constraint", "text"),
    [
        ("[ac][bc]", {"allowed_token_ids": ["a"]}, "a"),
        ("[ac][ac][bc]", {"allowed_token_ids": ["a"]}, "aa"),
        ("[ab][c0]", {"allowed_token_ids": ["a", "b"], "logit_bias": {"b": -100}}, "a"),
        ("a[01]", {"allowed_token_ids": ["a", "0"], "bad_words": ["0"]}, "a"),
    ],
)
def test_a_contradiction_during_generation_ends_with_stop(
    server: Server,
    ids: dict[str, int],
    regex: str,
    constraint: dict[str, Any],
    text: str,
    temperature: float,
) -> None:
    body: dict[str, Any] = {"structured_outputs": {"regex": regex}, "max_tokens": 20} | constraint
    body["allowed_token_ids"] = [ids[name] for name in constraint["allowed_token_ids"]]
    body["logit_bias"] = {ids[name]: value for name, value in constraint.get("logit_bias", {}).items()}
    body |= {"temperature": temperature, "logprobs": 1}
    whole = complete(server, **body)
    assert whole.status_code == 200, whole.text
    choice = whole.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert len(choice["logprobs"]["tokens"]) == whole.json()["usage"]["completion_tokens"] == len(text)
    streamed = data_of(complete(server, stream=True, stream_interval=5, **body).text)
    choices = [json.loads(event)["choices"][0] for event in streamed[:-1]]
    assert "".join(part["text"] for part in choices) == text
    assert choices[-1]["finish_reason"] == "stop"


def test_an_output_that_ends_before_its_first_token_is_whole(server: Server, ids: dict[str, int]) -> None:
    """The end token is excluded, and everything else is by the grammar, which admits an empty text."""
    eos = int(json.loads((Path("penstock/demo/config.json")).read_text())["eos_token_id"])
    body = {"structured_outputs": {"grammar": 'start: ""'}, "min_tokens": 3, "max_tokens": 5}
    reply = complete(server, **body, stop_token_ids=[eos], n=2, temperature=1.0)
    assert reply.status_code == 200, reply.text
    assert [(choice["text"], choice["finish_reason"]) for choice in reply.json()["choices"]] == [
        ("", "stop")
    ] * 2
    assert reply.json()["usage"]["completion_tokens"] == 0
    events = data_of(complete(server, **body, stream=True).text)
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "stop"


@pytest.mark.timeout(120)
def test_pairs_of_constraints_end_whole_and_obeyed(server: Server, ids: dict[str, int]) -> None:
    """Whatever is combined: 200 with stop or length, or 400 that names a field; never a token outside."""
    allowed = [ids["a"], ids["b"], ids["0"]]
    parts: dict[str, dict[str, Any]] = {
        "grammar": {"structured_outputs": {"regex": "[ab0]{1,4}"}},
        "allowed": {"allowed_token_ids": allowed},
        "bias": {"logit_bias": {str(token): -100 for token in allowed}},
        "bad_words": {"bad_words": ["a", "b", "0"]},
        "min_tokens": {"min_tokens": 4},
        "stop_ids": {"stop_token_ids": allowed},
        "penalties": {"repetition_penalty": 1e-29, "frequency_penalty": -2.0},
    }

    def run(case: tuple[tuple[str, str], float]) -> None:
        (first, second), temperature = case
        body = parts[first] | parts[second] | {"max_tokens": 6, "temperature": temperature, "seed": 3}
        reply = complete(server, return_token_ids=True, **body)
        assert reply.status_code in (200, 400), f"{case}: {reply.text}"
        if reply.status_code == 400:
            assert "contradict" in reply.json()["error"]["message"], reply.text
            return
        choice = reply.json()["choices"][0]
        assert choice["finish_reason"] in ("stop", "length")
        if "allowed" in (first, second):
            assert set(choice["token_ids"]) <= set(allowed), case

    cases = itertools.product(itertools.combinations(parts, 2), (0.0, 1.0))
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run, cases))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_slow_grammars_delay_nobody_else(server: Server) -> None:
    """Distinct schemas of 60 kB, each a quarter of a second to compile, cut by clients that leave."""

    def schema(number: int) -> dict[str, Any]:
        properties = {
            f"p{number}_{index}": {"type": "string", "pattern": f"^[a-z{index}]{{1,{index % 60 + 1}}}$"}
            for index in range(900)
        }
        return {"type": "object", "properties": properties}

    slow = [
        {"prompt": "x", "max_tokens": 5, "structured_outputs": {"json": schema(number)}}
        for number in range(24)
    ]
    with Streams(server.url, slow) as attackers:
        for _ in range(3):
            assert complete(server, max_tokens=5).status_code == 200
        small = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 9}
        assert complete(server, **small).json()["choices"][0]["text"] in ("yes", "no")
        assert attackers.running > 4, "the others are to be done before them"
    assert complete(server, max_tokens=5).status_code == 200


NULLS = "start: s\ns: n n n n n n n n /[ -~]/ s | s s |\nn: m m m | \nm: n? s? "
BINARY = "start: s\ns: s s | s s s | /[a-z]/ | /[ -~]/"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("grammar", [NULLS, BINARY])
def test_ambiguous_grammars_do_not_hold_up_other_streams(server: Server, grammar: str) -> None:
    """A single mask of such a grammar could take two seconds, and each step of all streams waited for it."""
    with Bystander(server.url, server.children("api-server") + server.children("engine")) as bystander:
        for choices in (1, 64):
            reply = complete(
                server, structured_outputs={"grammar": grammar}, temperature=1.5, max_tokens=60, n=choices
            )
            assert reply.status_code == 400, reply.text
            assert "structured output (structured_outputs.grammar): " in reply.json()["error"]["message"]
    gaps = bystander.gaps
    assert not gaps.broken
    assert gaps.worst - gaps.lateness < 1.5, "twice the allowance of a grammar, and a busy machine"


def test_small_regexes_with_large_lexers_do_not_fill_the_memory(server: Server) -> None:
    """Each took 180 MB, which the cache of compiled grammars counted as 0.1."""
    [engine] = server.children("engine")
    resident = []
    for letter in "abcdefghijkl":
        reply = complete(server, max_tokens=3, structured_outputs={"regex": f"{letter}{{1000}}{{1000}}"})
        assert reply.status_code == 400, reply.text
        resident.append(engine.memory_info().rss)
    # What a refused compilation had may be freed a little after its reply.
    assert min(resident[-3:]) - resident[3] < 64 << 20
