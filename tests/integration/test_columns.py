"""Replies as columns over HTTP, read by the client that docs/columns.md gives."""

from __future__ import annotations

import io
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.gateway.processes import gateway
from tests.integration.server import TLS, Server, wait_until

DOCS = Path(__file__).parents[2] / "docs" / "columns.md"
SAFETENSORS = "application/vnd.safetensors"
PROMPT = "The with statement is used to wrap"


def documented_client() -> dict[str, Callable[..., Any]]:
    """The functions of the page."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)
    return names


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--engine", "synthetic", "--synthetic-step-ms", "1", "--max-model-len", "8192")
    with Server(*options, directory=tmp_path_factory.mktemp("synthetic")) as running:
        yield running


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("torch")
    options = ("--dtype", "float32", "--threads", "1", "--max-logprobs", "-1")
    with Server(*options, directory=tmp_path_factory.mktemp("demo")) as running:
        yield running


def post(server: Server, path: str, accept: str | None = SAFETENSORS, **body: Any) -> httpx.Response:
    headers = {} if accept is None else {"accept": accept}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=60, verify=TLS)


def columns_of(reply: httpx.Response) -> tuple[dict[str, Any], dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == SAFETENSORS
    assert reply.headers["vary"] == "accept"
    assert int(reply.headers["content-length"]) == len(reply.content)
    read: tuple[dict[str, Any], dict[str, Any]] = documented_client()["read_columns"](reply.content)
    return read


def test_columns_have_the_numbers_of_the_json_reply(demo: Server) -> None:
    body = {
        "prompt": [PROMPT, "Another one"],
        "n": 2,
        "max_tokens": 12,
        "seed": 5,
        "logprobs": 3,
        "prompt_logprobs": 2,
        "return_token_ids": True,
    }
    whole = post(demo, "/v1/completions", None, **body).json()
    columns, facts = columns_of(post(demo, "/v1/completions", **body))
    assert [each["finish_reason"] for each in facts["choices"]] == [
        each["finish_reason"] for each in whole["choices"]
    ]
    for index, choice in enumerate(whole["choices"]):
        rows = slice(*columns["offsets"][index : index + 2])
        assert columns["token_ids"][rows].tolist() == choice["token_ids"]
        np.testing.assert_allclose(
            columns["logprobs"][rows], choice["logprobs"]["token_logprobs"], rtol=1e-5, atol=1e-4
        )
        best = [max(each.values()) for each in choice["logprobs"]["top_logprobs"]]
        np.testing.assert_allclose(columns["top_logprobs"][rows, 0], best, rtol=1e-5, atol=1e-4)
        assert columns["top_ids"][rows].shape == (len(choice["token_ids"]), 3)
        prompt = slice(*columns["prompt_offsets"][index // 2 : index // 2 + 2])
        assert columns["prompt_token_ids"][prompt].tolist() == choice["prompt_token_ids"]
        scores = columns["prompt_logprobs"][prompt]
        assert np.isnan(scores[0])
        for token, score, entry in zip(
            choice["prompt_token_ids"][1:], scores[1:], choice["prompt_logprobs"][1:], strict=True
        ):
            assert score == pytest.approx(entry[str(token)]["logprob"], abs=1e-4)
    assert facts["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert facts["model"] == whole["model"]


def test_a_chat_with_an_echoing_template_has_ids_as_well(demo: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "Say hello"}],
        "max_tokens": 9,
        "temperature": 0,
        "logprobs": True,
        "return_token_ids": True,
    }
    whole = post(demo, "/v1/chat/completions", None, **body).json()
    columns, _ = columns_of(post(demo, "/v1/chat/completions", **body))
    assert columns["token_ids"].tolist() == whole["choices"][0]["token_ids"]
    assert columns["prompt_token_ids"].tolist() == whole["prompt_token_ids"]
    assert "top_ids" not in columns


def test_the_formats_own_reader_reads_it(synthetic: Server) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    reply = post(synthetic, "/v1/completions", prompt=PROMPT, max_tokens=700, ignore_eos=True, logprobs=1)
    found, (columns, _) = numpy.load(reply.content), columns_of(reply)
    assert found.keys() == columns.keys()
    for name, values in columns.items():
        np.testing.assert_array_equal(found[name], values)
    assert len(columns["token_ids"]) == 700


def test_a_reply_of_megabytes_has_its_length(synthetic: Server) -> None:
    reply = post(
        synthetic, "/v1/completions", prompt=PROMPT, n=16, max_tokens=4000, ignore_eos=True, logprobs=2
    )
    columns, _ = columns_of(reply)
    assert len(reply.content) > 1 << 20
    assert columns["offsets"].tolist() == list(range(0, 64001, 4000))


def frames_of(server: Server, **body: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps({"prompt": PROMPT, "stream": True, **body}).encode(),
        {"content-type": "application/json", "accept": SAFETENSORS},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers["content-type"] == f"{SAFETENSORS}; frames=u64"
        assert response.headers["vary"] == "accept"
        found = list(documented_client()["read_frames"](response))
        assert response.read() == b"", "nothing follows the end"
    return found


@pytest.mark.parametrize("interval", [1, 64])
def test_the_frames_of_a_stream_are_the_rows_of_the_whole_reply(synthetic: Server, interval: int) -> None:
    body = {"n": 3, "max_tokens": 200, "seed": 3, "ignore_eos": True, "logprobs": 1}
    whole, _ = columns_of(post(synthetic, "/v1/completions", prompt=PROMPT, **body))
    frames = frames_of(synthetic, stream_interval=interval, **body)
    for index in range(3):
        for name in ("token_ids", "logprobs", "top_ids", "top_logprobs"):
            parts = [
                columns[name][slice(*columns["offsets"][place : place + 2])]
                for columns, _ in frames
                for place, choice in enumerate(columns.get("choices", ()))
                if choice == index
            ]
            expected = whole[name][slice(*whole["offsets"][index : index + 2])]
            np.testing.assert_array_equal(np.concatenate(parts), expected)
    assert sorted(each["index"] for _, facts in frames for each in facts.get("choices", ())) == [0, 1, 2]
    assert frames[-1][1]["usage"]["completion_tokens"] == 600


def test_columns_come_over_http2(synthetic: Server) -> None:
    with httpx.Client(http1=False, http2=True, timeout=60, verify=TLS) as client:
        for stream in (False, True):
            body = {"prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "logprobs": 0, "stream": stream}
            reply = client.post(synthetic.url + "/v1/completions", json=body, headers={"accept": SAFETENSORS})
            assert reply.headers["content-type"].startswith(SAFETENSORS)
            start = 8 if stream else 0
            size = int.from_bytes(reply.content[:8], "little") if stream else len(reply.content)
            columns, _ = documented_client()["read_columns"](reply.content[start : start + size])
            assert columns["token_ids"].dtype == np.int32
        large = {"prompt": PROMPT, "n": 16, "max_tokens": 4000, "ignore_eos": True, "logprobs": 2}
        reply = client.post(synthetic.url + "/v1/completions", json=large, headers={"accept": SAFETENSORS})
        assert reply.http_version == "HTTP/2"
        assert columns_of(reply)[0]["top_ids"].shape == (64000, 2)


def test_keep_alives_stand_between_frames(tmp_path: Path) -> None:
    options = ("--engine", "synthetic", "--synthetic-step-ms", "150", "--sse-keep-alive", "0.05")
    with Server(*options, directory=tmp_path) as server:
        frames = frames_of(server, max_tokens=6, ignore_eos=True, logprobs=0)
    assert sum(len(columns.get("token_ids", ())) for columns, _ in frames) == 6


def test_who_does_not_name_the_type_gets_json(synthetic: Server) -> None:
    for accept in (None, "*/*", "application/json", f"{SAFETENSORS};q=0.1, application/json"):
        reply = post(synthetic, "/v1/completions", accept, prompt=PROMPT, max_tokens=2)
        assert reply.headers["content-type"] == "application/json"
        assert ("vary" in reply.headers) == (accept is not None and SAFETENSORS in accept)
    events = post(
        synthetic,
        "/v1/completions",
        f"text/event-stream, {SAFETENSORS};q=0.9",
        prompt=PROMPT,
        max_tokens=2,
        stream=True,
    )
    assert events.headers["content-type"].startswith("text/event-stream")


def test_errors_are_json(synthetic: Server) -> None:
    wrong = post(synthetic, "/v1/completions", prompt=PROMPT, max_tokens=-1)
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "max_tokens"
    assert wrong.headers["vary"] == "accept"
    echo = post(synthetic, "/v1/completions", prompt=PROMPT, echo=True, logprobs=1, stream=True)
    assert (echo.status_code, echo.json()["error"]["param"]) == (400, "echo")
    unknown = post(synthetic, "/v1/completions", prompt=PROMPT, model="other", stream=True)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_listed_and_very_many_alternatives(demo: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    listed, _ = columns_of(post(demo, "/v1/completions", **body, logprobs=0, logprob_token_ids=[7, 3, 9]))
    assert listed["top_ids"].tolist() == [[7, 3, 9]] * 4
    wide, _ = columns_of(post(demo, "/v1/completions", **body, logprobs=200))
    assert wide["top_ids"].shape == wide["top_logprobs"].shape == (4, 200)
    assert (np.diff(wide["top_logprobs"], axis=1) <= 0).all()
    assert wide["top_ids"][:, 0].tolist() == wide["token_ids"].tolist(), "greedy"
    np.testing.assert_allclose(wide["logprobs"], wide["top_logprobs"][:, 0], rtol=1e-5)


def test_vllms_route_of_token_ids_has_columns(demo: Server) -> None:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 5, "logprobs": 1, "temperature": 0}}
    whole = post(demo, "/inference/v1/generate", None, **body).json()
    columns, _ = columns_of(post(demo, "/inference/v1/generate", **body))
    assert columns["token_ids"].tolist() == whole["choices"][0]["token_ids"]


def test_a_reply_whose_engine_is_killed_is_the_same(synthetic: Server, tmp_path: Path) -> None:
    body = {"prompt": PROMPT, "n": 4, "max_tokens": 1500, "ignore_eos": True, "seed": 1, "logprobs": 1}
    expected, _ = columns_of(post(synthetic, "/v1/completions", **body))
    options = ("--engine", "synthetic", "--synthetic-step-ms", "3", "--data-parallel-size", "2")
    with Server(*options, directory=tmp_path) as pair, ThreadPoolExecutor() as pool:
        reply = pool.submit(post, pair, "/v1/completions", **body)
        wait_until(lambda: pair.metric("vllm:generation_tokens_total") > 1500, 60, "some rows")
        busy = pair.metric("vllm:num_requests_running", engine="0") == 0
        pair.children("engine")[busy].kill()
        found, _ = columns_of(reply.result(60))
        assert pair.metric("penstock:streams_interrupted_total", outcome="resumed") > 0
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


def test_a_gateway_relays_columns_as_they_are(synthetic: Server) -> None:
    body = {"model": "penstock-demo", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "seed": 2}
    with gateway(synthetic.url) as front:
        for stream in (False, True):
            options = body | {"logprobs": 1, "stream": stream, "stream_interval": 100}
            headers = {"accept": SAFETENSORS}
            reply = front.client.post("/v1/completions", json=options, headers=headers)
            assert reply.headers["content-type"].startswith(SAFETENSORS)
            names = documented_client()
            parts = (
                names["read_frames"](io.BytesIO(reply.content))
                if stream
                else [names["read_columns"](reply.content)]
            )
            ids = [columns["token_ids"] for columns, _ in parts if "token_ids" in columns]
            assert len(np.concatenate(ids)) == 300
        assert front.counts() == {"ok_without_usage": 2}


def test_other_apis_answer_as_ever(synthetic: Server) -> None:
    reply = post(synthetic, "/v1/responses", input="Hello", max_output_tokens=16)
    assert reply.headers["content-type"] == "application/json"
