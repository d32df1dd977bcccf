"""The fields of a request body that the gateway reads; it may change model and include_usage."""

from __future__ import annotations

import contextlib

import msgspec

from penstock.gateway.requests.apis import APIS
from penstock.gateway.requests.gemini_path import is_stream, model_in
from penstock.gateway.requests.long_values import MARK_BYTES, NO_VALUES, LongValues
from penstock.gateway.requests.named_response import COMPACT, RESPONSES, response_in_body, response_in_path
from penstock.gateway.requests.one_meaning import check_meaning
from penstock.http.body_errors import malformed, wrong_type

GENERATION_PATHS = frozenset(APIS)
STREAMING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Routes whose requests have ``stream_options.include_usage``."""
TOKEN_BYTES = 4
"""Estimate of the bytes of a token, as in English text."""
PICTURE_TOKENS = 768
"""Estimate of the tokens of a picture: OpenAI counts 765 for 1024 x 1024 pixels."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    priority: int | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    # what precedes the conversation in the prompt: responses, messages
    instructions: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    background: msgspec.Raw = msgspec.Raw()
    # what names a session
    session_id: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()
    # the limit of the reply: completions and chat, chat, messages; responses
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    max_output_tokens: msgspec.Raw = msgspec.Raw()
    options: msgspec.Raw = msgspec.Raw()  # Ollama's
    # Gemini's
    contents: msgspec.Raw = msgspec.Raw()
    systemInstruction: msgspec.Raw = msgspec.Raw()
    generationConfig: msgspec.Raw = msgspec.Raw()
    # what names other hosts: vLLM, SGLang
    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    bootstrap_host: msgspec.Raw = msgspec.Raw()


class _Metadata(msgspec.Struct):
    user_id: str | None = None


class _Options(msgspec.Struct):
    num_predict: msgspec.Raw = msgspec.Raw()
    maxOutputTokens: msgspec.Raw = msgspec.Raw()


_decode_exact = msgspec.json.Decoder(_Body).decode
_decode_lax = msgspec.json.Decoder(_Body, strict=False).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_metadata = msgspec.json.Decoder(_Metadata).decode
_decode_options = msgspec.json.Decoder(_Options).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class RequestBody(msgspec.Struct, frozen=True):
    """The fields of a generation request that picking and relaying use."""

    raw: bytes
    """JSON; long base64 may be apart, see :mod:`penstock.gateway.requests.long_values`."""
    model: str
    stream: bool
    include_usage: bool | None
    """``stream_options.include_usage``; None: not set."""
    priority: int
    prompt: bytes
    """JSON of the prompt, messages or input, for prefix affinity; before it the instructions."""
    session: str | None
    """What names the conversation or its user: ``session_id``, ``prompt_cache_key``, ``metadata.user_id`` of
    messages."""
    response: str | None
    """Id of the stored response that the request continues, or refers to."""
    background: bool
    """Whether the response goes on without its client, and may be cancelled by others."""
    most_output: int | None = None
    """The most tokens of the reply; None: not said."""
    transfer_field: str | None = None
    """The field by which the client names hosts from which a KV cache is fetched; None: it names none."""
    pictures: int = 0
    """Long base64 in the prompt."""

    @property
    def tokens(self) -> int:
        """Estimated prompt tokens."""
        text = len(self.prompt) - self.pictures * MARK_BYTES
        return text // TOKEN_BYTES + self.pictures * PICTURE_TOKENS

    def with_usage(self) -> bytes:
        """The body with ``include_usage`` set."""
        # It is an object with a field, as it is streamed; names may have their letters escaped.
        if b"stream_options" not in self.raw and b"\\u00" not in self.raw:
            return b'%b,"stream_options":{"include_usage":true}}' % self.raw.rstrip()[:-1]
        fields = _fields.decode(self.raw)
        raw_options = fields.get("stream_options", msgspec.Raw(b"null"))
        options = {} if bytes(raw_options) == b"null" else _fields.decode(raw_options)
        options["include_usage"] = msgspec.Raw(b"true")
        return _encode({**fields, "stream_options": options})

    def with_transfer(self, params: bytes) -> RequestBody:
        """Copy the request with these ``kv_transfer_params`` (JSON)."""
        raw = _encode({**_fields.decode(self.raw), "kv_transfer_params": msgspec.Raw(params)})
        return msgspec.structs.replace(self, raw=raw)

    def with_model(self, model: str) -> RequestBody:
        """Copy the request for another model."""
        fields = _fields.decode(self.raw)
        raw = _encode({**fields, "model": model})
        return msgspec.structs.replace(self, raw=raw, model=model)


