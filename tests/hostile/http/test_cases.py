"""One table of requests that are malformed, ambiguous or unusual: each is answered exactly once, with the
right status and a message that names the field, and the next request works. The gateway answers the same,
since it has the same HTTP server; where its reply is another one, the table says so.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from tests.gateway.processes import Gateway
from tests.hostile.http.raw import HEAD, KEY, one_reply, post
from tests.integration.server import Server

BODY = b'{"prompt": "x", "max_tokens": 1}'
CHUNKED = b"Transfer-Encoding: chunked"


def get(line: bytes = b"GET /version HTTP/1.1", *headers: bytes) -> bytes:
    return line + b"\r\n" + HEAD + b"".join(header + b"\r\n" for header in headers) + b"\r\n"


def bare(*lines: bytes) -> bytes:
    """A request of these lines alone."""
    return b"\r\n".join(lines) + b"\r\n\r\n"


def chunked(body: bytes, *headers: bytes) -> bytes:
    kind = b"Content-Type: application/json"
    return get(b"POST /v1/completions HTTP/1.1", kind, CHUNKED, *headers) + body


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


END = b"0\r\n\r\n"


class Case(NamedTuple):
    name: str
    sent: bytes
    status: int
    says: str = ""
    """In the error's message."""
    behind_gateway: int | None = None
    """The status of a gateway, where it is another one."""


