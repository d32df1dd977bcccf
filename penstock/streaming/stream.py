"""One stream: one choice of one request, as the token path sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.streaming.request_states import StreamState
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import KVTransferParams, Submit

CHUNK_SIZES = [b"%x\r\n" % size for size in range(16384)]
"""Chunk headers of HTTP/1.1's chunked encoding, by size; enough for one
token's event under the longest model name allowed; rows with more go to the reply."""


def chunk(data: bytes) -> bytes:
    """``data`` as one chunk of HTTP/1.1's chunked encoding (RFC 9112, section 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass(slots=True, frozen=True)
class StreamError:
    """Why a stream failed. ``status`` is the HTTP status when nothing has been sent yet."""

    status: int
    code: str
    message: str
    retry_after_ms: int = 0
    """When to try again; 0: nobody knows."""


class StreamReply(Protocol):
    """What a request makes of the rows of its streams that leave the fast path."""

    def on_row(
        self,
        stream: Stream,
        tokens: Sequence[int],
        finish: FinishReason,
        cached: int,
        logprobs: Logprobs | None,
    ) -> None:
        """A row of one stream: its tokens (none with some aborts) and, at its end, why it ended."""
        ...

    def on_prompt(self, stream: Stream, logprobs: PromptLogprobs) -> None:
        """Logprobs of the next tokens of the stream's prompt; all of them come before its first token. A
        resumed stream may get some again. ``row`` of the entries says nothing here."""
        ...

    def on_transfer(self, stream: Stream, params: KVTransferParams) -> None:
        """What the engine's connector of KV caches says at the stream's end; its last row comes next."""
        ...

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        """The stream's end by an error; every token generated before has been given to on_row."""
        ...


class Stream:
    """The state the loop over a frame's rows touches, and no more.

    While ``fast_path``, a row whose tokens all have a text of their own is one chunk, ``head + text + tail``,
    written at once or together with those of other streams. Other rows go to ``reply``.
    """

    __slots__ = (
        "descriptor",
        "failed_resumes",
        "fast_path",
        "framing_bytes",
        "handle",
        "head",
        "index",
        "rank",
        "refusals",
        "reply",
        "request",
        "resumed_at",
        "state",
        "tail",
        "write",
    )

    def __init__(
        self,
        reply: StreamReply,
        index: int,
        rank: int,
        write: Callable[[bytes], object],
        head: bytes = b"",
        tail: bytes = b"",
    ) -> None:
        # -- per request
        self.reply = reply
        self.index = index
        """Number of the choice in its request."""
        self.rank = rank
        """The engine that runs it."""
        self.handle = -1
        self.state = StreamState.NEW
        """See :mod:`penstock.streaming.request_states`; set by the output processor alone."""
        self.request: Submit | None = None
        """What the engine was asked for; asked of another one when that engine is lost."""
        self.refusals = 0
        """Engines that had no room for the stream."""
        self.resumed_at = -1
        """Position at which the stream last went on after its engine was lost."""
        self.failed_resumes = 0
        """Engines lost in a row that resumed the stream and gave it no token."""
        self.write = write
        self.head = head
        self.tail = tail
        """Ends with the CR LF that ends a chunk."""
        self.framing_bytes = len(head) + len(tail) - 2
        # -- per row
        self.fast_path = False
        """Whether texts may be written without asking the reply; set by it."""
        self.descriptor = -1
        """Of the socket that chunks may go to past ``write``, as nothing waits there and no other stream does
        the same; -1: none. Set by the reply, and when the socket takes no more."""
