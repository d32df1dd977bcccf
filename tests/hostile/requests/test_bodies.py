"""Bodies whose values are many, deep, huge or impossible: bounded work, and an error that names the field."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.byte_budget import ByteBudget
from penstock.config.serve import ServeConfig
from penstock.generation.request import body_decoder
from penstock.generation.request.body_decoder import MAX_COMMAS, MAX_PARTS, MAX_UNKNOWN_NAMES, check_parts
from penstock.generation.request.structured_output import MAX_GRAMMAR_BYTES
from penstock.generation.request.tool_choice import MAX_TOOLS
from penstock.generation.request.validation import (
    MAX_BAD_WORDS_CHARACTERS,
    MAX_STOP_CHARACTERS,
)
from penstock.http.errors import MAX_MESSAGE, MAX_PARAM, ApiError
from tests.generation.planning import Planners, body, chat_body, error_of, error_or_none, planners

PLANNER = planners()
MEGABYTE = 1 << 20
USER = {"role": "user", "content": "x"}
MANY: dict[str, tuple[str, bytes]] = {
    "lists": ("completion", b'{"prompt": "x", "unknown": [' + b"[]," * MAX_PARTS + b"0]}"),
    "objects": ("chat", b'{"messages": [' + b"{}," * MAX_PARTS + b"{}]}"),
    "prompts": ("completion", b'{"prompt": [' + b'"",' * MAX_PARTS + b'""]}'),
    "messages": ("chat", b'{"messages": [' + b'{"role":"u"},' * (MAX_PARTS // 2) + b'{"role":"u"}]}'),
    "tools": ("chat", b'{"tools": [' + b'{"function":{"name":"a"}},' * (MAX_PARTS // 4) + b"{}]}"),
    "parts": ("chat", b'{"messages": [{"role":"user","content":[' + b'"",' * MAX_PARTS + b'""]}]}'),
    "variables": ("chat", b'{"chat_template_kwargs": {' + b'"a":0,' * MAX_PARTS + b'"a":0}}'),
    "logit_bias": ("completion", b'{"logit_bias": {' + b'"1":0,' * MAX_PARTS + b'"1":0}}'),
    "schema": ("completion", b'{"structured_outputs": {"json": {"a":[' + b"{}," * MAX_PARTS + b"{}]}}}"),
    "metadata": ("chat", b'{"metadata": {' + b'"a":0,' * MAX_PARTS + b'"a":0}}'),
}


@pytest.mark.parametrize("name", MANY)
def test_many_values_are_refused_before_they_are_decoded(name: str) -> None:
    kind, sent = MANY[name]
    tracemalloc.start()
    try:
        error = error_of(getattr(PLANNER, kind), sent)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (error.status, error.param) == (400, "body")
    assert f"more than {MAX_PARTS} strings, lists and objects" in error.message
    assert most < 8 * MEGABYTE


def test_so_are_many_numbers() -> None:
    assert error_or_none(PLANNER.completion, body(prompt=[1] * (MAX_COMMAS + 1))) is None
    error = error_of(PLANNER.completion, body(prompt=[1] * (MAX_COMMAS + 2)))
    assert f"more than {MAX_COMMAS} values, such as token ids" in error.message
    assert "Send the prompts in several requests, or as texts." in error.message


def test_a_long_text_may_have_any_characters() -> None:
    text = '[{",\\"' * 400_000
    assert PLANNER.completion(body(prompt=text)).prompts == (text,)
    error = error_of(PLANNER.chat, arguments_body(json.dumps([{}] * MAX_PARTS)))
    assert error.param == "messages[0].tool_calls[0].function.arguments"


def arguments_body(text: str) -> bytes:
    call = {"function": {"name": "f", "arguments": text}}
    return chat_body(messages=[{"role": "assistant", "tool_calls": [call]}])


@given(st.recursive(st.text('a\\"[,{', max_size=8), lambda inner: st.lists(inner, max_size=4), max_leaves=20))
def test_parts_are_counted_as_a_parser_would(value: Any) -> None:
    def parts(value: Any) -> int:
        return 1 + (sum(map(parts, value)) if isinstance(value, list) else 0)

    text, count = json.dumps(value, ensure_ascii=False).encode(), parts(value)
    for piece in (2, 3, 5, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(body_decoder, "_COUNTED_BYTES", piece)
            patch.setattr(body_decoder, "MAX_PARTS", count)
            check_parts(text, "it")
            patch.setattr(body_decoder, "MAX_PARTS", count - 1)
            if len(text) >= 2 * (count - 1):
                with pytest.raises(ApiError):
                    check_parts(text, "it")


LONG = "z" * MEGABYTE
DIGITS = b"9" * 4000
LONG_VALUES: list[tuple[str, Callable[[Planners], Any], bytes, str]] = [
    ("model", lambda p: p.completion, body(model=LONG), "model"),
    ("type", lambda p: p.completion, body(max_tokens=LONG), "body.max_tokens"),
    ("list", lambda p: p.completion, body(stop=[LONG, [LONG]]), "body.stop.1"),
    ("integer", lambda p: p.completion, b'{"prompt":"x","max_tokens":' + DIGITS + b"}", "max_tokens"),
    ("n", lambda p: p.completion, b'{"prompt":"x","n":' + DIGITS + b"}", "n"),
    ("top_k", lambda p: p.completion, b'{"prompt":"x","top_k":-' + DIGITS + b"}", "top_k"),
    ("min", lambda p: p.completion, b'{"prompt":"x","min_tokens":' + DIGITS + b"}", ""),
    ("prompt", lambda p: p.completion, b'{"prompt":[' + DIGITS + b"]}", ""),
    ("ids", lambda p: p.completion, b'{"prompt":"x","stop_token_ids":[' + DIGITS + b"]}", "stop_token_ids"),
    ("logprobs", lambda p: p.completion, b'{"prompt":"x","logprobs":' + DIGITS + b"}", "logprobs"),
    (
        "prompt_logprobs",
        lambda p: p.completion,
        b'{"prompt":"x","prompt_logprobs":' + DIGITS + b"}",
        "prompt_logprobs",
    ),
    ("best_of", lambda p: p.completion, b'{"prompt":"x","best_of":' + DIGITS + b"}", "best_of"),
    (
        "truncate",
        lambda p: p.completion,
        b'{"prompt":"x","truncate_prompt_tokens":' + DIGITS + b"}",
        "truncate_prompt_tokens",
    ),
    (
        "outputs",
        lambda p: p.completion,
        body(structured_outputs={LONG: 1}),
        f"structured_outputs.{LONG[:59]}…",
    ),
    ("format", lambda p: p.completion, body(response_format={"type": LONG}), "response_format"),
    (
        "choice",
        lambda p: p.chat,
        chat_body(tools=[{"function": {"name": "a"}}], tool_choice=LONG),
        "tool_choice",
    ),
    (
        "part",
        lambda p: p.chat,
        chat_body(messages=[{"role": "user", "content": [{"type": LONG}]}]),
        "messages[0].content[0]",
    ),
    ("salt", lambda p: p.completion, body(cache_salt=LONG), "body.cache_salt"),
    ("bias", lambda p: p.completion, body(logit_bias={LONG: 1}), ""),
    (
        "schema",
        lambda p: p.completion,
        body(structured_outputs={"json": "[" + LONG}),
        "structured_outputs.json",
    ),
    ("infinity", lambda p: p.completion, b'{"prompt":"x","' + LONG[:60_000].encode() + b'":NaN}', ""),
]


@pytest.mark.parametrize(
    ("name", "plan", "sent", "param"), LONG_VALUES, ids=[each[0] for each in LONG_VALUES]
)
def test_errors_name_the_field_and_quote_little(
    name: str, plan: Callable[[Planners], Any], sent: bytes, param: str
) -> None:
    error = error_of(plan(PLANNER), sent)
    assert error.status in (400, 404)
    assert len(error.message) <= 500
    assert not param or error.param == param


def test_no_error_is_long_whatever_it_quotes() -> None:
    error = ApiError(400, "start " + LONG + " end", param=LONG)
    assert len(error.message) <= MAX_MESSAGE
    assert error.message.startswith("start ")
    assert error.message.endswith(" end")
    assert len(error.param or "") <= MAX_PARAM
    strict = planners(ServeConfig(strict_requests=True))
    unknown = error_of(strict.completion, body(**{LONG: 1}))
    assert len(unknown.body()) < 1000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": "z" * (MAX_STOP_CHARACTERS + 1)}, "stop"),
        ({"stop": ["a", "z" * (MAX_STOP_CHARACTERS + 1)]}, "stop"),
        ({"bad_words": ["z" * 1024] * (MAX_BAD_WORDS_CHARACTERS // 1024 + 1)}, "bad_words"),
        ({"structured_outputs": {"json": " " * (MAX_GRAMMAR_BYTES + 1)}}, "structured_outputs.json"),
    ],
)
def test_texts_that_cost_more_than_their_bytes_are_bounded(fields: dict[str, Any], param: str) -> None:
    assert error_of(PLANNER.completion, body(**fields)).param == param


def test_tools_are_bounded() -> None:
    tools = [{"function": {"name": f"f{number}"}} for number in range(MAX_TOOLS + 1)]
    assert error_or_none(PLANNER.chat, chat_body(tools=tools[:-1], tool_choice="required")) is None
    for choice in ("none", "required"):
        assert error_of(PLANNER.chat, chat_body(tools=tools, tool_choice=choice)).param == "tools"


def test_equal_token_ids_are_held_once() -> None:
    plan = PLANNER.completion(body(stop_token_ids=[5] * 50_000, allowed_token_ids=[5, 6] * 50_000))
    assert plan.base.stop_token_ids == (5,)
    assert plan.base.allowed_token_ids == (5, 6)


def test_unknown_fields_are_counted_by_short_names_and_logged_in_few_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    planner = planners()
    with caplog.at_level(logging.WARNING):
        planner.completion(body(**{f"{number}{LONG[:100]}": 1 for number in range(2000)}))
        planner.completion(body(**{LONG: 1}))
    assert len(planner.unknown_fields()) <= MAX_UNKNOWN_NAMES
    assert max(map(len, planner.unknown_fields())) <= 60
    assert len(caplog.records) <= 2
    assert max(len(record.getMessage()) for record in caplog.records) < 500


@pytest.mark.parametrize(
    "sent",
    [
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":"x","a":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"x","temperature":1e999}',
        b'{"prompt":"x","temperature":NaN}',
        b'{"prompt":"x","seed":' + b"9" * 100_000 + b"}",
        b"[" * 60_000,
        b'{"prompt":"x"' + b" " * MEGABYTE,
    ],
    ids=lambda sent: str(sent[:40]),
)
def test_impossible_bodies_are_refused(sent: bytes) -> None:
    assert error_of(PLANNER.completion, sent).status == 400


def test_zero_bytes_are_text() -> None:
    assert PLANNER.completion(b'{"prompt":"a\\u0000b"}').prompts == ("a\0b",)


def test_large_requests_wait_for_one_another() -> None:
    async def attack() -> None:
        budget, lock, running, most = ByteBudget(100), threading.Lock(), 0, 0

        def work(size: int) -> int:
            nonlocal running, most
            with lock:
                running += size
                most = max(most, running)
            with lock:
                running -= size
            return size

        async def run(size: int) -> int:
            return await budget.run_in_thread(size, work, size)

        sizes = (40, 60, 100, 10, 90, 100, 30)
        assert tuple(await asyncio.gather(*map(run, sizes))) == sizes
        assert most <= 100
        go_on = threading.Event()
        begun = [asyncio.ensure_future(budget.run_in_thread(1000, go_on.wait)) for _ in range(2)]
        waiting = asyncio.ensure_future(run(50))
        await asyncio.sleep(0)
        for task in (waiting, *begun):
            task.cancel()
        await asyncio.wait([waiting, *begun])
        later = asyncio.ensure_future(run(1))
        await asyncio.sleep(0.01)
        assert not later.done(), "the bytes are taken until the thread has ended"
        go_on.set()
        assert await later == 1
        assert await run(100) == 100

    asyncio.run(asyncio.wait_for(attack(), 60))
