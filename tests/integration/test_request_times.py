"""--enable-per-request-metrics: replies tell how long the request waited, and how fast its tokens came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.integration.server import SYNTHETIC, Server

ONE_AT_A_TIME = ("--max-num-seqs", "1", "--synthetic-step-ms", "5", "--enable-per-request-metrics")
TOKENS = 20
LONG = 400
"""Tokens of a stream, 2 s of them, during which another request is made."""
FIELDS = {
    "time_to_first_token_ms",
    "generation_time_ms",
    "queue_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        Server(*SYNTHETIC, *ONE_AT_A_TIME, directory=tmp_path_factory.mktemp("times")) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client: openai.OpenAI, tokens: int = TOKENS, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": "Hi"}]
    extra = {"ignore_eos": True}
    return client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=messages,
        max_tokens=tokens,
        extra_body=extra,
        **fields,
    )


def check(metrics: dict[str, float], tokens: int = TOKENS) -> None:
    assert metrics.keys() == FIELDS
    assert metrics["generation_time_ms"] > 0
    assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / (tokens - 1), abs=0.01)
    inference_s = (metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]) / 1e3
    assert metrics["tokens_per_second"] == pytest.approx(tokens / inference_s, rel=0.01)


def test_a_stream_tells_them_with_its_usage_and_a_request_that_waits_says_so(client: openai.OpenAI) -> None:
    for _ in range(10):  # on a busy machine the stream may have ended when the other request comes
        stream = ask(client, LONG, stream=True, stream_options={"include_usage": True})
        chunks = [next(stream)]  # the only slot is taken
        waited = ask(client)
        chunks += stream
        if waited.metrics["queue_time_ms"] > chunks[-1].metrics["mean_itl_ms"]:
            break
    assert [hasattr(chunk, "metrics") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    check(chunks[-1].metrics, LONG)
    check(waited.metrics)
    assert waited.metrics["queue_time_ms"] > chunks[-1].metrics["queue_time_ms"]
    assert waited.metrics["queue_time_ms"] > chunks[-1].metrics["mean_itl_ms"]


def test_a_stop_string_ends_them_as_well(client: openai.OpenAI) -> None:
    whole = ask(client)
    text = whole.choices[0].message.content
    stopped = ask(client, seed=1, temperature=0, stop=[text[3:5]])
    assert stopped.metrics["time_to_first_token_ms"] >= 0


def test_responses_and_completions_tell_them(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    response: Any = client.responses.create(model=model, input="Hi", max_output_tokens=TOKENS)
    assert response.metrics.keys() >= {"queue_time_ms", "time_to_first_token_ms"}
    completion: Any = client.completions.create(model=model, prompt="Hi", max_tokens=TOKENS)
    assert completion.metrics.keys() >= {"queue_time_ms", "time_to_first_token_ms"}


def test_of_several_choices_none_are_told(client: openai.OpenAI) -> None:
    assert ask(client, n=2).metrics is None
