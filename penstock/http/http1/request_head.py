"""Parses the head of an HTTP/1.1 request: the request line and the headers.

What two implementations could read in two ways is refused: a proxy in front of this server may have read it
the other way, and taken one request for two (request smuggling, RFC 9112 §11.2). Messages of errors name a
header but never show its value, which may be a secret.
"""

from __future__ import annotations

import re
import string
from typing import Any, NamedTuple
from urllib.parse import unquote

from penstock.http.errors import ApiError

MAX_HEADERS = 128
"""Headers of one request."""
METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE"))
"""Methods of RFC 9110 and RFC 5789, without CONNECT, which is for proxies."""
CHECKED = frozenset(
    (
        b"api-key",
        b"authorization",
        b"connection",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        b"idempotency-key",
        b"origin",
        b"transfer-encoding",
        b"x-api-key",
        b"x-data-parallel-rank",
        b"x-request-id",
        b"x-session-id",
    )
)
"""Headers of which a second one would make the request ambiguous; those of Connection are joined."""

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_VALUE = rb"[^\x00-\x08\x0a-\x1f\x7f]*"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([!-~]+) HTTP/([0-9])\.([0-9])")
HEADER_LINES = re.compile(rb"(?:" + _TOKEN + rb":" + _VALUE + rb"\r\n)*")
_NAME = re.compile(_TOKEN)
_BARE_LF = re.compile(rb"(?<!\r)\n")
_ABSOLUTE = re.compile(rb"https?://[^/?#]+", re.IGNORECASE)
_ALPHANUMERIC = string.ascii_letters.encode() + string.digits.encode()
_TOKEN_CHARACTERS = _ALPHANUMERIC + b"!#$%&'*+-.^_`|~"
HOST_CHARACTERS = _ALPHANUMERIC + b"._~!$&'()*+,;=%:[]-"
_PRINTABLE = bytes({*range(256)} - {*range(32), 127} | {*b"\t"})
LENGTH = re.compile(rb"[0-9]{1,18}")
MAX_KNOWN_LINES = 1024
"""Header lines that are remembered: the requests of a client differ in a few of theirs."""
MAX_KNOWN_BYTES = 256
"""Longest of them."""
_known_lines: dict[bytes, tuple[bytes, bytes]] = {}
"""Name and value of each, by its bytes."""
_SHOWN = 40
"""Characters of a client's text that a message shows."""


class RequestHead(NamedTuple):
    """A request without its body."""

    method: str
    path: str
    """Without percent-encoding."""
    target: bytes
    """The path as it came, and the query, if there is one."""
    version: str
    """``1.0``, ``1.1`` or ``2``."""
    headers: list[tuple[bytes, bytes]]
    """Names in lower case."""
    fields: dict[bytes, bytes]
    """The headers by name; of those with the same name the first one, of Connection all values."""
    length: int | None
    """Bytes of the body; None: the body is chunked."""
    keep_alive: bool
    """Whether the client wants to use the connection again."""
    expects_continue: bool
    """Whether the client waits for 100 (Continue) before it sends the body."""
    derived: dict[object, Any] | None = None
    """What applications have derived from the head, by what each of them chooses, for all requests that have
    the same one but for its length; None: the head is of this request alone."""


def parse_head(head: bytes) -> RequestHead:
    """``head`` ends with the empty line after the headers. Raises ApiError."""
    line, _, rest = head.partition(b"\r\n")
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise _bad_line(line)
    method, target, major, minor = match.groups()
    if major != b"1":
        raise ApiError(505, "The request is not of HTTP/1.1 or HTTP/1.0, and HTTP/2 has no request line.")
    if method not in METHODS:
        raise ApiError(501, f"There is no method {shown_text(method)} on this server.")
    target = _origin_form(method, target)
    headers, fields = _parse_headers(rest[:-2])
    new = minor != b"0"
    connection = fields.get(b"connection", b"")
    host = fields.get(b"host")
    if (host is None and new) or (host is not None and host.translate(None, HOST_CHARACTERS)):
        raise ApiError(
            400, "The header Host is missing or no host: HTTP/1.1 needs exactly one.", param="Host"
        )
    expect = fields.get(b"expect", b"").lower() if new else b""
    if expect not in (b"", b"100-continue"):
        raise ApiError(
            417, "The header Expect is not 100-continue, the only expectation of this server.", param="Expect"
        )
    path = target.partition(b"?")[0].decode("ascii")
    return RequestHead(
        method=method.decode("ascii"),
        path=unquote(path) if "%" in path else path,
        target=target,
        version="1.1" if new else "1.0",
        headers=headers,
        fields=fields,
        length=_body_length(fields, chunks=new),
        keep_alive=not _has_token(connection, b"close") and (new or _has_token(connection, b"keep-alive")),
        expects_continue=bool(expect),
    )


def _bad_line(line: bytes) -> ApiError:
    if line.startswith(b"\x16\x03"):
        return ApiError(400, "This is the start of a TLS handshake, but the server speaks plain HTTP here.")
    return ApiError(400, "The request line is not 'METHOD TARGET HTTP/1.1'.")


