"""What the gateway looks at in a request's body, and the one thing it may change in it."""

from __future__ import annotations

import msgspec

GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
STREAMING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Where ``stream_options.include_usage`` exists."""


class BodyError(ValueError):
    """A body that is no JSON object, or has a field of the wrong type."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    model: str = ""
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    priority: int | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Body)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class RequestBody(msgspec.Struct, frozen=True):
    """A generation request, read as far as picking and relaying need it."""

    raw: bytes
    model: str
    stream: bool
    include_usage: bool | None
    """Whether the client wants usage in the stream; None: it did not say."""
    priority: int
    prompt: bytes
    """JSON of the prompt, messages or input: what prefix affinity compares."""
    asked_model: str
    """What the client calls the model."""

    @property
    def tokens(self) -> int:
        """Estimated prompt tokens: four bytes each, as in English text."""
        return len(self.prompt) // 4

    def with_usage(self) -> bytes:
        """The body with ``include_usage`` set."""
        fields = _fields.decode(self.raw)
        raw_options = fields.get("stream_options", msgspec.Raw(b"null"))
        options = {} if bytes(raw_options) == b"null" else _fields.decode(raw_options)
        options["include_usage"] = msgspec.Raw(b"true")
        return _encode({**fields, "stream_options": options})

    def with_model(self, model: str) -> RequestBody:
        """The same request for another model."""
        fields = _fields.decode(self.raw)
        raw = _encode({**fields, "model": model})
        return msgspec.structs.replace(self, raw=raw, model=model)


def read_request(raw: bytes) -> RequestBody:
    """Raises BodyError."""
    try:
        body = _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BodyError(str(error)) from None
    options = body.stream_options
    return RequestBody(
        raw,
        body.model,
        bool(body.stream),
        None if options is None else options.include_usage,
        body.priority or 0,
        bytes(body.messages or body.prompt or body.input),
        body.model,
    )
