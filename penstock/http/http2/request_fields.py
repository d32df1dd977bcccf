"""From the decoded fields of an HTTP/2 request to its head (RFC 9113 §8), as strict as HTTP/1.1's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple
from urllib.parse import unquote

from penstock.http.errors import ApiError
from penstock.http.http1.request_head import (
    CHECKED,
    HOST_CHARACTERS,
    LENGTH,
    METHODS,
    RequestHead,
    shown_text,
)
from penstock.http.http2.header_blocks import MALFORMED, Field

_PSEUDO: Final = frozenset((b":method", b":scheme", b":authority", b":path", b":protocol"))
_PER_CONNECTION: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
"""Fields of HTTP/1.1's connections (RFC 9113 §8.2.2)."""
_SPECIAL: Final = CHECKED | _PER_CONNECTION | {MALFORMED, b"te", b"cookie"}
CONNECT: Final = b"CONNECT"
"""With :protocol, the method that opens a WebSocket (RFC 8441); without, no method of this server."""
_GRAPHIC: Final = bytes(range(0x21, 0x7F))
_ABSENT: Final = b""


class MalformedRequest(Exception):
    """A request that RFC 9113 §8.1.1 wants answered with a stream error."""


class _Start(NamedTuple):
    """What the pseudo-header fields say."""

    method: str
    authority: bytes | None
    path: str
    target: bytes


def parse_fields(fields: Sequence[Field], *, complete: bool) -> RequestHead:
    """The head of a request. ``complete``: it has no body.

    The header ``host`` comes first. Raises MalformedRequest, and ApiError for a request that is well-formed
    but not for this server.
    """
    count = 0
    while count < len(fields) and fields[count][0] in _PSEUDO:
        count += 1
    start = _parse_start(fields[:count])
    headers, by_name = _regular_headers(fields, count)
    host = by_name.get(b"host")
    if start.authority is not None:
        if host is None:
            headers.insert(0, (b"host", start.authority))
            by_name[b"host"] = start.authority
        elif host != start.authority:
            raise ApiError(400, "The header Host differs from :authority.", param="Host")
    elif not host or host.translate(None, HOST_CHARACTERS):
        raise _no_host()
    expect = by_name.get(b"expect", b"").lower()
    if expect not in (b"", b"100-continue"):
        raise ApiError(
            417, "The header Expect is not 100-continue, the only expectation of this server.", param="Expect"
        )
    return RequestHead(
        method=start.method,
        path=start.path,
        target=start.target,
        version="2",
        headers=headers,
        fields=by_name,
        length=_body_length(by_name.get(b"content-length"), complete=complete),
        keep_alive=True,
        expects_continue=bool(expect) and not complete,
    )


def refused_head(method: str) -> RequestHead:
    """The head of a request that is answered without the application, of which only the method counts."""
    return RequestHead(
        method=method,
        path="",
        target=b"",
        version="2",
        headers=[],
        fields={},
        length=None,
        keep_alive=True,
        expects_continue=False,
    )


def _parse_start(fields: Sequence[Field]) -> _Start:
    pseudo = dict(fields)
    if len(pseudo) != len(fields):
        raise MalformedRequest("a pseudo-header field is given twice")
    method, target = pseudo.get(b":method", _ABSENT), pseudo.get(b":path", _ABSENT)
    protocol = pseudo.get(b":protocol")
    if protocol is not None:  # RFC 8441
        if method != CONNECT:
            raise MalformedRequest(":protocol is for CONNECT")
        if protocol.lower() != b"websocket":
            raise ApiError(501, f"The :protocol {shown_text(protocol)} is not websocket.")
    elif method not in METHODS and method:
        raise ApiError(501, f"There is no method {shown_text(method)} on this server.")
    if not (method and target and b":scheme" in pseudo):
        raise MalformedRequest("a request lacks :method, :scheme or :path")
    raw_path, _, query = target.partition(b"?")
    if not target.startswith(b"/") and (target != b"*" or method != b"OPTIONS"):
        raise MalformedRequest(":path does not start with a slash")
    if target.translate(None, _GRAPHIC) or b"#" in target:
        raise MalformedRequest(":path has a fragment, or characters that no path may have")
    authority = pseudo.get(b":authority")
    if authority is not None and (not authority or authority.translate(None, HOST_CHARACTERS)):
        raise _no_host()
    path = raw_path.decode("ascii")
    return _Start(
        method=method.decode("ascii"),
        authority=authority,
        path=unquote(path) if "%" in path else path,
        target=target if query else raw_path,
    )


def _no_host() -> ApiError:
    return ApiError(400, "The field :authority is missing or no host.", param="Host")


def _regular_headers(fields: Sequence[Field], start: int) -> tuple[list[Field], dict[bytes, bytes]]:
    """The fields from ``start`` on, and the first one of each name."""
    headers = list(fields[start:])
    by_name: dict[bytes, bytes] = {}
    cookies = 0
    for name, value in headers:
        if name not in _SPECIAL:
            if name[0] == 58:  # a colon
                raise MalformedRequest("a pseudo-header field is unknown or follows a header")
        elif name == MALFORMED:
            raise MalformedRequest(value.decode("latin-1"))
        elif name in _PER_CONNECTION:
            raise MalformedRequest(f"the header {name.decode()} is not for HTTP/2")
        elif name == b"te":
            if value.lower() != b"trailers":
                raise MalformedRequest("the header te is not trailers")
        elif name == b"cookie":
            cookies += 1
        elif name in by_name:
            raise ApiError(
                400, f"The header {shown_text(name)} is given more than once.", param=name.decode()
            )
        by_name.setdefault(name, value)
    if cookies > 1:  # RFC 9113 §8.2.3
        joined = b"; ".join([value for name, value in headers if name == b"cookie"])
        headers = [field for field in headers if field[0] != b"cookie"]
        headers.append((b"cookie", joined))
        by_name[b"cookie"] = joined
    return headers, by_name


def _body_length(given: bytes | None, *, complete: bool) -> int | None:
    """None: the body's length is not said."""
    if given is None:
        return 0 if complete else None
    if not LENGTH.fullmatch(given):
        raise MalformedRequest("content-length is no number of bytes")
    length = int(given)
    if complete and length:
        raise MalformedRequest("a request without a body has a content-length")
    return length