CASES = [
    # -- the request line
    Case("no version", b"GET /\r\n", 400, "request line"),
    Case("version without number", bare(b"GET / HTTP/", b"Host: x"), 400, "request line"),
    Case("unknown version", bare(b"GET / HTTP/9.9", b"Host: x"), 505, "HTTP/1.1"),
    Case("version 1.2 is like 1.1", get(b"GET /version HTTP/1.2"), 200),
    Case("lower case version", bare(b"GET / http/1.1", b"Host: x"), 400, "request line"),
    Case("no preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", 505, "HTTP/1.1"),
    Case("TLS on a plain port", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "TLS"),
    Case("nonsense", b"\x00\x01\x02\x03", 400, "request line"),
    Case("no method", bare(b" / HTTP/1.1", b"Host: x"), 400, "request line"),
    Case("two spaces", bare(b"GET  / HTTP/1.1", b"Host: x"), 400, "request line"),
    Case("a tab for a space", bare(b"GET\t/ HTTP/1.1", b"Host: x"), 400, "request line"),
    Case("a space at the end", bare(b"GET / HTTP/1.1 ", b"Host: x"), 400, "request line"),
    Case("unknown method", get(b"BREW /version HTTP/1.1"), 501, "'BREW'"),
    Case("lower case method", get(b"get /version HTTP/1.1"), 501, "'get'"),
    Case("CONNECT", bare(b"CONNECT x:80 HTTP/1.1", b"Host: x:80"), 501, "'CONNECT'"),
    Case("known method, other route", get(b"PUT /version HTTP/1.1"), 405, "PUT"),
    Case("TRACE shows nothing", get(b"TRACE /v1/models HTTP/1.1"), 405, "TRACE", behind_gateway=403),
    Case("empty lines before", b"\r\n\r\n" + get(), 200),
    Case("endless empty lines", b"\r\n" * 1000, 400, "empty lines"),
    Case("LF before", b"\n" + get(), 400, "request line"),
    # -- the target
    Case("absolute form", get(b"GET http://other/version HTTP/1.1"), 200),
    Case("absolute form without path", get(b"GET http://other HTTP/1.1"), 200),
    Case("authority form", get(b"GET other:80 HTTP/1.1"), 400, "target"),
    Case("another scheme", get(b"GET ftp://other/ HTTP/1.1"), 400, "target"),
    Case("asterisk form", get(b"GET * HTTP/1.1"), 400, "target"),
    Case("asterisk form of OPTIONS", get(b"OPTIONS * HTTP/1.1"), 404, behind_gateway=403),
    Case("relative path", get(b"GET version HTTP/1.1"), 400, "target"),
    Case("fragment", get(b"GET /version#x HTTP/1.1"), 400, "fragment"),
    Case("query", get(b"GET /version?a=b&c HTTP/1.1"), 200),
    Case("raw UTF-8", get("GET /é HTTP/1.1".encode()), 400, "request line"),
    Case("control character", get(b"GET /\x7f HTTP/1.1"), 400, "request line"),
    Case("encoded NUL", get(b"GET /version%00 HTTP/1.1"), 404, behind_gateway=403),
    Case("encoded line end", get(b"GET /%0d%0aX:%20y HTTP/1.1"), 404, behind_gateway=403),
    Case("bad encoding", get(b"GET /%zz%e9%f HTTP/1.1"), 404, behind_gateway=403),
    Case("dots", get(b"GET /v1/../version HTTP/1.1"), 404, behind_gateway=403),
    Case("long target", get(b"GET /" + b"x" * 60_000 + b" HTTP/1.1"), 404, behind_gateway=403),
    Case("endless target", b"GET /" + b"x" * 70_000, 431, "--max-header-bytes"),
    # -- headers
    Case("no Host", bare(b"GET /version HTTP/1.1", b"Authorization: Bearer " + KEY.encode()), 400, "Host"),
    Case("two Hosts", get(b"GET /version HTTP/1.1", b"Host: y"), 400, "'host'"),
    Case("the same Host twice", get(b"GET /version HTTP/1.1", b"host: x"), 400, "'host'"),
    Case("a list of Hosts", bare(b"GET /version HTTP/1.1", b"Host: x, y"), 400, "Host"),
    Case("Host with a user", bare(b"GET /version HTTP/1.1", b"Host: a@b"), 400, "Host"),
    Case("Host with a path", bare(b"GET /version HTTP/1.1", b"Host: a/b"), 400, "Host"),
    Case("folded header", get(b"GET /version HTTP/1.1", b"X: a", b" b"), 400, "continued"),
    Case("folded first header", bare(b"GET /version HTTP/1.1", b" Host: x"), 400, "continued"),
    Case("space before the colon", get(b"GET /version HTTP/1.1", b"Content-Length : 0"), 400, "'Content-Len"),
    Case("no colon", get(b"GET /version HTTP/1.1", b"nonsense"), 400, "colon"),
    Case("no name", get(b"GET /version HTTP/1.1", b": x"), 400, "name"),
    Case("name with a control character", get(b"GET /version HTTP/1.1", b"X\x01: y"), 400, "name"),
    Case("name that is not ASCII", get(b"GET /version HTTP/1.1", b"\xe9: y"), 400, "name"),
    Case("NUL in a value", get(b"GET /version HTTP/1.1", b"X-A: a\x00b"), 400, "'X-A'"),
    Case("CR in a value", get(b"GET /version HTTP/1.1", b"X-A: a\rb"), 400, "'X-A'"),
    Case("LF in a value", get(b"GET /version HTTP/1.1", b"X-A: a\nX-B: b"), 400, "'X-A'"),
    Case("DEL in a value", get(b"GET /version HTTP/1.1", b"X-A: \x7f"), 400, "'X-A'"),
    Case("a value that is not ASCII", get(b"GET /version HTTP/1.1", b"X-A: \xc3\xa9\xff"), 200),
    Case("an empty value", get(b"GET /version HTTP/1.1", b"X-A:", b"X-B: \t "), 200),
    Case("bare LF", b"GET /version HTTP/1.1\nHost: x\n\n", 400, "LF"),
    Case("bare LF after the first line", b"GET /version HTTP/1.1\r\nHost: x\nX: y\n\n", 400, "LF"),
    Case("bare CR", b"GET /version HTTP/1.1\rHost: x\r\r\n\r\n", 400, "request line"),
    Case("many headers", get(b"GET /version HTTP/1.1", *[b"X: y"] * 126), 200),
    Case("too many headers", get(b"GET /version HTTP/1.1", *[b"X: y"] * 127), 431, "128 headers"),
    Case("large header", get(b"GET /version HTTP/1.1", b"X: " + b"y" * 70_000), 431, "--max-header-bytes"),
    Case("endless headers", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, 431, "--max-header-bytes"),
    Case("Expect", post(BODY, b"Expect: 100-continue"), 200),
    Case("unknown expectation", post(BODY, b"Expect: 200-ok"), 417, "Expect"),
    Case("two expectations", post(BODY, *[b"Expect: 100-continue"] * 2), 400, "'expect'"),
    Case("two ranks", post(BODY, *[b"X-data-parallel-rank: 0"] * 2), 400, "'x-data-parallel-rank'"),
    Case("two sessions", post(BODY, b"X-Session-ID: a", b"X-Session-ID: b"), 400, "'x-session-id'"),
    Case("two ids", post(BODY, b"X-Request-Id: a", b"X-Request-Id: b"), 400, "'x-request-id'"),
    Case("two origins", post(BODY, b"Origin: http://a", b"Origin: http://b"), 400, "'origin'"),
    Case("Upgrade", get(b"GET /version HTTP/1.1", b"Connection: upgrade", b"Upgrade: websocket"), 200),
    Case("Upgrade of a POST", post(BODY, b"Connection: upgrade", b"Upgrade: h2c"), 200),
    Case("Connection: close among others", get(b"GET /version HTTP/1.1", b"Connection: x, Close"), 200),
    # -- the length of the body
    Case("negative length", post(BODY).replace(b"Length: ", b"Length: -"), 400, "Content-Length"),
    Case("length with a sign", post(BODY).replace(b"Length: ", b"Length: +"), 400, "Content-Length"),
    Case("length with a space", post(BODY).replace(b"Length: 3", b"Length: 3 "), 400, "Content-Length"),
    Case("hexadecimal length", post(BODY).replace(b"Length: ", b"Length: 0x"), 400, "Content-Length"),
    Case("no length", post(BODY).replace(b"Length: 32", b"Length: "), 400, "Content-Length"),
    Case("length in words", post(BODY).replace(b"Length: 32", b"Length: ten"), 400, "Content-Length"),
    Case("length of 5000 digits", post(BODY).replace(b"th: ", b"th: " + b"9" * 5000), 400, "Content-Length"),
    Case("zeros before the length", post(BODY).replace(b"Length: ", b"Length: 000"), 200),
    Case("length twice", post(BODY, b"Content-Length: 32"), 400, "'content-length'"),
    Case("two lengths", post(BODY, b"Content-Length: 5"), 400, "'content-length'"),
    Case("a list of lengths", post(BODY).replace(b"Length: 32", b"Length: 32, 32"), 400, "Content-Length"),
    Case("a length that is too large", post(BODY).replace(b"th: 32", b"th: 99999999"), 413, "1048576"),
    Case("a body for GET", get(b"GET /version HTTP/1.1", b"Content-Length: 5") + b"GET /", 200),
    # -- its coding
    Case("chunks", chunked(chunk(BODY) + END), 200),
    Case("chunks of one byte", chunked(b"".join(chunk(BODY[i : i + 1]) for i in range(32)) + END), 200),
    Case("upper case coding", chunked(chunk(BODY) + END).replace(b"chunked", b"Chunked"), 200),
    Case("length and chunks", chunked(chunk(BODY) + END, b"Content-Length: 5"), 400, "Content-Length"),
    Case("chunks twice", chunked(END, CHUNKED), 400, "'transfer-encoding'"),
    Case("chunks of chunks", chunked(END).replace(b"chunked", b"chunked, chunked"), 501, "Transfer-Encoding"),
    Case("identity", chunked(END).replace(b"chunked", b"identity"), 501, "Transfer-Encoding"),
    Case("gzip and chunks", chunked(END).replace(b"chunked", b"gzip, chunked"), 501, "Transfer-Encoding"),
    Case("chunks, then gzip", chunked(END).replace(b"chunked", b"chunked, gzip"), 501, "Transfer-Encoding"),
    Case("xchunked", chunked(END).replace(b"chunked", b"xchunked"), 501, "Transfer-Encoding"),
    Case("chunks with VT", chunked(END).replace(b": chunked", b": \x0bchunked"), 400, "'Transfer-Encoding'"),
    Case("no coding", chunked(END).replace(b": chunked", b": "), 501, "Transfer-Encoding"),
    Case("chunks in HTTP/1.0", chunked(END).replace(b"HTTP/1.1", b"HTTP/1.0"), 400, "Transfer-Encoding"),
    Case("a size that is none", chunked(b"nonsense\r\n"), 400, "size of a chunk"),
    Case("a negative size", chunked(b"-1\r\n"), 400, "size of a chunk"),
    Case("a size with 0x", chunked(b"0x5\r\n"), 400, "size of a chunk"),
    Case("a size of 17 digits", chunked(b"0" * 16 + b"5\r\n"), 400, "size of a chunk"),
    Case("a space after the size", chunked(b"5 \r\n"), 400, "size of a chunk"),
    Case("spaces after the size", chunked(b"5  \r\nhello\r\n" + END), 400, "size of a chunk"),
    Case("a tab after the size", chunked(b"5\t\r\nhello\r\n" + END), 400, "size of a chunk"),
    Case("a space before an extension", chunked(b"5 ;a\r\nhello\r\n" + END), 400, "size of a chunk"),
    Case("LF after the size", chunked(b"5\n"), 400, "size of a chunk"),
    Case("a chunk longer than its size", chunked(b"3\r\nabcd\r\n"), 400, "longer than its size"),
    Case("a chunk without end", chunked(b"3\r\nabc3\r\n"), 400, "longer than its size"),
    Case("extensions", chunked(chunk(BODY, b';a=b;c="d"') + END), 200),
    Case("an endless extension", chunked(b"5;" + b"x" * 1000), 400, "256 bytes"),
    Case("NUL in an extension", chunked(chunk(BODY, b";a=\x00") + END), 400, "size of a chunk"),
    Case("many extensions", chunked(chunk(b" ", b";" + b"x" * 200) * 100), 400, "extensions"),
    Case("trailers", chunked(chunk(BODY) + b"0\r\nX-A: b\r\nX-C: d\r\n\r\n"), 200),
    Case("a trailer that frames", chunked(chunk(BODY) + b"0\r\nContent-Length: 5\r\n\r\n"), 200),
    Case("a malformed trailer", chunked(chunk(BODY) + b"0\r\nX A: b\r\n\r\n"), 400, "'X A'"),
    Case("endless trailers", chunked(chunk(BODY) + b"0\r\n" + b"X: y\r\n" * 2000), 400, "trailers"),
    Case("chunks over the limit", chunked(chunk(b" " * (1 << 20)) + chunk(b" ") + END), 413, "1048576"),
    Case("gzip", post(BODY, b"Content-Encoding: gzip"), 415, "Content-Encoding"),
    Case("identity and gzip", post(BODY, b"Content-Encoding: identity, gzip"), 415, "Content-Encoding"),
    Case("not compressed", post(BODY, b"Content-Encoding: identity"), 200),
    # -- keys
    Case("no key", bare(b"GET /version HTTP/1.1", b"Host: x"), 401, "API key"),
    Case(
        "another key", bare(b"GET /version HTTP/1.1", b"Host: x", b"Authorization: Bearer y"), 401, "API key"
    ),
    Case("two keys", get(b"GET /version HTTP/1.1", b"Authorization: Bearer y"), 400, "'authorization'"),
    Case("a key twice", get(b"GET /version HTTP/1.1", b"X-Api-Key: y", b"X-Api-Key: y"), 400, "'x-api-key'"),
    Case(
        "a key in the query", bare(b"GET /version?api_key=topsecretkey HTTP/1.1", b"Host: x"), 401, "API key"
    ),
    Case("a key that is not ASCII", bare(b"GET /version HTTP/1.1", b"Host: x", b"X-Api-Key: \xff\xe9"), 401),
    Case("a key of 100 kB", bare(b"GET / HTTP/1.1", b"Host: x", b"X-Api-Key: " + b"k" * 100_000), 431),
    Case(
        "a key in a trailer",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunk(BODY)
        + b"0\r\nAuthorization: Bearer topsecretkey\r\n\r\n",
        401,
        "API key",
    ),
    # -- replies before the request is complete
    Case("401 for half a body", post(BODY).replace(KEY.encode(), b"x")[:-9] + b" " * 9, 401, "API key"),
    Case("a byte order mark", post(b"\xef\xbb\xbf" + BODY), 400, "byte order mark"),
    Case("404 for a body", post(BODY, path=b"/nowhere"), 404, "/nowhere", behind_gateway=403),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_server_answers_once(server: Server, case: Case) -> None:
    reply = one_reply(server.url, case.sent)
    assert reply.status == case.status
    if case.status >= 400:
        assert case.says in reply.message
    assert KEY.encode() not in reply.body


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_gateway_answers_once(gateway: Gateway, case: Case) -> None:
    reply = one_reply(gateway.url, case.sent)
    assert reply.status == (case.behind_gateway or case.status)
    if case.status >= 400 and case.behind_gateway is None:
        assert case.says in reply.message
    assert KEY.encode() not in reply.body


def test_the_table_has_no_name_twice() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_log_has_no_line_about_the_table_and_no_key(server: Server, gateway: Gateway) -> None:
    """It comes after the table, whose requests are cheap to send."""
    for log in (server.log, "".join(gateway.lines)):
        assert not [line for line in log.splitlines() if re.search("WARNING(?!.*-api-key)|ERROR|Trace", line)]
        assert KEY not in log
