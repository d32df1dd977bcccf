"""Expected output of the synthetic engine, a function of the seed: every token of a reply can be checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from penstock.engine.sampling.rng import stream_state, token_indexes
from penstock.engine.vocabulary import read_vocabulary


class Output(NamedTuple):
    """One choice of a reply."""

    text: str
    tokens: list[int]
    """Tokens that count in its usage."""
    finish_reason: str


class Oracle:
    """Computes the output for every seed, from the model's directory."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._ordinary = read_vocabulary(model_dir).ordinary

    @property
    def vocabulary(self) -> list[int]:
        """Token ids for prompts."""
        ids: list[int] = self._ordinary.tolist()
        return ids

    def tokens(self, seed: int, count: int) -> list[int]:
        """The first ``count`` tokens of a stream with ``seed``."""
        positions = np.arange(count, dtype=np.int32)
        state = np.full(count, stream_state(seed), np.uint64)
        ids: list[int] = self._ordinary[token_indexes(state, positions, len(self._ordinary))].tolist()
        return ids

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens))

    def output(self, seed: int, max_tokens: int, stop: str | None, *, include_stop: bool = False) -> Output:
        """The output of a request for ``max_tokens``, with an optional stop string."""
        tokens = self.tokens(seed, max_tokens)
        text = self.text(tokens)
        found = -1 if stop is None else text.find(stop)
        if stop is None or found < 0:
            return Output(text, tokens, "length")
        end = found + len(stop)
        used = self.tokens_in(tokens, end)
        return Output(text[: end if include_stop else found], tokens[:used], "stop")

    def tokens_in(self, tokens: Sequence[int], characters: int) -> int:
        """Length of the shortest prefix of ``tokens`` whose text has at least ``characters`` characters."""
        low, high = 0, len(tokens)
        while low < high:
            middle = (low + high) // 2
            if len(self.text(tokens[:middle])) >= characters:
                high = middle
            else:
                low = middle + 1
        return low
