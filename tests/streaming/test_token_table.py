from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from penstock.streaming import token_table
from penstock.streaming.decoder_plan import DecoderMode
from penstock.streaming.detokenizer import Detokenizer
from penstock.streaming.token_table import TokenTable, escape_json


def listed(decoder: decoders.Decoder | None, names: list[str]) -> Tokenizer:
    """A tokenizer of the special token `<s>` and these tokens."""
    names = ["<s>", *names]
    tokenizer = Tokenizer(models.WordLevel({name: id for id, name in enumerate(names)}, unk_token="<s>"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoder
    return tokenizer


@settings(max_examples=300)
@given(st.text())
def test_escaped_text_stands_between_quotes(text: str) -> None:
    escaped = escape_json(text)
    assert json.loads(b'"' + escaped + b'"') == text
    assert all(byte >= 0x20 for byte in escaped)


def test_only_what_json_demands_is_escaped() -> None:
    assert escape_json('a"\\/\n\x00\x7f') == b'a\\"\\\\/\\n\\u0000\x7f'
    assert escape_json("é中😀\u2028") == "é中😀\u2028".encode()


def test_a_token_of_whole_characters_has_its_text() -> None:
    table = TokenTable.from_tokenizer(listed(decoders.ByteLevel(), ["Ġa", '"Ċ', "ä½ł", "ä½", "½ł"]))
    assert table.text == [b"", b" a", b'\\"\\n', "你".encode(), None, None]


def test_an_added_token_outside_the_byte_alphabet_is_taken_as_it_is() -> None:
    tokenizer = listed(decoders.ByteLevel(), ["a"])
    tokenizer.add_tokens(["a 中", "é", "Ġé x"])
    assert TokenTable.from_tokenizer(tokenizer).text[2:] == ["a 中".encode(), None, "Ġé x".encode()]


def test_special_tokens_add_nothing_unless_they_are_kept() -> None:
    tokenizer = listed(decoders.Fuse(), ["a"])
    assert TokenTable.from_tokenizer(tokenizer).text == [b"", b"a"]
    assert TokenTable.from_tokenizer(tokenizer, skip_special_tokens=False).text == [b"<s>", b"a"]


def test_byte_tokens_need_care() -> None:
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    table = TokenTable.from_tokenizer(listed(decoder, ["<0x41>", "<0x4>", "▁<0x41>", "<0xGG>"]))
    assert table.text == [b"", None, b"<0x4>", b" <0x41>", b"<0xGG>"]


def test_ids_without_a_token_add_nothing() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 1, "b": 4}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    assert TokenTable.from_tokenizer(tokenizer).text == [b"", b"a", b"", b"", b"b"]


def test_an_empty_vocabulary_makes_an_empty_table() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    assert TokenTable.from_tokenizer(tokenizer).text == []


def test_tokens_of_an_unknown_decoder_need_care(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = listed(decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]), ["▁a", "b"])
    with caplog.at_level(logging.WARNING):
        table = TokenTable.from_tokenizer(tokenizer)
    assert table.text == [b"", None, None]
    assert "cannot be streamed" in caplog.text


def test_a_table_that_tokenizers_contradicts_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = listed(decoders.ByteLevel(), ["Ġa", "b"])
    monkeypatch.setattr(token_table, "_BYTE_ALPHABET", dict.fromkeys(range(512), 42))
    with caplog.at_level(logging.WARNING):
        table = TokenTable.from_tokenizer(tokenizer)
    assert table.plan.mode is DecoderMode.WHOLE
    assert table.text == [b"", None, None]
    assert "does not decode as its decoder" in caplog.text
    stream = Detokenizer(table)
    assert stream.push([1, 2]) + stream.finish() == " ab"
