"""The token ids of a request's prompt: asked of a model server, which renders and tokenizes it as for itself.

``POST /tokenize`` of vLLM and Penstock takes a text or messages. The gateway needs neither tokenizers nor
templates, and the ids are right for every model. Asking the server that will probably get the request costs
little more than the way there: it keeps the ids of the conversation's messages for the request itself.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.upstream.exchange import Headers, UpstreamError, UpstreamRequest
from penstock.gateway.upstream.fetch import fetch
from penstock.http.access_keys import CLIENT_KEYS

TOKENIZE_S = 0.25
"""Time that a server has to tokenize a prompt; the request waits meanwhile."""
PAUSE_S = 30.0
"""Time without questions to a server that did not answer one."""
MAX_ASKED = 32
"""Prompts that are tokenized at the same time; others are routed without."""
REFUSALS = frozenset({400, 401, 403, 413, 422, 429})
"""Statuses that are about this prompt, and say nothing of others."""
NOT_FOUND = 404
"""From a server that has tokenized before: it does not know the model. From others: the route."""
MAX_REPLY_BYTES = 16 << 20
MAX_CACHED_BYTES = 32 << 20
"""Memory of the ids of recent prompts."""
ENTRY_BYTES = 200
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_FIELDS = {
    CHAT: (
        "model",
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
    ),
    COMPLETIONS: ("model", "prompt", "add_special_tokens"),
}
"""What /tokenize takes of a request, by its path."""
_MEDIA = (b'"image_url"', b'"video_url"', b'"audio_url"', b'"input_audio"')
_MEDIA_PART = re.compile(rb'"type"\s*:\s*(?:%b)' % b"|".join(_MEDIA)).search
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class _Tokens(msgspec.Struct):
    tokens: list[int]


_decode_tokens = msgspec.json.Decoder(_Tokens).decode
_decode_ids = msgspec.json.Decoder(list[int]).decode


class PromptTokens:
    """Asks servers, and keeps the answers for a while: retries and requests for several replies ask again."""

    def __init__(self, pool: EndpointPool, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self._asking = 0
        self._paused: dict[Endpoint, float] = {}
        """Until when servers are not asked."""
        self._tokenizing: set[Endpoint] = set()
        """Servers that have answered."""
        self._cached: OrderedDict[int, bytes] = OrderedDict()
        """Tokens by the hash of the question, the longest unused first."""
        self._cached_bytes = 0

    async def of(self, incoming: IncomingRequest, endpoints: list[Endpoint]) -> bytes | None:
        """The prompt's tokens, int32; None: it is not one text or conversation of texts, or nobody can tell.
        ``endpoints``: those that may be asked, the best one first."""
        fields = _FIELDS.get(incoming.path)
        if fields is None or incoming.values or _has_media(incoming.raw):
            return None
        try:
            body = _decode_fields(incoming.raw)
            if (prompt := body.get("prompt")) is not None and bytes(prompt).startswith(b"["):
                return _int32(_decode_ids(prompt))  # they are ids already; of several prompts no one knows
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError):
            return None
        question = _encode({name: body[name] for name in fields if name in body})
        key = hash(question)
        if (known := self._cached.get(key)) is not None:
            self._cached.move_to_end(key)
            return known
        now = self._clock()
        endpoint = next((each for each in endpoints if self._paused.get(each, now) <= now), None)
        if endpoint is None or self._asking >= MAX_ASKED:
            return None
        self._asking += 1
        try:
            # a task of its own: requests are not served in one, which time-outs need
            tokens = await asyncio.ensure_future(self._ask(endpoint, question, incoming.headers))
        finally:
            self._asking -= 1
        if tokens is not None:
            self._keep(key, tokens)
        return tokens

    async def _ask(self, endpoint: Endpoint, question: bytes, headers: Headers) -> bytes | None:
        keys = [(name, value) for name, value in headers if name in CLIENT_KEYS]
        target = self._pool.own_target("/tokenize")
        headers = [(b"content-type", b"application/json"), *keys]
        request = UpstreamRequest(b"POST", target, headers, question)
        try:
            async with asyncio.timeout(TOKENIZE_S):
                status, body = await fetch(self._pool.connections(endpoint), request, MAX_REPLY_BYTES)
            if status == 200:
                tokens = _int32(_decode_tokens(body).tokens)
                if endpoint in self._pool:
                    self._tokenizing.add(endpoint)
                return tokens
            if status in REFUSALS or (status == NOT_FOUND and endpoint in self._tokenizing):
                return None
        except (UpstreamError, TimeoutError, msgspec.MsgspecError, UnicodeDecodeError, OverflowError):
            pass
        if endpoint in self._pool:
            self._paused[endpoint] = self._clock() + PAUSE_S
        return None

    def _keep(self, key: int, tokens: bytes) -> None:
        self._cached[key] = tokens
        self._cached_bytes += len(tokens) + ENTRY_BYTES
        while self._cached_bytes > MAX_CACHED_BYTES:
            _, oldest = self._cached.popitem(last=False)
            self._cached_bytes -= len(oldest) + ENTRY_BYTES

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint has left."""
        self._paused.pop(endpoint, None)
        self._tokenizing.discard(endpoint)


def _has_media(raw: bytes) -> bool:
    """Whether messages have pictures, say: a server would fetch them once more to tokenize the text between
    them, whose tokens are not all of the prompt's."""
    return any(kind in raw for kind in _MEDIA) and _MEDIA_PART(raw) is not None


def _int32(ids: list[int]) -> bytes:
    """Raises OverflowError."""
    return array("i", ids).tobytes()
