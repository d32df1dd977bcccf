"""Decides whether a request is translated for an endpoint, and translates it and its replies."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import msgspec

from penstock.dialects.messages.errors import error_body as messages_error
from penstock.dialects.responses.errors import error_body as response_error
from penstock.gateway.requests.apis import APIS
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.requests.named_response import COMPACT
from penstock.gateway.responses.response_observer import ReplyObserver, StreamObserver
from penstock.gateway.translation.chat_output import ChatOutput
from penstock.gateway.translation.messages_request import translate_messages
from penstock.gateway.translation.reply_observers import TranslatedBody, TranslatedStream
from penstock.gateway.translation.responses_request import translate_response
from penstock.gateway.translation.translated_request import TranslatedRequest
from penstock.gateway.upstream.exchange import Headers
from penstock.generation.replies.stream_failure import stream_failed
from penstock.http.errors import ApiError, encode_json
from penstock.streaming.stream import StreamError

CHAT = "chat"
CHAT_PATH = b"/v1/chat/completions"
THREAD_BYTES = 256 << 10
"""A body that is translated in a thread, as it takes milliseconds."""
MAX_BODY_BYTES = 8 << 20
"""Bytes of a reply that is not streamed."""
TRANSLATED = {"messages": translate_messages, "responses": translate_response}
_COUNTERS = {"/v1/messages/count_tokens": "messages", "/v1/responses/input_tokens": "responses"}
"""Routes that count tokens, which chat completions cannot do."""
_ANTHROPIC = (b"anthropic-version", b"anthropic-beta", b"anthropic-dangerous-direct-browser-access")
_REPLACED = frozenset((b"content-type", b"content-length", b"content-encoding", b"warning", b"request-id"))
"""Headers of the reply that are not the endpoint's."""
_SESSION = b"x-session-id"
_is_plain = re.compile(r"[\x21-\x7e]{1,1024}").fullmatch


def is_translated(apis: frozenset[str], incoming: IncomingRequest) -> bool:
    """Whether a request is translated for endpoints that speak ``apis``. Raises ApiError for one that they
    cannot answer."""
    api = APIS.get(incoming.path) or _COUNTERS.get(incoming.path)
    if api is None or api in apis or incoming.method != "POST":
        return False
    if api in TRANSLATED and CHAT in apis and incoming.path in APIS and incoming.path != COMPACT:
        return True
    spoken = ", ".join(sorted(apis))
    what = "tokens are not counted" if incoming.path in _COUNTERS else f"{api} are not translated"
    if incoming.path == COMPACT:
        what = "conversations are not compacted"
    raise ApiError(
        404,
        f"The model servers of this model speak {spoken} alone, and {what} there.",
        code="api_not_served",
    )


class Translation:
    """One request for one endpoint that does not speak its API."""

    def __init__(
        self, incoming: IncomingRequest, request: TranslatedRequest, request_id: str, *, hosted: bool
    ) -> None:
        """``hosted``: the API is somebody else's, who needs not know what sessions are called."""
        assert incoming.body is not None, "only requests that generate are translated"
        raw = encode_json(request.fields)
        body = msgspec.structs.replace(incoming.body, raw=raw, include_usage=None)
        self.incoming = msgspec.structs.replace(
            incoming,
            target=_chat_target(incoming.target),
            path=CHAT_PATH.decode(),
            headers=_chat_headers(incoming.headers, None if hosted else body.session),
            raw=raw,
            body=body,
        )
        """What the endpoint gets."""
        self._messages = incoming.path != "/v1/responses"
        self._request = request._replace(fields={})
        self._request_id = request_id
        self._stream: TranslatedStream | None = None

    def headers(self, headers: Headers, *, streamed: bool) -> Headers:
        """The headers of the reply."""
        kept = [header for header in headers if header[0] not in _REPLACED]
        kept.append((b"content-type", b"text/event-stream" if streamed else b"application/json"))
        if self._messages:
            kept.append((b"request-id", self._request_id.encode("latin-1")))
        if self._request.warning is not None:
            kept.append((b"warning", b'299 penstock "%b"' % self._request.warning.encode()))
        return kept

    def observer(
        self,
        status: int,
        observer: StreamObserver | ReplyObserver,
        *,
        on_failed: Callable[[], None],
        on_error: Callable[[int, str], None],
    ) -> StreamObserver | ReplyObserver:
        """What observes a reply in the place of ``observer``, and translates it. ``on_failed``: called when a
        stream has ended with an error; ``on_error``: with the status of an error in the place of a good
        reply, and why."""
        output, reply = ChatOutput(self._request.output), self._request.make_reply()
        streamed = self.incoming.body is not None and self.incoming.body.stream
        seen, held = observer.seen, observer.held
        if isinstance(observer, StreamObserver) and status == 200 and streamed:
            self._stream = TranslatedStream(
                output=output, reply=reply, held=held, seen=seen, on_failed=on_failed
            )
            return self._stream
        problem = ""
        if status < 400 and (status != 200 or isinstance(observer, StreamObserver) or streamed):
            problem = f"status {status}, and not the content that was asked for"
        if isinstance(observer, StreamObserver):
            seen.stream = False
        return TranslatedBody(
            json=status == 200,
            error=status >= 400,
            held=held,
            seen=seen,
            max_bytes=MAX_BODY_BYTES,
            output=output,
            reply=reply,
            status=status,
            error_body=self._error_body,
            on_error=on_error,
            problem=problem,
        )

    def error_event(self, code: str, message: str) -> bytes:
        """The events that end a stream after an error; empty if it has ended."""
        if self._stream is None:
            return b""
        return self._stream.error(StreamError(502, code, f"gateway: {message}"))

    def _error_body(self, error: StreamError) -> bytes:
        shown = stream_failed(error)
        return messages_error(shown, self._request_id) if self._messages else response_error(shown)


async def translate(incoming: IncomingRequest, request_id: str, *, hosted: bool = False) -> Translation:
    """Translate a request. Raises ApiError."""
    if len(incoming.raw) > THREAD_BYTES:
        return await asyncio.to_thread(_translate, incoming, request_id, hosted)
    return _translate(incoming, request_id, hosted)


def _translate(incoming: IncomingRequest, request_id: str, hosted: bool) -> Translation:
    request = TRANSLATED[APIS[incoming.path]](incoming.raw, request_id)
    return Translation(incoming, request, request_id, hosted=hosted)


def _chat_target(target: bytes) -> bytes:
    """The path of chat completions where ``target`` has another route: below the same prefix."""
    path = target.partition(b"?")[0]
    return path[: max(path.lower().rfind(b"/v1/"), 0)].rstrip(b"/") + CHAT_PATH


def _chat_headers(headers: Headers, session: str | None) -> Headers:
    """The headers of a chat completion. Anthropic's clients send their key in another header. The session
    that a body names stays known by a header, as some chat servers refuse fields that they do not know."""
    names = {name for name, _ in headers}
    kept = [header for header in headers if header[0] not in _ANTHROPIC]
    if b"authorization" not in names:
        kept = [
            (b"authorization", b"Bearer " + value) if name == b"x-api-key" else (name, value)
            for name, value in kept
        ]
    else:
        kept = [header for header in kept if header[0] != b"x-api-key"]
    if session is not None and _SESSION not in names and _is_plain(session):
        kept.append((_SESSION, session.encode()))
    return kept
