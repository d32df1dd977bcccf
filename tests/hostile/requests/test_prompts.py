"""Prompts of which a part shows that they are too long are not tokenized as a whole."""

from __future__ import annotations

import pytest

from penstock.generation.prompt.tokenizer import ESTIMATED_ABOVE, PIECE, Tokenizer
from tests.generation.planning import body, error_of, planners, tiny_tokenizer


class CountingTokenizer(Tokenizer):
    """Counts the characters it encodes."""

    characters = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.characters += len(text)
        return super().encode(text, add_special_tokens)


def test_a_long_text_is_given_up_after_as_many_tokens_as_are_allowed() -> None:
    tokenizer = CountingTokenizer(tiny_tokenizer().raw, None)
    assert tokenizer.is_longer("a" * 4_000_000, 2048)
    assert tokenizer.characters == PIECE
    assert tokenizer.is_longer("word " * 1_000_000, 100_000)
    assert tokenizer.characters < 2_000_000


@pytest.mark.parametrize("text", ["a", "word and word ", "=", " ", "ä日"])
def test_a_text_that_fits_is_never_taken_for_longer(text: str) -> None:
    tokenizer = tiny_tokenizer()
    text *= 300_000 // len(text)
    tokens = len(tokenizer.encode(text, False))
    for share in (1, 2, ESTIMATED_ABOVE, 10):
        if tokens <= tokens * share:
            assert not tokenizer.is_longer(text, tokens * share)


def test_tokenize_and_detokenize_have_limits() -> None:
    planner = planners()
    assert error_of(planner.detokenize, body(tokens=[1] * 600_000)).param == "tokens"
