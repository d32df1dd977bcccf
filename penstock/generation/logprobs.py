"""Logprobs of prompts and outputs as entries per token, from a row's sparse columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.streaming.detokenizer import Detokenizer
from penstock.streaming.token_table import TokenTable
from penstock.wire.logprobs import Logprobs, PromptLogprobs

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's and vLLM's figure for it."""


class PromptLogprobFormatter:
    """The logprobs of one prompt's tokens, as they come from an engine. The first token has none."""

    __slots__ = ("_alternatives", "_entries", "_table", "_tokens")

    def __init__(self, table: TokenTable, tokens: Sequence[int], alternatives: int) -> None:
        """``table`` has special tokens as text; ``alternatives``: how many to show per token."""
        self._table = table
        self._tokens = tokens
        self._alternatives = alternatives
        self._entries: list[tuple[list[int], list[float], int]] = []
        """Of the second token and those after it: candidates, the prompt's own first, and its rank."""

    def add(self, logprobs: PromptLogprobs) -> None:
        """The next tokens' entries; known ones are ignored. Raises ValueError when some were lost."""
        known = len(self._entries) + 1
        if int(logprobs.position[0]) > known:
            raise ValueError(
                f"prompt logprobs from {int(logprobs.position[0])}, but those from {known} are due"
            )
        columns = (logprobs.position, logprobs.ids, logprobs.values, logprobs.rank)
        for place, ids, values, rank in zip(*(column.tolist() for column in columns), strict=True):
            if place == len(self._entries) + 1:
                self._entries.append((ids, values, rank))

    def field(self) -> list[dict[str, dict[str, Any]] | None]:
        """vLLM's ``prompt_logprobs``: per token its candidates by id, itself first."""
        field: list[dict[str, dict[str, Any]] | None] = [None]
        for ids, values, rank in self._entries:
            ranks = (rank, *range(1, self._alternatives + 1))
            shown: dict[str, dict[str, Any]] = {}
            for token, value, place in zip(ids, values, ranks, strict=False):
                if token >= 0:
                    text = token_text(self._table, token)
                    entry = {"logprob": max(value, LEAST_LOGPROB), "rank": place, "decoded_token": text}
                    shown.setdefault(str(token), entry)
            field.append(shown)
        return field

    def echoed(self, alternatives: int) -> list[dict[str, Any]]:
        """The entries of an echoed prompt, in the shape of :func:`token_entry`."""
        first = token_text(self._table, self._tokens[0])
        entries = [{"token": first, "logprob": None, "bytes": list(first.encode()), "top_logprobs": None}]
        return entries + [
            token_entry(self._table, ids, values, alternatives) for ids, values, _ in self._entries
        ]


class TokenLogprobs(NamedTuple):
    """Consecutive tokens of a choice with their logprobs."""

    entries: list[dict[str, Any]]
    """In the shape of :func:`token_entry`."""
    text_offset: int
    """Characters of all tokens before the first entry."""


class LogprobCollector:
    """The logprobs of one choice that have not been sent.

    ``table`` has special tokens as text. ``alternatives``: how many candidates to show per token beside
    the sampled one, which is always there.
    """

    __slots__ = ("_alternatives", "_echo", "_entries", "_offset", "_table")

    def __init__(
        self, table: TokenTable, echo: PromptLogprobFormatter | None = None, *, alternatives: int
    ) -> None:
        """``echo``: the prompt whose tokens come before those of the output."""
        self._table = table
        self._echo = echo
        self._alternatives = alternatives
        self._offset = 0
        self._entries: list[dict[str, Any]] = []

    def add(self, tokens: Sequence[int], logprobs: Logprobs | None) -> None:
        """A row's tokens; ``logprobs`` may have more entries, which do not count."""
        if logprobs is not None:
            self._entries += [
                token_entry(self._table, ids, values, self._alternatives)
                for place, ids, values in zip(
                    logprobs.token.tolist(), logprobs.ids.tolist(), logprobs.values.tolist(), strict=True
                )
                if place < len(tokens)
            ]

    def take(self) -> TokenLogprobs | None:
        """All tokens added since the last call; None when there are none."""
        entries, self._entries = self._entries, []
        if self._echo is not None:
            entries, self._echo = self._echo.echoed(self._alternatives) + entries, None
        if not entries:
            return None
        offset = self._offset
        self._offset += sum(len(entry["token"]) for entry in entries)
        return TokenLogprobs(entries, offset)


def token_entry(table: TokenTable, ids: list[int], values: list[float], alternatives: int) -> dict[str, Any]:
    """One token: the sampled one, then the best ``alternatives`` (which may include it)."""
    shown = [_candidate(table, token, value) for token, value in zip(ids, values, strict=True) if token >= 0]
    return shown[0] | {"top_logprobs": shown[1 : 1 + alternatives]}


def _candidate(table: TokenTable, token: int, value: float) -> dict[str, Any]:
    text = token_text(table, token)
    return {"token": text, "logprob": max(value, LEAST_LOGPROB), "bytes": list(text.encode())}


def token_text(table: TokenTable, token: int) -> str:
    """The text of a token by itself."""
    detokenizer = Detokenizer(table)
    return detokenizer.push((token,)) + detokenizer.finish()
