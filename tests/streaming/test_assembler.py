"""Stop strings in a stream's text, and the tokens that none of them may end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.streaming.assembler import Assembler, RowText
from penstock.streaming.token_table import TokenTable


@pytest.fixture(scope="module")
def table() -> TokenTable:
    """Token i is the i-th byte-level character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: place for place, text in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return TokenTable.from_tokenizer(tokenizer)


def ids(text: str) -> list[int]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [alphabet.index(character) for character in text]


def assembled(table: TokenTable, rows: Sequence[str], **options: int) -> list[RowText]:
    assembler = Assembler(table, ("ab",), **options)
    return [assembler.push(ids(row)) for row in rows] + [assembler.finish()]


def test_a_stop_string_ends_the_text_wherever_rows_are_cut(table: TokenTable) -> None:
    assert assembled(table, ["xab"])[0] == RowText("x", 3, "ab")
    assert assembled(table, ["xa", "by"])[:2] == [RowText("x", 2, None), RowText("", 1, "ab")]


@pytest.mark.parametrize("rows", [["abxaby"], list("abxaby"), ["abxa", "by"]])
def test_stop_strings_are_looked_for_behind_the_exempt_tokens(table: TokenTable, rows: list[str]) -> None:
    pieces = assembled(table, rows, exempt=2)
    stopped = next(place for place, piece in enumerate(pieces) if piece.stop)
    assert "".join(piece.text for piece in pieces[: stopped + 1]) == "abx"
    assert sum(piece.tokens_used for piece in pieces[: stopped + 1]) == 5


def test_a_stop_string_that_begins_in_exempt_tokens_is_none(table: TokenTable) -> None:
    pieces = assembled(table, ["ab"], exempt=1)
    assert [piece.stop for piece in pieces] == [None, None]
    assert "".join(piece.text for piece in pieces) == "ab"
