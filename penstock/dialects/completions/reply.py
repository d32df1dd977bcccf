"""Events and whole replies of ``/v1/completions``."""

from __future__ import annotations

from typing import Any

from penstock.dialects.openai_reply import OpenAIReply
from penstock.generation.logprobs import TokenLogprobs
from penstock.generation.parsers.delta import Delta
from penstock.generation.replies import Choice, prompt_token_ids
from penstock.generation.token_usage import TokenUsage


class CompletionReply(OpenAIReply):
    """A completion: choices are text."""

    __slots__ = ()

    event_object = body_object = "text_completion"
    text_start, text_end = b',"text":"', b'"'

    def first(self, index: int, prompt_token_ids: Any, usage: TokenUsage | None) -> bytes:
        return b""

    def content(self, index: int, text: bytes, delta: Delta | None) -> bytes:
        return b"".join((self.head(index), text, self.text_end))

    def logprobs(self, logprobs: TokenLogprobs | None) -> dict[str, Any] | None:
        """One list per field, with an entry per token."""
        if logprobs is None:
            return None
        entries, offset = logprobs
        offsets = []
        for entry in entries:
            offsets.append(offset)
            offset += len(entry["token"])
        return {
            "text_offset": offsets,
            "token_logprobs": [entry["logprob"] for entry in entries],
            "tokens": [entry["token"] for entry in entries],
            "top_logprobs": [_by_token(entry) for entry in entries],
        }

    def whole_choice(self, index: int, choice: Choice, *, return_ids: bool) -> dict[str, Any]:
        text = choice.prompt.echo + choice.text.decode()
        made = {"index": index, "text": text} | self.ending(choice, return_ids=return_ids)
        if choice.prompt.logprobs is not None:
            made["prompt_logprobs"] = choice.prompt.logprobs.field()
        if return_ids:
            made["prompt_token_ids"] = prompt_token_ids(choice.prompt)
        return made


def _by_token(entry: dict[str, Any]) -> dict[str, float] | None:
    """The sampled token and its alternatives by text; None for a token without logprobs."""
    if entry["top_logprobs"] is None:
        return None
    return {entry["token"]: entry["logprob"]} | {
        candidate["token"]: candidate["logprob"] for candidate in entry["top_logprobs"]
    }
