"""Which content the reply to a request should have, and the observer that it gets."""

from __future__ import annotations

from typing import Literal

from penstock.gateway.requests.apis import VECTOR_APIS
from penstock.gateway.requests.named_response import RESPONSES, response_in_path
from penstock.gateway.requests.relayed_routes import INFERENCE_ROUTES
from penstock.gateway.requests.request_body import RequestBody
from penstock.gateway.responses.held_bytes import HeldBytes
from penstock.gateway.responses.response_observer import ReplyObserver, ResponseCallback, StreamObserver
from penstock.gateway.responses.vector_usage import usage_in_headers
from penstock.gateway.upstream.exchange import Headers
from penstock.http.request import first_values

EVENT_STREAM, LINES = b"text/event-stream", b"application/x-ndjson"
COLUMNS = b"application/vnd.safetensors"
"""Token ids for programs, which ask for this type."""
MAX_HEADER = 100
"""Bytes of a header's value that a message has."""
ExpectedReply = Literal["stream", "background", "json", "replay", "vectors", "result", "anything"]
"""The content that a good reply to the request has: an event stream, also of a response in the background;
JSON; or a replay, which is a stored response as JSON, or once more as a stream. A result (audio, images) may
be of any kind, but is no error; so may vectors (scores, labels), but for a page, and they have usage."""


def expected_reply(body: RequestBody | None, path: str) -> ExpectedReply:
    """The content expected for a request; ``body`` is None when the request does not generate."""
    if body is not None:
        if not body.stream:
            return "json"
        return "background" if body.background and path == RESPONSES else "stream"
    if response_in_path(path) is not None:
        return "replay"
    if path in VECTOR_APIS:
        return "vectors"
    return "result" if path in INFERENCE_ROUTES else "anything"


def make_observer(
    status: int,
    headers: Headers,
    expects: ExpectedReply,
    *,
    on_response: ResponseCallback,
    strip_usage: bool,
    held: HeldBytes,
) -> StreamObserver | ReplyObserver:
    """The observer for a reply with this head."""
    fields = first_values(headers)
    counted = usage_in_headers(fields) if expects == "vectors" and status == 200 else None
    observer: StreamObserver | ReplyObserver
    coding = fields.get(b"content-encoding", b"").strip().lower()
    if coding not in (b"", b"identity"):
        observer = ReplyObserver(json=False)
        observer.seen.unread = f"its content-encoding is {_shown(coding)}"
        observer.seen.usage = counted
        return observer
    content_type = fields.get(b"content-type", b"")
    kind, _, parameters = content_type.lower().partition(b";")
    if status == 200 and kind.strip() == COLUMNS and expects != "vectors":
        observer = ReplyObserver(json=False)
        observer.seen.unread = f"its content type is {_shown(content_type)}"
        return observer
    streamed = kind.strip() in (EVENT_STREAM, LINES)
    if streamed:
        known, lines = expects not in _UNKNOWN, kind.strip() == LINES
        stream = StreamObserver(strip_usage, on_response, known=known, held=held, lines=lines)
        stream.seen.may_stop = expects in ("background", "replay", *_UNKNOWN)
        observer = stream
    else:
        good = status == 200
        may_err = good and expects in ("vectors", "result", "stream", "background")
        observer = ReplyObserver(
            good and expects == "json",
            status >= 400,
            may_err,
            good and expects == "vectors",
            on_response=on_response,
            held=held,
        )
    observer.seen.usage = counted
    if expects in ("result", "anything"):
        pass  # audio, for instance
    elif 300 <= status < 400 and expects != "replay":
        observer.seen.note_problem(f"a redirect ({status}) instead of an answer")
    elif b"charset" in parameters and not any(name in parameters for name in _UTF_8):
        observer.seen.note_problem(f"its content type is {_shown(content_type)}, not UTF-8")
    elif status == 200 and expects == "vectors":
        if kind.strip() == b"text/html":
            observer.seen.note_problem(f"the answer is {_shown(content_type)}")
    elif status == 200 and expects in ("stream", "background") and not streamed:
        observer.seen.note_problem(f"the answer to a streamed request is {_shown(content_type)}")
    return observer


_UNKNOWN = ("vectors", "result", "anything")
_UTF_8 = (b"utf-8", b"utf8", b"us-ascii")


def _shown(value: bytes) -> str:
    return repr(value[:MAX_HEADER].decode("latin-1"))
