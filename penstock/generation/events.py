"""The JSON of events, put together from bytes prepared once per request.

Field order and spelling follow vLLM's events, so that its clients find what they look for; fields that
are null there and that OpenAI's own API does not send are left out (see docs/compatibility.md).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock import __version__
from penstock.streaming.stream import StreamError
from penstock.streaming.token_table import escape_json
from penstock.wire.messages import TransferParams

encode_json = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
"""What clients pass over, by the rules of server-sent events."""
SYSTEM_FINGERPRINT = f"penstock-{__version__}"
_FINGERPRINT = b',"system_fingerprint":' + encode_json(SYSTEM_FINGERPRINT)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    """The usage object. ``cached_tokens`` None: the engine has no prefix cache to report on."""
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": details,
    }


class EventShape:
    """The events of one request: everything but what changes from event to event."""

    __slots__ = ("_head_end", "_prefix", "_tail_start", "chat", "created", "id", "model", "role")

    def __init__(self, *, chat: bool, request_id: str, model: str, role: str = "assistant") -> None:
        self.chat = chat
        self.id = request_id
        self.model = model
        self.role = role
        self.created = int(time.time())
        self._prefix = b'data: {"id":"%b","object":"%b","created":%d,"model":"%b","choices":[' % (
            escape_json(request_id),
            b"chat.completion.chunk" if chat else b"text_completion",
            self.created,
            escape_json(model),
        )
        self._head_end = b',"delta":{"content":"' if chat else b',"text":"'
        self._tail_start = b'"}' if chat else b'"'

    def head(self, index: int) -> bytes:
        """All bytes of choice ``index``'s plain events before their text."""
        return b'%b{"index":%d%b' % (self._prefix, index, self._head_end)

    def tail(self) -> bytes:
        """All bytes of a plain event after its text."""
        return self._tail_start + b',"logprobs":null,"finish_reason":null}]}\n\n'

    def first(
        self, index: int, prompt_token_ids: Sequence[int] | None, usage: Mapping[str, Any] | None
    ) -> bytes:
        """The first event of a chat choice."""
        extra = b"" if usage is None else b',"usage":' + encode_json(usage)
        if prompt_token_ids is not None:
            extra += b',"prompt_token_ids":' + encode_json(prompt_token_ids)
        return (
            b'%b{"index":%d,"delta":{"role":"%b","content":""},"logprobs":null,"finish_reason":null}]%b}\n\n'
            % (self._prefix, index, escape_json(self.role), extra)
        )

    def event(
        self,
        index: int,
        text: bytes,
        *,
        delta: Mapping[str, Any] | None = None,
        finish_reason: bytes | None = None,
        stop_reason: int | str | None = None,
        logprobs: Mapping[str, Any] | None = None,
        token_ids: Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        usage: Mapping[str, Any] | None = None,
        kv_transfer_params: TransferParams | None = None,
    ) -> bytes:
        """One event of a choice, with all that was asked for.

        ``text`` is JSON-escaped; ``delta``: of a chat choice, in place of the text.
        """
        if delta is not None:
            parts = [self._prefix, b'{"index":%d,"delta":' % index, encode_json(delta)]
        elif self.chat and not text:
            parts = [self._prefix, b'{"index":%d,"delta":{}' % index]
        else:
            parts = [self.head(index), text, self._tail_start]
        parts += (b',"logprobs":', b"null" if logprobs is None else encode_json(logprobs))
        if finish_reason is None:
            parts.append(b',"finish_reason":null')
        else:
            parts.append(
                b',"finish_reason":"%b","stop_reason":%b' % (finish_reason, encode_json(stop_reason))
            )
        if prompt_token_ids is not None:
            parts += (b',"prompt_token_ids":', encode_json(prompt_token_ids))
        if token_ids is not None:
            parts += (b',"token_ids":', encode_json(token_ids))
        parts.append(b"}]" if finish_reason is None else b"}]" + _FINGERPRINT)
        if usage is not None:
            parts += (b',"usage":', encode_json(usage))
        if kv_transfer_params is not None:
            parts += (b',"kv_transfer_params":', kv_transfer_params)
        parts.append(b"}\n\n")
        return b"".join(parts)

    def usage_event(self, usage: Mapping[str, Any]) -> bytes:
        return b'%b],"usage":%b%b}\n\n' % (self._prefix, encode_json(usage), _FINGERPRINT)


def error_event(error: StreamError) -> bytes:
    """The event that ends a stream which failed after its headers were sent."""
    body = {
        "error": {
            "message": error.message,
            "type": "InternalServerError" if error.status >= 500 else "BadRequestError",
            "param": None,
            "code": error.code,
        }
    }
    return b"data: " + encode_json(body) + b"\n\n"
