"""Chat templates that take too long: on the event loop a thread takes over, in a thread the request ends."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.generation.prompt import render_limit
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.render_limit import RenderTimeout, on_event_loop
from penstock.http.errors import ApiError

SQUARE = """
{%- for message in messages -%}
{%- set found = namespace(last='') -%}
{%- for other in messages[:loop.index] -%}{%- set found.last = other.content -%}{%- endfor -%}
<{{ found.last }}>
{%- endfor -%}"""
"""Reads all messages before each one."""


def messages(count: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a"} for _ in range(count)]


def test_a_short_conversation_is_rendered_anywhere() -> None:
    template = ChatTemplate({"default": SQUARE}, {})
    assert on_event_loop(template.render, messages(3)) == "<a><a><a>"
    assert template.render(messages(1000)) == "<a>" * 1000


def test_a_template_that_takes_long_leaves_the_event_loop() -> None:
    template = ChatTemplate({"default": SQUARE}, {})
    with pytest.raises(RenderTimeout):
        on_event_loop(template.render, messages(10_000))


def test_a_template_that_takes_too_long_in_a_thread_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def thread_time() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(render_limit.time, "thread_time", thread_time)
    template = ChatTemplate({"default": SQUARE}, {})
    with pytest.raises(ApiError) as caught:
        template.render(messages(200))
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert "more than 5 s for these 200 messages" in caught.value.message
