"""An API server of Kubernetes: lists with pages, watches with versions, bookmarks, and what goes wrong.

Objects are checked for the fields that their published definitions require, and get the defaults of those.
"""

from __future__ import annotations

import contextlib
import socketserver
import ssl
import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import msgspec

from tests.certificates import Certificates

WAIT_S = 90.0
Json = dict[str, Any]


@dataclass
class Change:
    version: int
    path: str
    type: str
    object: Json
    before: Json | None


@dataclass
class ApiRequest:
    path: str
    query: dict[str, str]
    headers: dict[str, str]

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch") == "1"


class ApiServer:
    """Kinds that were never given an object have a path as well, unless they are ``absent``."""

    def __init__(self, certificates: Certificates | None = None) -> None:
        """``certificates``: it speaks TLS."""
        self.requests: list[ApiRequest] = []
        self.absent: set[str] = set()
        """Plurals, with their group, whose definitions are not installed: 404."""
        self.refusal: Callable[[ApiRequest], tuple[int, dict[str, str]] | None] = lambda request: None
        """Status and headers with which a request is refused."""
        self.token: str | None = None
        self._objects: dict[str, dict[str, Json]] = {}
        self._changes: list[Change] = []
        self._version = 1000
        self._forgotten = 1000
        """The last version that is too old for a watch."""
        self._news = threading.Condition()
        self._generation = 0
        """Watches of another generation end."""
        self._bookmarks = 0
        self._watching: list[int] = []
        """Generations of the watches that go on."""
        self._running = True
        owner = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    while (line := self.rfile.readline()) and owner._running:
                        headers: dict[str, str] = {}
                        while (header := self.rfile.readline().strip()) != b"":
                            name, _, value = header.decode().partition(":")
                            headers[name.lower()] = value.strip()
                        if not owner._answer(line.split()[1].decode(), headers, self.wfile.write):
                            return

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        if certificates is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(certificates.both)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._running = False
        self.end_watches()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # -- what a test does

    def apply(self, path: str, item: Json) -> None:
        """Create or replace an object."""
        with self._news:
            kind = self._objects.setdefault(path, {})
            name = item["metadata"]["name"]
            before = kind.get(name)
            self._version += 1
            stored = deepcopy(item)
            stored["metadata"]["resourceVersion"] = str(self._version)
            kind[name] = stored
            self._record(path, "ADDED" if before is None else "MODIFIED", stored, before)

    def delete(self, path: str, name: str) -> None:
        with self._news:
            self._version += 1
            before = self._objects[path].pop(name)
            last = deepcopy(before)
            last["metadata"]["resourceVersion"] = str(self._version)
            self._record(path, "DELETED", last, before)

    def forget(self) -> None:
        """Compact: watches from an earlier version get 410."""
        with self._news:
            self._version += 1
            self._forgotten = self._version
            self._changes.clear()

    def end_watches(self) -> None:
        """End all watches, after what there is to tell, and break their connections."""
        with self._news:
            self._generation += 1
            self._news.notify_all()
            assert self._news.wait_for(lambda: self._generation - 1 not in self._watching, WAIT_S)

    def bookmark(self) -> None:
        """Send a bookmark to every watch."""
        with self._news:
            self._version += 1
            self._bookmarks += 1
            self._news.notify_all()

    def until_watched(self, count: int) -> None:
        """Wait until so many watches go on."""
        self.until(lambda: len(self._watching) >= count)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a request changes."""
        with self._news:
            assert self._news.wait_for(condition, WAIT_S)

    def watches(self, plural: str) -> list[ApiRequest]:
        return [
            request for request in self.requests if request.is_watch and request.path.endswith(f"/{plural}")
        ]

    def lists(self, plural: str) -> list[ApiRequest]:
        paths = [request for request in self.requests if request.path.endswith(f"/{plural}")]
        return [request for request in paths if not request.is_watch]

    # -- requests

    def _record(self, path: str, type: str, item: Json, before: Json | None) -> None:
        self._changes.append(Change(self._version, path, type, item, before))
        self._news.notify_all()

    def _answer(self, target: str, headers: dict[str, str], write: Callable[[bytes], Any]) -> bool:
        """Whether the connection stays."""
        url = urlsplit(target)
        request = ApiRequest(
            url.path, {name: values[0] for name, values in parse_qs(url.query).items()}, headers
        )
        with self._news:
            self.requests.append(request)
            self._news.notify_all()
        if self.token is not None and headers.get("authorization", "").lower() != f"bearer {self.token}":
            return _status(write, 401, "Unauthorized")
        if (refused := self.refusal(request)) is not None:
            return _status(write, refused[0], "refused by the test", refused[1])
        *_, group, _, _, _, plural = ("", *url.path.split("/"))
        if f"{plural}.{group}" in self.absent:
            return _status(write, 404, "the server could not find the requested resource")
        if request.is_watch:
            return self._watch(request, write)
        return self._list(request, write)

    def _list(self, request: ApiRequest, write: Callable[[bytes], Any]) -> bool:
        with self._news:
            items = [
                item
                for _, item in sorted(self._objects.get(request.path, {}).items())
                if selected(item, request)
            ]
            begin, version = 0, self._version
            if "continue" in request.query:
                begin, version = map(int, request.query["continue"].split("-"))
                if version <= self._forgotten:
                    return _status(write, 410, "The provided continue parameter is too old")
            end = begin + int(request.query.get("limit", "500"))
            metadata = {"resourceVersion": str(version)}
            if end < len(items):
                metadata["continue"] = f"{end}-{version}"
            body = msgspec.json.encode({"kind": "List", "metadata": metadata, "items": items[begin:end]})
        write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        return True

    def _watch(self, request: ApiRequest, write: Callable[[bytes], Any]) -> bool:
        sent = int(request.query["resourceVersion"])
        write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        with self._news:
            generation = self._generation
            self._watching.append(generation)
            self._news.notify_all()
        try:
            return self._send_events(request, write, sent, generation)
        finally:
            with self._news:
                self._watching.remove(generation)
                self._news.notify_all()

    def _send_events(
        self, request: ApiRequest, write: Callable[[bytes], Any], sent: int, generation: int
    ) -> bool:
        bookmarks = 0
        while True:
            with self._news:
                if sent < self._forgotten:
                    gone = {
                        "kind": "Status",
                        "code": 410,
                        "reason": "Expired",
                        "message": "too old resource version",
                    }
                    events = [{"type": "ERROR", "object": gone}]
                else:
                    changes = [c for c in self._changes if c.path == request.path and c.version > sent]
                    events = [event for change in changes if (event := as_seen(change, request)) is not None]
                if bookmarks != self._bookmarks:
                    bookmarks = self._bookmarks
                    version = {"resourceVersion": str(self._version)}
                    events.append({"type": "BOOKMARK", "object": {"kind": "X", "metadata": version}})
                sent = self._version
                over = generation != self._generation
                if not events and not over:
                    self._news.wait()
                    continue
            # In pieces that have nothing to do with the lines.
            data = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
            for start in range(0, len(data), 1000):
                piece = data[start : start + 1000]
                write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if over:
                return False
            if events[0]["type"] == "ERROR":
                write(b"0\r\n\r\n")
                return True


def _status(
    write: Callable[[bytes], Any], code: int, message: str, headers: dict[str, str] | None = None
) -> bool:
    body = msgspec.json.encode({"kind": "Status", "code": code, "message": message})
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    write(f"HTTP/1.1 {code} X\r\n{more}content-length: {len(body)}\r\n\r\n".encode() + body)
    return True


def selected(item: Json, request: ApiRequest) -> bool:
    metadata = item["metadata"]
    labels = metadata.get("labels") or {}
    for pair in filter(None, request.query.get("labelSelector", "").split(",")):
        name, _, value = pair.partition("=")
        if labels.get(name) != value:
            return False
    field, _, name = request.query.get("fieldSelector", "").partition("=")
    return not field or metadata["name"] == name


def as_seen(change: Change, request: ApiRequest) -> Json | None:
    """The event of a watch with selectors: an object that is selected no more is deleted for it."""
    was = change.before is not None and selected(change.before, request)
    fits = change.type != "DELETED" and selected(change.object, request)
    if not was and not fits:
        return None
    kind = "DELETED" if not fits else "MODIFIED" if was else "ADDED"
    return {"type": kind, "object": change.object}
