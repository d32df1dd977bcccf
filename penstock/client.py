"""A client of the OpenAI HTTP API for the terminal commands: lists models and streams answers.

An answer is complete only when its stream ends with ``[DONE]``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterator
from ipaddress import ip_address
from typing import Any

import httpx
import msgspec

from penstock.config.hidden import hide_credentials
from penstock.http.tls_problem import tls_problem
from penstock.streaming.sse_parser import SSEError, SSEParser

CONNECT_TIMEOUT = 10.0
"""Maximum time to connect, in seconds."""
MAX_ERROR_LENGTH = 2000
"""Maximum characters of a server's error that are shown."""
DONE = b"[DONE]"
DEFAULT_PORT = 8000
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class ClientError(Exception):
    """The server is unreachable, refused the request or did not complete it. The message is for the user."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """``status``: of the refusal; None if there was no HTTP reply."""
        super().__init__(message)
        self.status = status


class Usage(msgspec.Struct):
    """Tokens of one request, as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    """One event of either API; only the fields that a terminal shows."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: _Error | str | None = None


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


class _Refusal(msgspec.Struct):
    """The body of an error, in OpenAI's format or that of web frameworks (``detail``)."""

    error: _Error | str | None = None
    detail: str | None = None


class Answer:
    """The answer to one request while it streams. Iterating yields its text as it arrives.

    ``started`` (request sent), ``first`` (first text) and ``ended`` (``[DONE]``) are seconds of the monotonic
    clock. ``usage`` and ``finish_reason`` are the server's.
    """

    def __init__(self, client: Client, path: str, body: dict[str, Any]) -> None:
        self.started = time.monotonic()
        self.first: float | None = None
        self.ended: float | None = None
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self._pieces: list[str] = []
        self._client = client
        self._path = path
        self._body = body

    def __iter__(self) -> Generator[str, None, None]:
        """Send the request and yield text. Closing the iterator closes the connection.

        Raises ClientError, also when the stream ends before ``[DONE]``.
        """
        with contextlib.closing(self._client.events(self._path, self._body)) as events:
            for data in events:
                text = self._take(data)
                if text:
                    self.first = self.first or time.monotonic()
                    self._pieces.append(text)
                    yield text
        self.ended = time.monotonic()

    @property
    def text(self) -> str:
        """The text that has arrived."""
        return "".join(self._pieces)

    def _take(self, data: bytes) -> str:
        try:
            event = msgspec.json.decode(data, type=_Event)
        except msgspec.DecodeError as error:
            raise ClientError(f"the server sent an event that cannot be read: {error}") from None
        if event.error is not None:
            message = event.error if isinstance(event.error, str) else event.error.message
            raise ClientError(f"the server broke off: {_shorten(message)}")
        self.usage = event.usage or self.usage
        text = ""
        for choice in event.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            text += choice.text or (choice.delta.content if choice.delta else None) or ""
        return text

    def stats(self) -> str:
        """One line: time to first token, tokens, duration and rate of the whole request."""
        ttft = "-" if self.first is None else f"{(self.first - self.started) * 1000:.1f} ms"
        duration = (self.ended or time.monotonic()) - self.started
        if self.usage is None:
            return f"TTFT {ttft}, {duration:.2f} s, tokens not reported by the server"
        tokens = self.usage.completion_tokens
        return (
            f"TTFT {ttft}, {self.usage.prompt_tokens} prompt tokens, {tokens} tokens in {duration:.2f} s, "
            f"{tokens / duration:.1f} tokens/s, finish reason {self.finish_reason or '-'}"
        )