def read_request(
    raw: bytes, path: str = "", target: bytes = b"", values: LongValues = NO_VALUES
) -> RequestBody:
    """Decode the body of a generation request for ``path``, which came as ``target``, as Penstock's server
    does: it accepts, for instance, a number as a boolean, and its errors are the same. ``values``: the base64
    for which ``raw`` has marks. Raises ApiError, also for what other servers may read in another way."""
    try:
        if not raw.isascii():
            raw.decode()  # msgspec checks the UTF-8 of decoded strings only, and fields are rewritten later
        body = _decode(raw)
    except msgspec.ValidationError as error:
        raise wrong_type(raw, str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(raw, error) from None
    options, model, stream = body.stream_options, body.model or "", bool(body.stream)
    match APIS.get(path):
        case "ollama":
            stream = body.stream is not False
        case "gemini":
            model, stream = model_in(target), is_stream(path, target)
    # Each API has one of the three, and a body with several of them is charged for all.
    texts = [
        bytes(text)
        for text in (
            body.instructions,
            body.system,
            body.systemInstruction,
            body.messages,
            body.prompt,
            body.input,
            body.contents,
        )
    ]
    check_meaning(raw, (*texts, bytes(body.tools)))
    prompt, pictures = values.compared(b"".join(texts))
    return RequestBody(
        raw=raw,
        model=model,
        stream=stream,
        include_usage=None if options is None else options.include_usage,
        priority=body.priority or 0,
        prompt=prompt,
        session=_session(body, values),
        response=response_in_body(bytes(body.previous_response_id), bytes(body.input)),
        background=bytes(body.background) == b"true",
        most_output=_most_output(body),
        transfer_field=_transfer_field(body),
        pictures=pictures,
    )


def response_of(path: str, body: RequestBody | None) -> str | None:
    """Id of the stored response that a request is about, or continues."""
    if body is None:
        return response_in_path(path)
    return body.response if path in (RESPONSES, COMPACT) else None


def _session(body: _Body, values: LongValues) -> str | None:
    """What is malformed is left to the server. A long name is the same in every body, as its digest."""
    try:
        for named in (body.session_id, body.prompt_cache_key):
            if named and (key := _decode_text(values.compared(bytes(named))[0])):
                return key
        metadata = values.compared(bytes(body.metadata))[0]
        return _decode_metadata(metadata).user_id if metadata else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _most_output(body: _Body) -> int | None:
    """What is malformed is left to the server."""
    limits = [*map(bytes, (body.max_completion_tokens, body.max_tokens, body.max_output_tokens))]
    if given := body.options or body.generationConfig:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            options = _decode_options(given)
            limits += [bytes(each).lstrip(b"0") for each in (options.num_predict, options.maxOutputTokens)]
    return max((int(raw) for raw in limits if len(raw) < 16 and raw.isdigit()), default=None)


def _transfer_field(body: _Body) -> str | None:
    for name in ("kv_transfer_params", "bootstrap_host"):
        if bytes(getattr(body, name)) not in (b"", b"null"):
            return name
    return None


def _decode(raw: bytes) -> _Body:
    """Raises msgspec's errors, and RecursionError."""
    try:
        return _decode_exact(raw)
    except msgspec.ValidationError:
        return _decode_lax(raw)
