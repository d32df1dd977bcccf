"""A compaction within a request: a long conversation is summarized first, and the request goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.generation.compaction.compaction import CUT
from penstock.generation.dialect import EventContent, ReplyFormat
from penstock.generation.parsers.delta import CallDelta, Delta, TextKind
from penstock.generation.plan import RequestPlan
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.errors import ApiError, refused
from penstock.streaming.stream import StreamError
from penstock.streaming.token_table import unescape_json


class Summary(NamedTuple):
    """What stands in the place of a conversation, and what it took."""

    text: str
    """Empty: the model wrote none."""
    usage: TokenUsage


class PlannedCompaction(Protocol):
    """What a request that may be compacted does then."""

    @property
    def threshold(self) -> int:
        """Tokens that the prompt may have without it."""
        ...

    def summary_plan(self) -> RequestPlan:
        """The plan of the summary. Raises ApiError."""
        ...

    def resumed(self, summary: Summary) -> RequestPlan | None:
        """The plan of the request with the summary; None: it goes on as it is. Raises ApiError."""
        ...


def said(delta: Delta) -> str:
    """The text of a piece of output without reasoning and calls."""
    return "".join(
        piece.text for piece in delta.pieces if not isinstance(piece, CallDelta) and not piece.reasoning
    )


class SummaryText(ReplyFormat):
    """Collects a summary, which no client gets as it is."""

    __slots__ = ("_texts", "api", "id")

    collects = True

    def __init__(self, api: str, id: str) -> None:
        self.api, self.id = api, id
        self._texts: list[str] = []

    def collect(self, index: int, content: EventContent) -> None:
        if content.delta is not None:
            self._texts.append(said(content.delta))
        else:
            self._texts.append(unescape_json(content.text))
        if content.finish_reason not in (None, b"stop", b"tool_calls") and self.text:
            self._texts.append(CUT)

    @property
    def text(self) -> str:
        """The summary so far."""
        return "".join(self._texts).strip()

    # -- it is never sent

    def head(self, index: int, kind: TextKind = TextKind.CONTENT) -> bytes:
        return b""

    def tail(self, kind: TextKind = TextKind.CONTENT) -> bytes:
        return b""

    def first(self, index: int, prompt_token_ids: Sequence[int] | None, usage: TokenUsage | None) -> bytes:
        return b""

    def event(self, index: int, content: EventContent) -> bytes:
        return b""

    def end(self, usage: TokenUsage | None) -> bytes:
        return b""

    def error(self, error: StreamError) -> bytes:
        return b""

    def whole(self, reply: Any) -> Iterator[bytes]:
        return iter(())


def checked_threshold(value: Any, field: str) -> int:
    """A number of tokens. Raises ApiError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refused(f"{field} must be an integer of at least 1.", field, value)
    return value


def checked_entries(given: Any, field: str) -> list[dict[str, Any]]:
    """A list of objects with a type. Raises ApiError."""
    if not isinstance(given, list):
        raise ApiError(400, f"{field} must be a list.", param=field)
    for number, entry in enumerate(given):
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise ApiError(
                400, f"{field}[{number}] must be an object with a type.", param=f"{field}[{number}]"
            )
    return given
