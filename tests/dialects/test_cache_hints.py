"""What requests say of the prompts that follow, in each API, and what engines are told of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.generation.plan import RequestPlan
from penstock.http.errors import ApiError
from penstock.wire.messages import CacheHints
from tests.dialects.messages import serving
from tests.dialects.responses.test_plans import make_dialect
from tests.generation.planning import body, chat_body, planners

PLANNERS = planners()
RESPONSES = make_dialect()
HINTS = {
    "protocol_version": "1",
    "message_id": "m",
    "actions": [{"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {"x": [1]}}],
}
EPHEMERAL, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
TEXT = {"type": "text", "text": "Hi"}


def plan(api: str, **fields: Any) -> RequestPlan:
    match api:
        case "completion":
            return PLANNERS.completion(body(**fields))
        case "chat":
            return PLANNERS.chat(chat_body(**fields))
        case "messages":
            return serving.plan(**fields)
    return RESPONSES.plan(json.dumps({"input": "Hi", **fields}).encode())


@pytest.mark.parametrize("api", ["completion", "chat", "responses"])
@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0),
        ({"prompt_cache_retention": "in_memory"}, 0),
        ({"prompt_cache_retention": "24h"}, 86400),
        ({"prompt_cache_options": {"ttl": "30m", "mode": "explicit", "comparison_response_id": None}}, 1800),
        ({"prompt_cache_options": {"mode": "implicit"}}, 0),
        ({"prompt_cache_options": {"ttl": "90h"}}, 86400),
        ({"prompt_cache_options": {"ttl": "1h"}, "prompt_cache_retention": "in_memory"}, 3600),
    ],
)
def test_openais_lifetimes(api: str, fields: dict[str, Any], seconds: int) -> None:
    assert plan(api, **fields).keep_s == seconds


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0),
        ({"cache_control": EPHEMERAL}, 300),
        ({"system": [{**TEXT, "cache_control": HOUR}]}, 3600),
        ({"tools": [{**serving.WEATHER, "cache_control": EPHEMERAL}]}, 300),
        ({"messages": [{"role": "user", "content": [{**TEXT, "cache_control": HOUR}, TEXT]}]}, 3600),
        ({"cache_control": EPHEMERAL, "system": [{**TEXT, "cache_control": HOUR}]}, 3600),
        ({"messages": [{"role": "user", "content": 'say "cache_control": {"ttl": "1h"}'}]}, 0),
    ],
)
def test_anthropics_lifetimes(fields: dict[str, Any], seconds: int) -> None:
    assert plan("messages", **fields).keep_s == seconds


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        ("chat", {"prompt_cache_retention": "forever"}, "prompt_cache_retention"),
        ("chat", {"prompt_cache_options": {"ttl": "soon"}}, "prompt_cache_options.ttl"),
        ("chat", {"prompt_cache_options": {"ttl": "0m"}}, "prompt_cache_options.ttl"),
        ("responses", {"prompt_cache_options": {"mode": "none"}}, "prompt_cache_options.mode"),
        (
            "messages",
            {"system": [{**TEXT, "cache_control": {"ttl": "x"}}]},
            "system[0].cache_control.ttl",
        ),
        ("chat", {"kv_hints": {"actions": []}}, "kv_hints"),
        ("chat", {"kv_hints": {**HINTS, "actions": [*HINTS["actions"]] * 65}}, "kv_hints"),
        ("messages", {"kv_hints": {**HINTS, "message_id": "x" * (16 << 10)}}, "kv_hints"),
    ],
)
def test_what_is_wrong_is_named(api: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        plan(api, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("api", ["completion", "chat", "responses", "messages"])
def test_engines_are_told(api: str) -> None:
    made = plan(api, session_id="s", kv_hints=HINTS)
    assert made.session == "s"
    told = made.cache_hints(made.session)
    assert told is not None
    assert (told.keep_s, told.session) == (0, "s")
    assert json.loads(told.kv_hints or b"") == HINTS
    assert plan(api).cache_hints(None) is None


def test_a_session_by_any_name() -> None:
    assert plan("chat", prompt_cache_key="k", session_id="s").session == "s"
    assert plan("chat", prompt_cache_key="k").session == "k"
    assert plan("messages", metadata={"user_id": "u"}).session == "u"
    assert plan("messages", metadata={"user_id": "u"}, session_id="s").session == "s"
    long = plan("chat", prompt_cache_options={"ttl": "1h"})
    assert long.cache_hints("x" * 1025) == CacheHints(3600)


def test_a_response_repeats_them() -> None:
    options = {"ttl": "1h", "mode": "explicit", "prewarm": False}
    made = plan("responses", prompt_cache_retention="24h", prompt_cache_options=options)
    echo = json.loads(b"{" + made.dialect_fields.echo + b"}")
    assert echo["prompt_cache_retention"] == "24h"
    assert echo["prompt_cache_options"] == {"ttl": "1h", "mode": "explicit"}