class Client:
    """One server. Use as a context manager; methods raise ClientError."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        """``timeout``: maximum time without data from the server, in seconds."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self.url = hide_credentials(self._url)
        """The server's URL without credentials, for messages."""
        self.timeout = timeout
        self._local = _is_loopback(self._url)
        self._answered = False
        try:
            context = httpx.create_ssl_context()
        except OSError as error:  # an SSLError too: a file without certificates
            file = os.environ.get("SSL_CERT_FILE")
            raise ClientError(f"no certificates can be read from SSL_CERT_FILE={file}: {error}") from None
        self._http = httpx.Client(
            verify=context,  # with SSL_CERT_FILE and SSL_CERT_DIR, also for this machine
            headers={b"Authorization": f"Bearer {api_key}".encode()} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=CONNECT_TIMEOUT),
            trust_env=not self._local,  # a proxy from the environment cannot reach this machine
            event_hooks={"response": [self._on_response]},
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def _on_response(self, response: httpx.Response) -> None:
        self._answered = True

    def model(self) -> str:
        """The first model that the server lists."""
        body = self.get("/v1/models")
        try:
            models = msgspec.json.decode(body, type=_ModelList).data
        except msgspec.DecodeError:
            raise ClientError(f"{self.url}/v1/models does not answer like an OpenAI server") from None
        if not models:
            raise ClientError(f"the server at {self.url} lists no model")
        return models[0].id

    def get(self, path: str) -> bytes:
        """The body of a reply with status 200."""
        with self._failures():
            response = self._http.get(self._url + path)
        if response.status_code != httpx.codes.OK:
            raise _refused(response.status_code, response.content)
        return response.content

    def post(self, path: str, body: object) -> bytes:
        """The body of a reply with status 200 to a JSON ``body``."""
        headers = {"Content-Type": "application/json"}
        with self._failures():
            response = self._http.post(self._url + path, content=msgspec.json.encode(body), headers=headers)
        if response.status_code != httpx.codes.OK:
            raise _refused(response.status_code, response.content)
        return response.content

    def complete(self, model: str, prompt: str, sampling: dict[str, Any]) -> Answer:
        """The continuation of ``prompt``; ``sampling`` holds further fields of the request."""
        return Answer(self, "/v1/completions", {"model": model, "prompt": prompt, **sampling, **_STREAMED})

    def chat(self, model: str, messages: list[dict[str, str]], sampling: dict[str, Any]) -> Answer:
        """The reply to ``messages`` (``role`` and ``content`` each)."""
        body = {"model": model, "messages": messages, **sampling, **_STREAMED}
        return Answer(self, "/v1/chat/completions", body)

    def events(self, path: str, body: dict[str, Any]) -> Generator[bytes, None, None]:
        """Send ``body`` and yield the data of each event before ``[DONE]``."""
        headers = {"Content-Type": "application/json"}
        content = msgspec.json.encode(body)
        with (
            self._failures(),
            self._http.stream("POST", self._url + path, content=content, headers=headers) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise _refused(response.status_code, response.read())
            kind = response.headers.get("Content-Type", "no content type")
            if not kind.lower().startswith("text/event-stream"):
                raise ClientError(f"{self.url}{path} answered with {kind}, not with an event stream")
            received = response.iter_bytes()
            yield from _until_done(received)
            # Read to the end of the body: closing earlier would count as a client disconnect.
            with contextlib.suppress(httpx.HTTPError):
                for _ in received:
                    pass

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Convert httpx's errors to ClientError."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ClientError(f"cannot reach a server at {self.url} ({error}){self._hint(error)}") from None
        except httpx.TimeoutException:
            raise ClientError(f"the server at {self.url} was silent for {self.timeout:g} s") from None
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
            reason = f" ({error})" if str(error) else ""
            raise ClientError(
                f"the server at {self.url} broke the connection{reason}{self._tls_hint}"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ClientError(f"talking to {self.url} failed: {error}") from None

    @property
    def _tls_hint(self) -> str:
        """What may be the reason why a server breaks the connection at once."""
        plain = httpx.URL(self._url).scheme == "http"
        return "; does it speak TLS: https:// rather than http://?" if plain and not self._answered else ""

    def _hint(self, error: httpx.TransportError) -> str:
        """What to do about a failed connection."""
        if (problem := tls_problem(error, authority="name a file with it in SSL_CERT_FILE")) is not None:
            return f"; {problem}"
        port = httpx.URL(self._url).port
        command = f"penstock serve --port {port}" if port and port != DEFAULT_PORT else "penstock serve"
        return f"; name one with --url or PENSTOCK_URL, or start one with: {command}" if self._local else ""


def _until_done(received: Iterator[bytes]) -> Iterator[bytes]:
    """The data of each event before ``[DONE]``. Raises ClientError when ``[DONE]`` is missing."""
    parser = SSEParser()
    try:
        for piece in received:
            for event in parser.feed(piece):
                if event.data == DONE:
                    return
                if event.data is not None:
                    yield event.data
    except SSEError as error:
        raise ClientError(f"the server sent {error}") from None
    raise ClientError("the server ended the stream before [DONE]; the answer is not complete")


def _is_loopback(url: str) -> bool:
    """Whether ``url`` is a loopback address. Raises ClientError when it is not a URL."""
    try:
        host = httpx.URL(url).host
    except httpx.InvalidURL:  # its text may have a part of a password
        raise ClientError(f"{hide_credentials(url)!r} is not a URL") from None
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _refused(status: int, body: bytes) -> ClientError:
    """The error for a status other than 200, with the server's message or the start of its body."""
    message = body.decode(errors="replace").strip()
    with contextlib.suppress(msgspec.DecodeError):
        refusal = msgspec.json.decode(body, type=_Refusal)
        if isinstance(refusal.error, _Error):
            message = refusal.error.message
        else:
            message = refusal.error or refusal.detail or message
    hint = " (give a key with --api-key or PENSTOCK_API_KEY)" if status == httpx.codes.UNAUTHORIZED else ""
    return ClientError(f"HTTP {status}: {_shorten(message) or 'no message'}{hint}", status)


def _shorten(message: str) -> str:
    return message if len(message) <= MAX_ERROR_LENGTH else message[:MAX_ERROR_LENGTH] + "…"
