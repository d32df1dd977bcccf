"""Compaction of messages: who asks for it, and the signed blocks that stand for a conversation."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from penstock.dialects.messages.request_schema import ContentBlock, CountTokensRequest
from penstock.generation.compaction.planned import checked_threshold
from penstock.generation.compaction.seal import Seals
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.errors import ApiError, refused

BLOCK = "compaction"
"""The type of a block that stands for all before it."""
EDIT = "compact_20260112"
DEFAULT_TRIGGER = 150_000
"""Tokens of a prompt beyond which it is compacted, as at Anthropic."""


class SignedSummaries(NamedTuple):
    """Signs the summaries of one tenant, and reads those that were signed for it."""

    seals: Seals
    tenant: str

    def sign(self, text: str) -> str:
        return self.seals.seal(_digest(text), self.tenant)

    def text(self, block: ContentBlock, field: str) -> str:
        """The summary of a block that has one. Raises ApiError."""
        text, given = block.content, block.signature or block.encrypted_content
        if not isinstance(text, str) or not text:
            raise refused(f"{field}.content must be the summary, or null.", f"{field}.content", text)
        if given is None or self.seals.open(given, self.tenant) != _digest(text):
            raise ApiError(
                400,
                f"{field}: this compaction block was not made by this server for this API key, or its "
                "content or its signature was changed since. Send the conversation that it stands for.",
                param=f"{field}.signature",
                code="invalid_compaction_item",
            )
        return text


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=32).hexdigest()


class CompactedMessage(NamedTuple):
    """What stands for the conversation of a request."""

    content: str | None
    """The summary; None: the model wrote none."""
    signature: str
    usage: TokenUsage
    """What the summary took."""
    paused: bool
    """Whether the reply ends with it."""

    def block(self) -> dict[str, Any]:
        return {
            "type": BLOCK,
            "content": self.content,
            "encrypted_content": self.signature or None,
            "signature": self.signature or None,
        }


class AskedCompaction(NamedTuple):
    """What a request says of its compaction."""

    threshold: int
    """Tokens that the prompt may have without it."""
    pauses: bool
    instructions: str | None = None
    """In addition to the request for a summary, or in its place."""
    replaces: bool = False
    """Whether they are in its place, and the request asks for a summary alone."""


def asked_compaction(request: CountTokensRequest) -> AskedCompaction | None:
    """By the fields ``compaction`` and ``context_management``, whose other edits have no effect. Raises
    ApiError."""
    given = request.compaction
    if given is not None:
        if not isinstance(given, dict) or given.get("type") != "summarize":
            raise ApiError(400, 'compaction must be {"type": "summarize"}.', param="compaction.type")
        return AskedCompaction(0, True, _instructions(given, "compaction"), replaces=True)
    management = request.context_management
    edits = management.get("edits") if isinstance(management, dict) else None
    for number, edit in enumerate(edits if isinstance(edits, list) else ()):
        if isinstance(edit, dict) and edit.get("type") == EDIT:
            return _of_edit(edit, f"context_management.edits[{number}]")
    return None


def _of_edit(edit: dict[str, Any], field: str) -> AskedCompaction:
    trigger, threshold = edit.get("trigger"), DEFAULT_TRIGGER
    if trigger is not None:
        if not isinstance(trigger, dict) or trigger.get("type") != "input_tokens":
            message = f'{field}.trigger must be {{"type": "input_tokens", "value": N}}.'
            raise ApiError(400, message, param=f"{field}.trigger")
        threshold = checked_threshold(trigger.get("value"), f"{field}.trigger.value")
    return AskedCompaction(threshold, edit.get("pause_after_compaction") is True, _instructions(edit, field))


def _instructions(given: dict[str, Any], field: str) -> str | None:
    text = given.get("instructions")
    if text is not None and not isinstance(text, str):
        raise refused(f"{field}.instructions must be a text.", f"{field}.instructions", text)
    return (text or "").strip() or None
