"""Which requests are translated, and where they are sent."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.requests.long_values import NO_VALUES, split
from penstock.gateway.requests.request_body import GENERATION_PATHS, read_request
from penstock.gateway.translation.translation import Translation, is_translated, translate
from penstock.http.errors import ApiError

BODY = b'{"model":"m","max_tokens":5,"metadata":{"user_id":"u"},"messages":[{"role":"user","content":"a"}]}'


def incoming(path: str, target: bytes = b"", method: str = "POST") -> IncomingRequest:
    body = read_request(BODY) if path in GENERATION_PATHS else None
    return IncomingRequest(method, target or path.encode(), path, [(b"x-api-key", b"k")], BODY, body, "m")


@pytest.mark.parametrize(
    ("apis", "path", "method", "wanted"),
    [
        ({"chat"}, "/v1/messages", "POST", True),
        ({"chat"}, "/v1/responses", "POST", True),
        ({"chat", "messages"}, "/v1/messages", "POST", False),
        ({"chat"}, "/v1/chat/completions", "POST", False),
        ({"chat"}, "/v1/embeddings", "POST", False),
        ({"chat"}, "/v1/responses/resp_1", "GET", False),
        ({"chat"}, "/v1/completions", "POST", None),
        ({"messages"}, "/v1/responses", "POST", None),
        ({"messages"}, "/v1/chat/completions", "POST", None),
        ({"chat"}, "/v1/messages/count_tokens", "POST", None),
        ({"chat"}, "/v1/responses/input_tokens", "POST", None),
        ({"messages"}, "/v1/messages/count_tokens", "POST", False),
    ],
)
def test_which_are_translated(apis: set[str], path: str, method: str, wanted: bool | None) -> None:
    """None: it is refused."""
    request = incoming(path, method=method)
    if wanted is not None:
        assert is_translated(frozenset(apis), request) is wanted
        return
    with pytest.raises(ApiError) as raised:
        is_translated(frozenset(apis), request)
    assert (raised.value.status, raised.value.code) == (404, "api_not_served")


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        (b"/v1/messages?beta=true", b"/v1/chat/completions"),
        (b"/llm/v1/messages", b"/llm/v1/chat/completions"),
        (b"//V1//Messages/", b"/v1/chat/completions"),
    ],
)
def test_where_they_are_sent(target: bytes, wanted: bytes) -> None:
    translated = asyncio.run(translate(incoming("/v1/messages", target), "r"))
    assert (translated.incoming.target, translated.incoming.path) == (wanted, "/v1/chat/completions")
    assert translated.incoming.headers == [(b"authorization", b"Bearer k"), (b"x-session-id", b"u")]


def test_a_large_body_is_translated_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.translation.translation.THREAD_BYTES", 10)
    assert isinstance(asyncio.run(translate(incoming("/v1/messages"), "r")), Translation)


def test_a_picture_is_not_looked_at() -> None:
    """The translated body has its mark; filled, it is what the translation of the whole body is."""
    source = {"type": "base64", "media_type": "image/png", "data": "QUJD" * 20_000}
    content = [{"type": "text", "text": "what?"}, {"type": "image", "source": source}]
    fields = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    body = json.dumps(fields).encode()
    text, values = split(body)
    split_body, whole = (
        asyncio.run(
            translate(
                msgspec.structs.replace(
                    incoming("/v1/messages"), raw=raw, body=read_request(raw), values=held
                ),
                "r",
            )
        ).incoming
        for raw, held in ((text, values), (body, NO_VALUES))
    )
    assert len(split_body.raw) < 1000
    assert b"".join(split_body.values.filled(split_body.raw)) == whole.raw
