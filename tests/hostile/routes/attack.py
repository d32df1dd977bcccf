"""Sends cases to a server over kept connections, and judges every reply."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
import psutil

from tests.hostile.bystander import Bystander, Gaps
from tests.hostile.memory_watch import MemoryWatch
from tests.hostile.routes.cases import Case

CONNECTIONS = 6
TIMEOUT_S = 60.0
"""For one reply, on a loaded machine."""
MAX_GROWTH_MIB = 50.0
GRAMMARS_MIB = 512.0
"""What an engine may hold in compiled grammars besides."""
MAX_GAP_RATIO = 10.0
_STREAMING = re.compile("penstock: (api-server|engine|gateway)")
OVERLOADED = frozenset({429, 503})
"""The documented answers to overload."""
UNSUPPORTED = frozenset({501})
"""The answer to a transfer coding that is not chunked."""
DEAD = frozenset({"no_engine"})
"""Codes of 503 that say that something has failed: nobody stops an engine."""
JSON = {"Content-Type": "application/json"}


class Reply(NamedTuple):
    """``status`` of a stream that fails is that of its error."""

    status: int
    body: bytes
    closes: bool

    @property
    def error(self) -> dict[str, object]:
        """Raises msgspec's errors if it is none in the API's shape."""
        if self.cohere:
            return {"message": msgspec.json.decode(self.body, type=_CohereError).message}
        error = msgspec.json.decode(self.body, type=_Error).error
        return {"message": error} if isinstance(error, str) else error

    @property
    def anthropic(self) -> bool:
        """Whether an error is in the shape of Anthropic's API."""
        return self.body.startswith(b'{"type":"error"')

    @property
    def cohere(self) -> bool:
        """Whether an error is in the shape of Cohere's API."""
        return self.body.startswith(b'{"id":"')

    @property
    def fields(self) -> set[str]:
        """What an error has besides its message."""
        if self.cohere or self.body.startswith(b'{"error":"'):  # Ollama's, TEI's
            return set()
        if self.body.startswith(b'{"error":{"code":'):  # Google's
            return {"code", "status"}
        return {"type"} if self.anthropic else {"type", "param", "code"}


class _Error(msgspec.Struct):
    error: dict[str, object] | str


class _CohereError(msgspec.Struct):
    message: str


class Client:
    """One connection, opened again when the server has said that it closes."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)

    def send(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """Raises OSError, http.client.HTTPException."""
        self._connection.request(method, path, body, headers or ({} if body is None else JSON))
        reply = self._connection.getresponse()
        data = reply.read()
        closes = reply.will_close
        if (reply.getheader("content-type") or "").startswith("text/event-stream"):
            return _of_stream(data, closes)
        if reply.getheader("content-type") == "application/x-ndjson":
            return _of_lines(data, closes)
        return Reply(reply.status, data, closes)

    def close(self) -> None:
        self._connection.close()


_RESPONSE_EVENT = b"event: response."
_RESPONSE_ENDS = ("response.completed", "response.incomplete")


def _of_response(event: bytes, closes: bool) -> Reply:
    """``event``: the last one of a streamed response."""
    body = event.partition(b"data: ")[2]
    last = msgspec.json.decode(body)
    if last["type"] == "response.failed":
        error = last["response"]["error"]
        code = 400 if error["code"] == "invalid_prompt" else 500
        return Reply(code, msgspec.json.encode({"error": error}), closes)
    return Reply(200 if last["type"] in _RESPONSE_ENDS else 0, body, closes)


def _of_message(event: bytes, closes: bool) -> Reply:
    """``event``: the last one of a streamed message."""
    body = event.partition(b"data: ")[2]
    if not event.startswith(b"event: error"):
        return Reply(200, body, closes)
    kind = Reply(200, body, closes).error["type"]
    return Reply(400 if kind == "invalid_request_error" else 500, body, closes)


def _of_stream(data: bytes, closes: bool) -> Reply:
    *events, end = data.split(b"\n\n")
    if events and events[-1].startswith(_RESPONSE_EVENT):
        return _of_response(events[-1], closes)
    if events and events[-1].startswith((b"event: message_stop", b"event: error")):
        return _of_message(events[-1], closes)
    failed = [event for event in events if event.startswith(b'data: {"error"')]
    if failed:
        body = failed[0].removeprefix(b"data: ")
        error = Reply(200, body, closes).error
        code = error.get("code")
        if not isinstance(code, int):  # a failure's own code; its type tells whose fault it is
            code = 400 if error.get("type") == "BadRequestError" else 500
        return Reply(code, body, closes)
    whole = not end and events and events[-1] == b"data: [DONE]"
    return Reply(200 if whole else 0, data, closes)


def _of_lines(data: bytes, closes: bool) -> Reply:
    last = (data.splitlines() or [b""])[-1]
    if last.startswith(b'{"error"'):
        return Reply(500, last, closes)
    return Reply(200 if b'"done":true' in last else 0, data, closes)


def fault(reply: Reply, fields: frozenset[str]) -> str | None:
    """What is wrong with a reply to a case with these fields; None: nothing."""
    if 200 <= reply.status < 300:
        return None
    if not 400 <= reply.status < 500 and reply.status not in OVERLOADED | UNSUPPORTED:
        return f"status {reply.status}: {reply.body[:300]!r}"
    try:
        error = reply.error
    except msgspec.MsgspecError:
        return f"status {reply.status} without an error in the API's shape: {reply.body[:300]!r}"
    message = error.get("message")
    if not isinstance(message, str) or not message or not reply.fields <= error.keys():
        return f"an error without its fields: {reply.body[:300]!r}"
    if error.get("code") in DEAD:
        return f"an engine is lost: {reply.body[:300]!r}"
    told = f"{message} {error.get('param')}"
    if reply.status == 400 and fields and not _names(told, fields) and not _of_body(told):
        return f"an error that names none of {sorted(fields)[:6]}: {reply.body[:300]!r}"
    return None


WORDS = {
    "prompt": ("Token id", "prompt contains", "one prompt"),
    "token_ids": ("Token id", "prompt contains"),
    "messages": ("prompt contains", "conversation"),
    "tokens": ("Token id",),
    "instructions": ("prompt contains",),
    "system": ("prompt contains",),
    "tools": ("structured output",),
    "tool_choice": ("structured output",),
    "response_format": ("structured output",),
    "structured_outputs": ("structured output",),
    "temperature": ("greedy sampling",),
}
"""Other words for fields: those of vLLM's messages, and of an engine, which does not know the field."""