def check_start(start: bytes | bytearray, checked: int) -> None:
    """Check an incomplete head, of which the first ``checked`` bytes were checked before.

    Raises ApiError if it cannot become a head, so that a client that speaks another protocol is answered at
    once.
    """
    if not checked and not _NAME.match(start):
        raise _bad_line(bytes(start[:_SHOWN]))
    if _BARE_LF.search(start, max(0, checked - 1)):
        raise ApiError(400, "A line of the request's head ends with LF alone instead of CR LF.")
    end = start.find(b"\r\n", max(0, checked - 1))
    if end >= 0 and start.find(b"\r\n", 0, end) < 0:
        line = bytes(start[:end])
        if not _REQUEST_LINE.fullmatch(line):
            raise _bad_line(line)


def _origin_form(method: bytes, target: bytes) -> bytes:
    """Path and query of a target in origin-form, absolute-form or asterisk-form (RFC 9112 §3.2)."""
    if not target.startswith(b"/"):
        absolute = _ABSOLUTE.match(target)
        if absolute is not None:
            target = target[absolute.end() :]
            target = target if target.startswith(b"/") else b"/" + target
        elif target != b"*" or method != b"OPTIONS":
            raise ApiError(400, "The target of the request line is neither a path nor an http URL.")
    if b"#" in target:
        raise ApiError(400, "The target of the request line has a fragment (#), which is not sent.")
    path, _, query = target.partition(b"?")
    return target if query else path


def _parse_headers(lines: bytes) -> tuple[list[tuple[bytes, bytes]], dict[bytes, bytes]]:
    """All headers, and the first one of each name. ``lines`` end with CR LF each."""
    split = lines.split(b"\r\n")
    split.pop()
    headers = []
    fields: dict[bytes, bytes] = {}
    for line in split:
        header = _known_lines.get(line) or _parse_line(line)
        if header is None:
            raise bad_header(lines)
        headers.append(header)
        name, value = header
        if name not in fields:
            fields[name] = value
        elif name == b"connection":
            fields[name] += b"," + value
        elif name in CHECKED:
            raise ApiError(
                400, f"The header {shown_text(name)} is given more than once.", param=name.decode()
            )
    if len(headers) > MAX_HEADERS:
        raise ApiError(431, f"The request has more than {MAX_HEADERS} headers.")
    return headers, fields


def _parse_line(line: bytes) -> tuple[bytes, bytes] | None:
    """Name in lower case and value of a header, which are remembered; None: the line is malformed."""
    given, colon, value = line.partition(b":")
    if not (given and colon) or given.translate(None, _TOKEN_CHARACTERS) or value.translate(None, _PRINTABLE):
        return None
    header = given.lower(), value.strip()
    if len(line) <= MAX_KNOWN_BYTES:
        if len(_known_lines) >= MAX_KNOWN_LINES:
            _known_lines.clear()
        _known_lines[line] = header
    return header


def bad_header(lines: bytes) -> ApiError:
    """The error for header lines of which one is malformed."""
    for line in lines.split(b"\r\n"):
        if HEADER_LINES.fullmatch(line + b"\r\n"):
            continue
        if line.startswith((b" ", b"\t")):
            return ApiError(400, "A header is continued on the next line, which HTTP/1.1 does not allow.")
        name, colon, _ = line.partition(b":")
        if not colon:
            return ApiError(400, "A header line has no colon.")
        if not _NAME.fullmatch(name):
            text = f"The name of the header {shown_text(name)} has characters that no header's name may have."
            return ApiError(400, text)
        return ApiError(
            400, f"The value of the header {shown_text(name)} has control characters.", param=name.decode()
        )
    return ApiError(400, "A header line does not end with CR LF.")


def _body_length(fields: dict[bytes, bytes], *, chunks: bool) -> int | None:
    """None: the body is chunked. ``chunks``: the client's version has chunks."""
    length, coding = fields.get(b"content-length"), fields.get(b"transfer-encoding")
    if coding is None:
        if length is None:
            return 0
        if not LENGTH.fullmatch(length):
            raise ApiError(400, "The header Content-Length is no number of bytes.", param="Content-Length")
        return int(length)
    if length is not None:
        raise ApiError(
            400,
            "The headers Content-Length and Transfer-Encoding exclude each other.",
            param="Content-Length",
        )
    if not chunks:
        raise ApiError(400, "The header Transfer-Encoding is not for HTTP/1.0.", param="Transfer-Encoding")
    if coding.lower() != b"chunked":
        raise ApiError(
            501,
            "The header Transfer-Encoding is not chunked, the only coding of this server.",
            param="Transfer-Encoding",
        )
    return None


def _has_token(connection: bytes, wanted: bytes) -> bool:
    """Whether values of the header Connection have the token ``wanted``."""
    lower = connection.lower()
    return wanted in lower and wanted in (token.strip() for token in lower.split(b","))


def shown_text(text: bytes) -> str:
    shown = text[:_SHOWN].decode("latin-1")
    return repr(shown if len(text) <= _SHOWN else shown + "…")
