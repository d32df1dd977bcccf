"""Compaction: the items that stand for a conversation, and the replies that make them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from penstock.dialects.responses.output import Output, OutputOptions
from penstock.dialects.responses.output_items import COMPLETED, CompactionItem
from penstock.dialects.responses.reply import ResponseFields, ResponsesReply
from penstock.dialects.responses.request_schema import InputItem
from penstock.generation.compaction.compaction import CUT, NO_SUMMARY, KeptRoom, newest, no_summary
from penstock.generation.compaction.planned import said
from penstock.generation.compaction.seal import Seals
from penstock.generation.dialect import EventContent
from penstock.generation.parsers.delta import Delta
from penstock.generation.prompt.template_rules import SYSTEM_ROLES
from penstock.generation.replies.collected import CollectedReply
from penstock.generation.replies.logprobs import TokenLogprobs
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.errors import ApiError, encode_json
from penstock.store.response_store import ResponseStore
from penstock.streaming.rows.event_record import EventRecord
from penstock.streaming.token_table import unescape_json
from penstock.streaming.weight_spans import WeightSpan
from penstock.wire.messages import KVTransferParams

SILENCE_S = 10.0
"""While a summary is written, its stream has a comment after this time: there is nothing else to send."""


class Summaries(NamedTuple):
    """Opens the compaction items of one tenant."""

    seals: Seals
    tenant: str
    room: KeptRoom
    """Of the user's messages that stay beside a summary."""

    def text(self, item: InputItem, field: str) -> str:
        """The summary that an item has. Raises ApiError."""
        sealed = item.encrypted_content
        if sealed is None:
            raise ApiError(400, f"{field}.encrypted_content is missing.", param=f"{field}.encrypted_content")
        text = self.seals.open(sealed, self.tenant)
        if text is None:
            raise ApiError(
                400,
                f"{field}: this compaction item was not made by this server for this API key, or was changed "
                "since. Send the conversation that it stands for, and compact that.",
                param=f"{field}.encrypted_content",
                code="invalid_compaction_item",
            )
        return text

    def seal(self, text: str) -> str:
        return self.seals.seal(text, self.tenant)


def kept_items(items: Sequence[InputItem], room: KeptRoom) -> list[InputItem]:
    """The items that stay beside the summary of a conversation: messages with instructions, and of the
    user's own the latest that fit the room."""
    messages = [(item.type or "message") == "message" for item in items]
    stay = newest(
        [
            _characters(item, room.of_picture) if is_message and item.role == "user" else None
            for item, is_message in zip(items, messages, strict=True)
        ],
        room.characters,
    )
    return [
        item
        for item, stays, is_message in zip(items, stay, messages, strict=True)
        if stays or (is_message and item.role in SYSTEM_ROLES)
    ]


def _characters(item: InputItem, of_picture: int) -> int:
    content = item.content or ""
    if isinstance(content, str):
        return len(content)
    return sum(of_picture if part.type == "input_image" else len(part.text or "") for part in content)


class SummaryOutput(Output):
    """The output of a compaction: one item. What the model reasons, and calls in its text, is no part of the
    summary."""

    __slots__ = ("_seal", "_texts")

    def __init__(self, response_id: str, record: EventRecord, seal: Callable[[str], str]) -> None:
        super().__init__(response_id, record, OutputOptions())
        self._seal = seal
        self._texts: list[str] = []

    def begin(self) -> Iterable[bytes]:
        """The first events of the item."""
        item = CompactionItem(self._new_id(CompactionItem), len(self.closed))
        self.open = item
        return self.compacting(item)

    def add(self, delta: Delta, logprobs: TokenLogprobs | None = None) -> Iterator[bytes]:
        self._texts.append(said(delta))
        return iter(())

    def add_text(self, text: bytes, logprobs: TokenLogprobs | None) -> Iterable[bytes]:
        self._texts.append(unescape_json(text))
        return ()

    def finish(self, *, cut: bool) -> Iterable[bytes]:
        """The summary has ended; an empty one leaves the item open."""
        item, text = self.open, "".join(self._texts).strip()
        if not text:
            return ()
        if item is None:  # a reply that is not streamed
            item = CompactionItem(self._new_id(CompactionItem), len(self.closed))
        assert isinstance(item, CompactionItem)
        item.sealed = self._seal(text + CUT if cut else text)
        item.status, self.open = COMPLETED, None
        self.closed.append(item)
        return self._item_event(b"response.output_item.done", item, item.json(COMPLETED, b""))


class CompactionReply(ResponsesReply):
    """The response to a compaction_trigger: a response whose only item is the sealed summary."""

    __slots__ = ("_failed", "_sent_at")

    fast_path = False

    def __init__(
        self, fields: ResponseFields, seal: Callable[[str], str], model: str, store: ResponseStore | None
    ) -> None:
        super().__init__(fields, model, store)
        assert self.record is not None
        self._output: SummaryOutput = SummaryOutput(fields.id, self.record, seal)
        self._failed = False
        self._sent_at = time.monotonic()

    def first(self, index: int, prompt_token_ids: Sequence[int] | None, usage: TokenUsage | None) -> bytes:
        events = super().first(index, prompt_token_ids, usage)
        return events + self._made(self._output.begin()) if events else events

    def event(self, index: int, content: EventContent) -> bytes:
        events, now = super().event(index, content), time.monotonic()
        if not events and now > self._sent_at + SILENCE_S:
            events = self.keep_alive
        if events:
            self._sent_at = now
        return events

    def conclude(
        self,
        finish_reason: bytes,
        usage: TokenUsage,
        transfer: KVTransferParams | None = None,
        versions: Sequence[WeightSpan] | None = None,
    ) -> bytes:
        if self._output.closed:  # a summary that was cut is one, and says so
            return super().conclude(b"stop", usage, transfer, versions)
        self._failed = True
        error = encode_json({"code": "server_error", "message": NO_SUMMARY})
        response = self._object(b"failed", error=error, usage=encode_json(self._usage_field(usage)))
        self._final = b"response.failed", b"".join(response)
        return b"failed"

    def whole(self, reply: CollectedReply) -> Iterator[bytes]:
        if self._failed:
            raise no_summary()
        return super().whole(reply)


class CompactedReply(CompactionReply):
    """The reply of ``/v1/responses/compact``: the messages that stay, and the sealed summary."""

    __slots__ = ()

    def _object(self, status: bytes, *, usage: bytes = b"null", **_: Any) -> Iterator[bytes]:
        yield b'{"id":"%b","object":"response.compaction","created_at":%d,"output":[' % (
            self.id.encode(),
            self._created_at,
        )
        stay = self._fields.input[1:-1]
        yield b"%b%b" % (stay, b"," if stay else b"")
        yield from self._output.items()
        yield b'],"usage":%b}' % usage