def _names(told: str, fields: frozenset[str]) -> bool:
    named = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", told) for name in fields)
    return named or any(word in told for name in fields for word in WORDS.get(name, ()))


def _of_body(told: str) -> bool:
    """Whether the body as a whole is refused, as it is not JSON, or not of this size."""
    return "request body" in told or "request's body" in told


class Faults:
    """What attackers found, of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.found: list[str] = []
        self.statuses: dict[int, int] = {}

    def add(self, text: str) -> None:
        with self._lock:
            self.found.append(text)

    def count(self, status: int) -> None:
        with self._lock:
            self.statuses[status] = self.statuses.get(status, 0) + 1

    def __str__(self) -> str:
        return "\n".join([f"{len(self.found)} faults, replies by status: {self.statuses}", *self.found[:40]])


def try_case(client: Client, case: Case, faults: Faults) -> None:
    """Sends a case, and then an ordinary request over the same connection."""
    began = time.monotonic()
    try:
        reply = client.send("POST", case.path, case.body)
    except (OSError, http.client.HTTPException) as error:
        faults.add(f"no reply after {time.monotonic() - began:.1f} s: {error!r}: {case}")
        client.close()
        return
    faults.count(reply.status)
    problem = fault(reply, case.fields)
    if problem is not None:
        faults.add(f"{problem}: {case}")
    try:
        after = client.send("GET", "/version")
    except (OSError, http.client.HTTPException) as error:
        faults.add(f"the next request failed: {error!r}: {case}")
        client.close()
        return
    if after.status != 200:
        faults.add(f"the next request got {after.status}: {case}")


def send_all(url: str, cases: Sequence[Case], seconds: float, connections: int = CONNECTIONS) -> Faults:
    """Sends the cases over ``connections`` connections, until ``seconds`` have passed."""
    faults, waiting, lock = Faults(), iter(cases), threading.Lock()
    end = time.monotonic() + seconds

    def work() -> None:
        client = Client(url)
        try:
            while time.monotonic() < end:
                with lock:
                    case = next(waiting, None)
                if case is None:
                    return
                try_case(client, case, faults)
        finally:
            client.close()

    run_threads([work] * connections)
    return faults


def run_threads(works: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Harm(NamedTuple):
    """What an attack did to others."""

    grown_mib: dict[str, float]
    gaps: Gaps

    def check(self, *, grammars: bool = True) -> None:
        """``grammars``: requests had constraints. Raises AssertionError."""
        assert not self.gaps.broken, self.gaps
        assert self.gaps.ratio <= MAX_GAP_RATIO, self.gaps
        for name, mib in self.grown_mib.items():
            kept = GRAMMARS_MIB if grammars and "engine" in name else 0.0
            assert mib <= MAX_GROWTH_MIB + kept, f"memory has grown: {self.grown_mib}"


@contextlib.contextmanager
def watched(url: str, processes: Sequence[psutil.Process]) -> Iterator[list[Harm]]:
    """Measures what happens to a bystander and to the memory of ``processes``; filled at the end."""
    harm: list[Harm] = []
    streaming = [each for each in processes if _STREAMING.search(" ".join(each.cmdline()))]
    with Bystander(url, streaming) as bystander, MemoryWatch(processes) as memory:
        yield harm
    harm.append(Harm(memory.grown_mib, bystander.gaps))
