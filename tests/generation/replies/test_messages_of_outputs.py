"""Replies whose output is a message: stop strings, counts of tokens, and what one event may have."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.generation.plan import RequestPlan
from penstock.wire.frames import FinishReason
from tests.generation.delivery import collected_reply, streamed_events
from tests.generation.parsers.test_replies import HERMES, TOOLS, encode, joined
from tests.generation.planning import chat_body, planners

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "stop here"}}\n</tool_call>'


def plan_of(**fields: Any) -> RequestPlan:
    return planners(template=HERMES).chat(chat_body(max_tokens=512, **fields))


def both(
    text: str, width: int, finish: FinishReason = FinishReason.EOS, **fields: Any
) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """The choice of a whole reply, that of the same streamed, and its events."""
    tokens = [*encode(text), 1] if finish is FinishReason.EOS else encode(text)
    rows = [tokens[start : start + width] for start in range(0, len(tokens), width)]
    whole = collected_reply(plan_of(**fields), tokens, finish, chat=True)
    streamed = plan_of(stream=True, stream_options={"include_usage": True}, **fields)
    *events, usage, done = streamed_events(streamed, rows, finish, chat=True)
    assert done == "[DONE]"
    choice = whole["choices"][0]
    end = events[-1]["choices"][0]
    said = joined(events)
    one = {
        "content": choice["message"]["content"] or "",
        "reasoning": choice["message"]["reasoning"] or "",
        "calls": [
            [each["function"]["name"], each["function"]["arguments"]]
            for each in choice["message"].get("tool_calls") or ()
        ],
        "finish": (choice["finish_reason"], choice["stop_reason"]),
        "usage": whole["usage"],
    }
    two = {**said, "finish": (end["finish_reason"], end.get("stop_reason")), "usage": usage["usage"]}
    for each in (one, two):
        each["usage"] = each["usage"]["completion_tokens"], each["usage"].get("completion_tokens_details")
    return one, two, events


@pytest.mark.parametrize("width", [1, 3, 1000])
def test_stop_strings_are_looked_for_in_content_alone(width: int) -> None:
    text = f"<think>I must stop soon</think>Well, {CALL}"
    whole, streamed, _ = both(text, width, tools=TOOLS, stop=["stop"])
    assert whole == streamed
    assert (whole["reasoning"], whole["content"]) == ("I must stop soon", "Well,")
    assert whole["calls"] == [["f", '{"x": "stop here"}']]
    assert whole["finish"][0] == "tool_calls"


@pytest.mark.parametrize("width", [1, 3, 1000])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_in_content_ends_the_reply(width: int, include: bool) -> None:
    text = f"<think>I must stop</think>Now stop it {CALL}"
    fields = {"tools": TOOLS, "stop": ["stop"], "include_stop_str_in_output": include}
    whole, streamed, _ = both(text, width, **fields)
    assert whole == streamed
    assert whole["content"] == ("Now stop" if include else "Now ")
    assert (whole["calls"], whole["finish"]) == ([], ("stop", "stop"))
    assert whole["usage"][0] < len(encode(text))


@pytest.mark.parametrize("width", [1, 1000])
def test_a_stop_string_does_not_go_on_behind_a_call(width: int) -> None:
    whole, streamed, _ = both(f"a{CALL}b", width, tools=TOOLS, stop=["ab"])
    assert whole == streamed
    assert (whole["content"], len(whole["calls"])) == ("ab", 1)


def test_the_first_tokens_are_exempt_from_stop_strings_with_min_tokens() -> None:
    text = "<think>x</think>stop and stop"
    count = len(encode("<think>x</think>stop and"))
    whole, streamed, _ = both(text, 1, stop=["stop"], min_tokens=count)
    assert whole == streamed
    assert whole["content"] == "stop and "


@pytest.mark.parametrize("width", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ("<think>I think, so </think>Yes.", "I think, so "),
        ("<think></think>Yes.", ""),
        ("Yes.", ""),
        ("<think>no end of it", "no end of it"),
    ],
)
@pytest.mark.parametrize("finish", [FinishReason.EOS, FinishReason.LENGTH])
def test_tokens_of_reasoning_are_counted(width: int, text: str, reasoning: str, finish: FinishReason) -> None:
    before = text.partition(reasoning)[0] if reasoning else text
    assert encode(text)[len(encode(before)) :][: len(encode(reasoning))] == encode(reasoning) or not reasoning
    whole, streamed, _ = both(text, width, finish)
    assert whole == streamed
    assert whole["usage"][1] == {"reasoning_tokens": len(encode(reasoning)) if reasoning else 0}


@pytest.mark.parametrize("width", [1, 1000])
def test_a_delta_has_one_kind_of_text(width: int) -> None:
    text = f"<think>hmm</think>Well {CALL} so {CALL}"
    fields = {"return_token_ids": True, "logprobs": True, "tools": TOOLS}
    _, streamed, events = both(text, width, **fields)
    assert (streamed["reasoning"], streamed["content"]) == ("hmm", "Well so")
    kinds = [set(event["choices"][0]["delta"]) - {"role"} for event in events[1:]]
    assert all(len(kind) <= 1 for kind in kinds), kinds
    ids = [token for event in events for token in event["choices"][0].get("token_ids") or ()]
    assert ids == [*encode(text), 1]
    ends = [event["choices"][0]["finish_reason"] for event in events]
    assert ends == [None] * (len(ends) - 1) + ["tool_calls"]
