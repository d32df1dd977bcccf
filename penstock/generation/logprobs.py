"""Formats logprobs of prompt and output tokens as JSON entries per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.streaming.detokenizer import Detokenizer
from penstock.streaming.token_table import TokenTable
from penstock.wire.logprobs import Logprobs, PromptLogprobs

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express; OpenAI and vLLM use the same value."""


class PromptLogprobFormatter:
    """Logprobs of one prompt's tokens, as the engine sends them. The first token has none."""

    __slots__ = ("_alternatives", "_entries", "_table", "_tokens")

    def __init__(self, table: TokenTable, tokens: Sequence[int], alternatives: int) -> None:
        """``table``: with the text of special tokens; ``alternatives``: maximum number per token."""
        self._table = table
        self._tokens = tokens
        self._alternatives = alternatives
        self._entries: list[tuple[list[int], list[float], int]] = []
        """Per token from the second one on: candidate ids, the prompt's token first, their logprobs, and the
        rank of the prompt's token."""

    def add(self, logprobs: PromptLogprobs) -> None:
        """Add the next tokens; repeated ones are ignored. Raises ValueError if some are missing."""
        known = len(self._entries) + 1
        if int(logprobs.position[0]) > known:
            raise ValueError(
                f"prompt logprobs from {int(logprobs.position[0])}, but those from {known} are due"
            )
        columns = (logprobs.position, logprobs.ids, logprobs.values, logprobs.rank)
        for position, ids, values, rank in zip(*(column.tolist() for column in columns), strict=True):
            if position == len(self._entries) + 1:
                self._entries.append((ids, values, rank))

    def field(self) -> list[dict[str, dict[str, Any]] | None]:
        """vLLM's field ``prompt_logprobs``: candidates by token id for each token, its own first."""
        field: list[dict[str, dict[str, Any]] | None] = [None]
        for ids, values, rank in self._entries:
            ranks = (rank, *range(1, self._alternatives + 1))
            shown: dict[str, dict[str, Any]] = {}
            for token, value, token_rank in zip(ids, values, ranks, strict=False):
                if token >= 0:
                    text = token_text(self._table, token)
                    shown.setdefault(
                        str(token),
                        {"logprob": max(value, LEAST_LOGPROB), "rank": token_rank, "decoded_token": text},
                    )
            field.append(shown)
        return field

    def echoed(self, alternatives: int) -> list[dict[str, Any]]:
        """Entries of an echoed prompt, in the shape of :func:`token_entry`."""
        first = token_text(self._table, self._tokens[0])
        entries = [{"token": first, "logprob": None, "bytes": list(first.encode()), "top_logprobs": None}]
        return entries + [
            token_entry(self._table, ids, values, alternatives) for ids, values, _ in self._entries
        ]


class TokenLogprobs(NamedTuple):
    """Logprobs of consecutive tokens of a choice."""

    entries: list[dict[str, Any]]
    """In the shape of :func:`token_entry`."""
    text_offset: int
    """Number of characters of all tokens before the first entry."""


class LogprobCollector:
    """Logprobs of one choice that were not sent yet.

    ``table``: with the text of special tokens. ``alternatives``: number of candidates per token in addition
    to the sampled one.
    """

    __slots__ = ("_alternatives", "_echo", "_entries", "_offset", "_table")

    def __init__(
        self, table: TokenTable, echo: PromptLogprobFormatter | None = None, *, alternatives: int
    ) -> None:
        """``echo``: the prompt whose tokens precede those of the output."""
        self._table = table
        self._echo = echo
        self._alternatives = alternatives
        self._offset = 0
        self._entries: list[dict[str, Any]] = []

    def add(self, tokens: Sequence[int], logprobs: Logprobs | None) -> None:
        """Add a row's tokens; entries of ``logprobs`` beyond them are ignored."""
        if logprobs is not None:
            self._entries += [
                token_entry(self._table, ids, values, self._alternatives)
                for offset, ids, values in zip(
                    logprobs.token.tolist(), logprobs.ids.tolist(), logprobs.values.tolist(), strict=True
                )
                if offset < len(tokens)
            ]

    def take(self) -> TokenLogprobs | None:
        """The tokens added since the last call; None if there are none."""
        entries, self._entries = self._entries, []
        if self._echo is not None:
            entries, self._echo = self._echo.echoed(self._alternatives) + entries, None
        if not entries:
            return None
        offset = self._offset
        self._offset += sum(len(entry["token"]) for entry in entries)
        return TokenLogprobs(entries, offset)


def token_entry(table: TokenTable, ids: list[int], values: list[float], alternatives: int) -> dict[str, Any]:
    """The entry of one token: the sampled candidate, with the best ``alternatives``, which may include it."""
    shown = [_candidate(table, token, value) for token, value in zip(ids, values, strict=True) if token >= 0]
    return shown[0] | {"top_logprobs": shown[1 : 1 + alternatives]}


def _candidate(table: TokenTable, token: int, value: float) -> dict[str, Any]:
    text = token_text(table, token)
    return {"token": text, "logprob": max(value, LEAST_LOGPROB), "bytes": list(text.encode())}


def token_text(table: TokenTable, token: int) -> str:
    """The text of a single token."""
    detokenizer = Detokenizer(table)
    return detokenizer.push((token,)) + detokenizer.finish()
