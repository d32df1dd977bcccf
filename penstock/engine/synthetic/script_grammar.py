"""Finds out whether a scripted reply obeys a request's grammar (structured output, tool_choice)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.engine.base import RequestRejected

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

RECENT_GRAMMARS = 16
"""Compiled grammars that are kept."""


class ReplyGrammars:
    """Compiles grammars and matches whole replies. Scripts are for development: nothing limits the time."""

    def __init__(self, tokenizer_dir: Path, vocab_size: int, eos: Sequence[int]) -> None:
        self._path = tokenizer_dir / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos = list(eos)
        self._tokenizer: LLTokenizer | None = None
        self._matcher = lru_cache(RECENT_GRAMMARS)(self._compile)

    def accepts(self, grammar: str, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` are a complete output under the grammar. Raises RequestRejected."""
        matcher = self._matcher(grammar).deep_copy()
        return matcher.validate_tokens(list(tokens)) == len(tokens) and (
            matcher.consume_tokens(list(tokens)) and matcher.is_accepting()
        )

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLTokenizer

        if self._tokenizer is None:
            text = self._path.read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos or None)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RequestRejected(f"structured output: {matcher.get_error()}")
        return matcher
