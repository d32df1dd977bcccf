"""One stream, which is one choice of a request, and the interface of the reply that gets its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.streaming.request_states import StreamState
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import KVTransferParams, Submit


@dataclass(slots=True, frozen=True)
class StreamError:
    """Why a stream failed. ``status``: the HTTP status, if no byte of the reply was sent yet."""

    status: int
    code: str
    message: str
    retry_after_ms: int = 0
    """When the client may retry; 0: unknown."""
    param: str | None = None
    """The request field at fault."""


class StreamReply(Protocol):
    """A request's reply: gets the rows of its streams that are not on the fast path."""

    def on_row(
        self,
        stream: Stream,
        tokens: Sequence[int],
        finish: FinishReason,
        cached: int,
        logprobs: Logprobs | None,
    ) -> None:
        """A row of one stream: its tokens (some aborts have none), and at its end the finish reason."""
        ...

    def on_prompt(self, stream: Stream, logprobs: PromptLogprobs) -> None:
        """Logprobs of the next tokens of the stream's prompt; all come before the first generated token. A
        resumed stream may repeat some. ``logprobs.row`` has no meaning here. Raises
        InvalidOutputError."""
        ...

    def on_transfer(self, stream: Stream, params: KVTransferParams) -> None:
        """The engine's KV transfer parameters at the stream's end; the last row comes next. Raises
        InvalidOutputError."""
        ...

    def on_resumed(self, rank: int, position: int) -> None:
        """A stream has lost its engine, and goes on at that of ``rank``, after ``position`` tokens."""
        ...

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        """The stream ended with an error; on_row has had every token before it."""
        ...


class Stream:
    """The state that the loop over a frame's rows reads.

    With ``fast_path``, a row whose tokens all have a context-free text is one chunk, ``head + text + tail``,
    written by itself or in a burst with those of other streams. Other rows go to ``reply``.
    """

    __slots__ = (
        "descriptor",
        "failed_resumes",
        "fast_path",
        "framing_bytes",
        "handle",
        "head",
        "index",
        "pinned_rank",
        "rank",
        "refusals",
        "reply",
        "request",
        "resumed_at",
        "started",
        "state",
        "submit_number",
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
        """Index of the choice in its request."""
        self.rank = rank
        """Rank of the engine that runs it."""
        self.pinned_rank: int | None = None
        """Rank of the only engine that may run the stream, if the request names one."""
        self.handle = -1
        self.state = StreamState.NEW
        """See :mod:`penstock.streaming.request_states`; set by the output processor alone."""
        self.request: Submit | None = None
        """What was submitted to the engine; submitted to another one if that engine is lost."""
        self.refusals = 0
        """Engines that rejected the stream because their queue was full."""
        self.resumed_at = -1
        """Position from which the stream was last resumed on another engine; -1: never."""
        self.failed_resumes = 0
        """Consecutive engines that were lost after they began to run the resumed stream, and before they sent
        enough tokens of it."""
        self.started = False
        """Whether the engine that resumed the stream has said that it runs it."""
        self.submit_number = 0
        """Number of its latest Submit on the connection to its engine, if it was resumed."""
        self.write = write
        self.head = head
        self.tail = tail
        """Ends with the chunk's closing CR LF."""
        self.framing_bytes = len(head) + len(tail) - 2
        # -- per row
        self.fast_path = False
        """Whether rows may be written without calling the reply; set by :meth:`allow_fast_path`."""
        self.descriptor = -1
        """Socket to write chunks to directly instead of ``write``; only while no data waits for it and no
        other stream writes to it; -1: none. Set by :meth:`bypass`; reset when the socket is full."""

    def allow_fast_path(self, allowed: bool) -> None:
        """Lets rows be written without calling the reply, or no longer. Detached streams stay without."""
        self.fast_path = allowed and self.write is not _write_nothing

    def bypass(self, descriptor: int) -> None:
        """Sets the descriptor. Detached streams stay without one."""
        self.descriptor = -1 if self.write is _write_nothing else descriptor

    def detach(self, reply: StreamReply) -> None:
        """Cuts the stream off its connection, which may serve another request by the time of its next row:
        ``reply`` gets all its rows from here on, and nothing that the stream writes is sent."""
        self.reply = reply
        self.write = _write_nothing
        self.allow_fast_path(False)
        self.bypass(-1)


def _write_nothing(data: bytes) -> None:
    """The ``write`` of detached streams."""
