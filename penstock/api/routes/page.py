"""The web page of ``/`` and ``/docs``: chat, API reference and live status, as static files.

The files are the same for every server and need no key, so that a browser can show the page and its user can
type a key in. They contain nothing about the server. Their scripts use the routes that any client uses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from penstock.http.errors import encode_json
from penstock.http.request import HttpRequest

STATIC = Path(__file__).parent.parent / "static"
INDEX = "index.html"
FILES_PREFIX = "/page/"

_KINDS = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    b"trusted-types 'none'"
)
"""Only the server's own files run, and text never becomes markup: a model's output is an attacker's."""
_HEADERS = [
    (b"cache-control", b"no-cache"),  # kept, and revalidated by its ETag: a new version replaces all files
    (b"content-security-policy", _POLICY),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
]
_DIRECTORY = encode_json(
    {
        "name": "Penstock",
        "api": "v1/",
        "openapi": "openapi.json",
        "ready": "ready",
        "status": "status",
        "metrics": "metrics",
        "page": "docs",
    }
)
"""The reply of ``/`` to programs: where to go from there. It says nothing that a client without a key may not
know."""


class _File:
    """A file that is read once."""

    def __init__(self, path: Path) -> None:
        self._body = path.read_bytes()
        self._kind = _KINDS[path.suffix]
        self._etag = f'"{hashlib.sha256(self._body).hexdigest()[:16]}"'

    async def reply(self, http: HttpRequest, *further: tuple[bytes, bytes]) -> None:
        """Send the file, or 304 to a client that has it. ``further``: headers."""
        headers = [*_HEADERS, (b"etag", self._etag.encode()), *further]
        if _is_known(self._etag, http.header(b"if-none-match")):
            await http.reply(304, headers)
        else:
            await http.reply_json(self._body, headers=headers, kind=self._kind)


class Page:
    """The replies to GET and HEAD of the page's paths."""

    def __init__(self, root_path: str) -> None:
        """``root_path``: prefix of paths for clients, which may be asked for without its final slash."""
        self._root = root_path
        self._files = {FILES_PREFIX + path.name: _File(path) for path in static_files()}
        self._index = _File(STATIC / INDEX)
        self.paths = frozenset({"/", "/docs", "/docs/", *self._files, *([root_path] if root_path else [])})

    async def answer(self, http: HttpRequest) -> None:
        """Answer a request for one of ``paths``."""
        path = http.path
        if path == "/":
            await self._home(http)
        elif path in (self._root, "/docs/"):  # what the page loads has relative paths
            location = b"../docs" if path == "/docs/" else path.rpartition("/")[2].encode() + b"/"
            await http.reply_json(b"{}", status=308, headers=[(b"location", location)])
        else:
            await self._files.get(path, self._index).reply(http)

    async def _home(self, http: HttpRequest) -> None:
        """The page for browsers, which ask for HTML; a list of links for programs."""
        vary = b"vary", b"accept"
        if _takes_html(http.header(b"accept") or ""):
            await self._index.reply(http, vary)
        else:
            await http.reply_json(_DIRECTORY, headers=[vary])


def static_files() -> Iterable[Path]:
    """What the page loads."""
    return (path for path in sorted(STATIC.iterdir()) if path.suffix in _KINDS and path.name != INDEX)


def _takes_html(accept: str) -> bool:
    """Whether a client names HTML among what it takes; ``*/*`` does not count."""
    kinds = (each.replace(" ", "").lower() for each in accept.split(","))
    return any(kind.partition(";")[0] == "text/html" and not kind.endswith(";q=0") for kind in kinds)


def _is_known(etag: str, if_none_match: str | None) -> bool:
    """RFC 9110 §13.1.2, by weak comparison."""
    known = (if_none_match or "").split(",")
    return any(each.strip().removeprefix("W/") in (etag, "*") for each in known)
