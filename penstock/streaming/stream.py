"""One stream, which is one choice of a request, and the interface of the reply that gets its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.http.write_target import WriteTarget
from penstock.streaming.request_states import StreamState
from penstock.streaming.rows.event_record import EventRecord
from penstock.streaming.rows.token_fields import TokenFields
from penstock.wire.arrays import F32, I32
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import KVTransferParams, RoutedExperts, Submit


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

    arrays: bool
    """Whether it takes the tokens of rows as arrays, int32[n], in place of lists."""

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

    def on_admitted(self, stream: Stream, queued: float, at: float) -> None:
        """Its engine has given the stream a slot ``at`` that time, seconds of the monotonic clock, after it
        was ``queued`` for so many; said only where requests are told their times."""
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

    def on_routes(self, stream: Stream, routes: RoutedExperts) -> None:
        """The experts of the stream's tokens, before its last row. Raises InvalidOutputError."""
        ...

    def on_vectors(self, stream: Stream, first: int, counts: I32, width: int, values: F32) -> None:
        """Vectors of the stream's next inputs, from index ``first`` on: ``counts`` int32[inputs] of each,
        ``values`` float32[sum of counts, ``width``] flat, a view into the frame. Raises
        InvalidOutputError."""
        ...

    def on_resumed(self, rank: int, position: int) -> None:
        """A stream has lost its engine, and goes on at that of ``rank``, after ``position`` tokens."""
        ...

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        """The stream ended with an error; on_row has had every token before it."""
        ...


class WriteTargets(Protocol):
    """How plain rows are written: see :class:`penstock.streaming.rows.row_writer.RowWriter`."""

    def choose(self, stream: Stream, write_target: WriteTarget | None, *, guarded: bool) -> None: ...

    def stop(self, handle: int) -> None: ...


class TextPlace(Protocol):
    """A place in a choice's text."""

    at: int
    """In characters."""


class StreamFields(NamedTuple):
    """What a stream's events have for each token besides its text."""

    layout: TokenFields
    places: TextPlace | None
    """Where the next token begins in the text; None: the layout has no places."""


class Stream:
    """One choice of a request, from its submission to its end.

    A plain row, all of whose tokens have a context-free text, is the event ``head + text + tail`` once the
    reply allows it (:meth:`write_plain_rows`); with ``fields``, their lists and closing replace the tail.
    Other rows go to ``reply``.
    """

    __slots__ = (
        "failed_resumes",
        "fields",
        "handle",
        "head",
        "index",
        "pinned_rank",
        "rank",
        "record",
        "refusals",
        "reply",
        "request",
        "resumed_at",
        "started",
        "state",
        "submit_number",
        "tail",
        "versions",
        "write",
        "write_target",
        "write_targets",
    )

    def __init__(
        self,
        reply: StreamReply,
        index: int,
        rank: int,
        write: Callable[[bytes], object],
        head: bytes = b"",
        tail: bytes = b"",
        record: EventRecord | None = None,
    ) -> None:
        """``record``: counts and collects the stream's events; the number of each is written between text and
        ``tail``, as the field ``sequence_number`` after the text's JSON string."""
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
        """Writes events to the client."""
        self.head = head
        self.tail = tail
        self.record = record
        self.versions: list[tuple[int, str]] | None = None
        """Versions of the weights, each with the position from which on they made its tokens, if the request
        asks for them: see :mod:`.weight_spans`."""
        self.fields: StreamFields | None = None
        """What events have for each token besides its text, in plain rows too; None: nothing."""
        self.write_targets: WriteTargets | None = None
        """Set while the stream is open and attached to its connection."""
        self.write_target: WriteTarget | None = None
        """The latest one; set by the row writer."""

    def set_event(self, head: bytes, tail: bytes) -> None:
        """What precedes and follows the text from the next row on."""
        if head != self.head:
            self.head, self.tail = head, tail
            self.write_target = None  # the row writer takes the new ones

    def event(self, text: bytes) -> bytes:
        """A text event. ``text``: JSON-escaped UTF-8."""
        if self.record is None:
            return b"".join((self.head, text, self.tail))
        return self.record.event(self.head, text, self.tail)

    def write_plain_rows(self, write_target: WriteTarget | None, *, guarded: bool = False) -> None:
        """Have plain rows written without the reply: by ``write_target``, or by ``write``. ``write_target``
        is for a connection, or stream of one, that no other stream writes to, and for which no bytes wait.
        ``guarded``: rows with a guarded token go to the reply nevertheless."""
        if self.write_targets is not None:
            self.write_targets.choose(self, write_target, guarded=guarded)

    def stop_plain_rows(self) -> None:
        """Have the reply handle every row."""
        if self.write_targets is not None:
            self.write_targets.stop(self.handle)

    def detach(self, reply: StreamReply) -> None:
        """Cut the stream off its connection, which may serve another request by the time of its next row:
        ``reply`` gets all its rows from here on, and nothing that the stream writes is sent."""
        self.stop_plain_rows()
        self.write_targets = self.write_target = None
        self.reply = reply
        self.write = _write_nothing


def _write_nothing(data: bytes) -> None:
    """The ``write`` of detached streams."""
