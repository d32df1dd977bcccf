"""Logprobs in the two shapes of the OpenAI API, from a row's sparse columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..streaming.detokenizer import Detokenizer
from ..streaming.token_table import TokenTable
from ..wire.frames import Logprobs

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's and vLLM's figure for it."""


class LogprobFormatter:
    """The logprobs of one choice.

    ``table`` has special tokens as text. ``alternatives``: how many candidates to show per token beside
    the sampled one, which is always there.
    """

    __slots__ = ("_alternatives", "_chat", "_entries", "_offset", "_table")

    def __init__(self, table: TokenTable, *, chat: bool, alternatives: int) -> None:
        self._table = table
        self._chat = chat
        self._alternatives = alternatives
        self._offset = 0
        self._entries: list[dict[str, Any]] = []

    def add(self, tokens: Sequence[int], logprobs: Logprobs | None) -> None:
        """A row's tokens; ``logprobs`` may have more entries, which do not count."""
        self._entries += self._row(tokens, logprobs)

    def take(self) -> dict[str, Any] | None:
        """The ``logprobs`` field of all tokens added since the last call; None when there are none."""
        entries, self._entries = self._entries, []
        return self._shape(entries) if entries else None

    def _row(self, tokens: Sequence[int], logprobs: Logprobs | None) -> list[dict[str, Any]]:
        if logprobs is None:
            return []
        return [
            self._entry(ids, values)
            for place, ids, values in zip(
                logprobs.token.tolist(), logprobs.ids.tolist(), logprobs.values.tolist(), strict=True
            )
            if place < len(tokens)
        ]

    def _entry(self, ids: list[int], values: list[float]) -> dict[str, Any]:
        """One token: the sampled one, then the best ``alternatives`` (which may include it)."""
        shown = [
            self._candidate(token, value) for token, value in zip(ids, values, strict=True) if token >= 0
        ]
        sampled, best = shown[0], shown[1 : 1 + self._alternatives]
        return sampled | {"top_logprobs": best}

    def _candidate(self, token: int, value: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": max(value, LEAST_LOGPROB), "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        detokenizer = Detokenizer(self._table, has_context=True)
        return detokenizer.push((token,)) + detokenizer.finish()

    def _shape(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        if self._chat:
            return {"content": entries}
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry["token"])
        return {
            "text_offset": offsets,
            "token_logprobs": [entry["logprob"] for entry in entries],
            "tokens": [entry["token"] for entry in entries],
            "top_logprobs": [_by_token(entry) for entry in entries],
        }


def _by_token(entry: dict[str, Any]) -> dict[str, float]:
    """The sampled token and the alternatives, by text."""
    return {entry["token"]: entry["logprob"]} | {
        candidate["token"]: candidate["logprob"] for candidate in entry["top_logprobs"]
    }
