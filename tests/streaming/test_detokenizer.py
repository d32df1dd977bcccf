"""Every stream must read as `tokenizers` decodes all its tokens at once, however the tokens arrive."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models

from penstock.streaming.decoder_plan import DecoderMode
from penstock.streaming.detokenizer import Detokenizer
from penstock.streaming.token_table import TokenTable, escape_json
from tests.tokenizer_kinds import SPECIAL, TRAINED, Case, make_case, token_lists, trained_byte_fallback


def listed(decoder: decoders.Decoder | None, names: Sequence[str]) -> Tokenizer:
    """A tokenizer of just these tokens."""
    names = list(dict.fromkeys([*SPECIAL, *names]))
    tokenizer = Tokenizer(models.WordLevel({name: id for id, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.decoder = decoder
    return tokenizer


class Shouting:
    """A decoder of one's own: capitals."""

    def decode_chain(self, tokens: list[str]) -> list[str]:
        return [token.upper() for token in tokens]


def byte_fallback_then(*stages: decoders.Decoder) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = trained_byte_fallback()
        tokenizer.decoder = decoders.Sequence(list(stages))
        return tokenizer

    return make


LETTERS = [
    "x",
    "a",
    "b",
    "▁a",
    "▁",
    "a</w>",
    "b</w>",
    "</w>",
    "|",
    " .",
    "aa",
    "<pad>",
    "",
    "中",
    "ab",
    "aab",
]

OTHERS = {
    "Metaspace, then byte fallback": byte_fallback_then(decoders.Metaspace(), decoders.ByteFallback()),
    "byte fallback, then Metaspace": byte_fallback_then(decoders.ByteFallback(), decoders.Metaspace()),
    "byte fallback, then WordPiece": byte_fallback_then(decoders.ByteFallback(), decoders.WordPiece()),
    "byte fallback, fused, then Replace": byte_fallback_then(
        decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 2, 0)
    ),
    "Metaspace that keeps the first mark": lambda: listed(
        decoders.Metaspace(prepend_scheme="never"), LETTERS
    ),
    "no decoder": lambda: listed(None, LETTERS),
    "Strip of every token": lambda: listed(decoders.Strip("a", 2, 0), LETTERS),
    "Replace by a pattern": lambda: listed(decoders.Replace(Regex("a+|b"), "c"), LETTERS),
    "ByteLevel, then Strip": lambda: listed(
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 2, 0)]),
        ["x", "Ġ", "ĠĠĠ", "ä", "½", "ł", "ĠĠa"],
    ),
    "CTC": lambda: listed(decoders.CTC(), LETTERS),
    "BPEDecoder": lambda: listed(decoders.BPEDecoder(), ["x</w>", *LETTERS]),
    "BPEDecoder with its suffix inside": lambda: listed(decoders.BPEDecoder(), [*LETTERS, "a</w>b"]),
    "WordPiece, then BPEDecoder": lambda: listed(
        decoders.Sequence([decoders.WordPiece(), decoders.BPEDecoder()]), LETTERS
    ),
    "a decoder written in Python": lambda: listed(decoders.Decoder.custom(Shouting()), LETTERS),
}


@cache
def case(name: str) -> Case:
    return make_case((TRAINED | OTHERS)[name]())


@cache
def tokens_of(name: str) -> st.SearchStrategy[list[int]]:
    return token_lists(case(name))


def unescape(text: bytes) -> str:
    decoded = json.loads(b'"' + text + b'"')
    assert isinstance(decoded, str)
    return decoded


def check_stream(name: str, tokens: list[int], skip: bool, steps: list[int]) -> None:
    """A stream whose tokens are pushed `steps` at a time; 0: taken from the table if that is allowed."""
    expected = case(name).decode(tokens, skip=skip)
    table = case(name).tables[skip]

    at_once = Detokenizer(table)
    assert at_once.push(tokens) + at_once.finish() == expected

    stream, sent, place = Detokenizer(table), "", 0
    for step in cycle(steps):
        if place >= len(tokens):
            break
        text = table.text[tokens[place]] if tokens[place] < len(table.text) else None
        if step == 0 and text is not None and not stream.pending:
            sent += unescape(text)
            place += 1
        else:
            sent += stream.push(tokens[place : place + max(step, 1)])
            place += max(step, 1)
        assert expected.startswith(sent)
    assert stream.push([]) == ""
    assert sent + stream.finish() == expected


STEPS = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@pytest.mark.parametrize("name", TRAINED)
@settings(max_examples=1000)
@given(data=st.data())
def test_a_stream_reads_as_the_whole_decode(name: str, data: st.DataObject) -> None:
    tokens, steps = data.draw(tokens_of(name)), data.draw(STEPS)
    check_stream(name, tokens, data.draw(st.booleans()), steps)


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=100)
@given(data=st.data())
def test_a_stream_of_any_decoder_reads_as_the_whole_decode(name: str, data: st.DataObject) -> None:
    tokens, steps = data.draw(tokens_of(name)), data.draw(STEPS)
    check_stream(name, tokens, data.draw(st.booleans()), steps)


@pytest.mark.parametrize("name", TRAINED)
@settings(max_examples=300)
@given(data=st.data())
def test_always_taking_the_table_where_allowed_reads_the_same(name: str, data: st.DataObject) -> None:
    case_ = case(name)
    tokens = data.draw(tokens_of(name))
    table = case_.tables[True]
    stream, sent = Detokenizer(table), b""
    for token in tokens:
        text = table.text[token] if token < len(table.text) and not stream.pending else None
        sent += escape_json(stream.push((token,))) if text is None else text
    sent += escape_json(stream.finish())
    assert unescape(sent) == case_.decode(tokens, skip=True)


@pytest.mark.parametrize("name", TRAINED)
@settings(max_examples=300)
@given(data=st.data())
def test_text_is_held_only_while_it_is_uncertain(name: str, data: st.DataObject) -> None:
    case_ = case(name)
    table = case_.tables[True]
    stream, sent = Detokenizer(table), ""
    tokens = data.draw(tokens_of(name))
    for place, token in enumerate(tokens):
        sent += stream.push((token,))
        held = case_.decode(tokens[: place + 1], skip=True)[len(sent) :]
        if table.plan.mode is DecoderMode.BYTES:
            # All that may be missing is one unfinished character, or the two bytes that start a surrogate.
            assert held in ("", "\ufffd", "\ufffd\ufffd")
        elif held:
            assert token >= len(table.text) or table.text[token] in (None, b"")
        assert stream.pending == bool(held)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", TRAINED)
def test_the_table_says_what_push_says(name: str, skip: bool) -> None:
    table = case(name).tables[skip]
    stream = Detokenizer(table)
    for token, text in enumerate(table.text):
        if text is not None:
            assert not stream.pending
            assert stream.push((token,)) == unescape(text)


def test_an_unfinished_character_is_held_until_its_last_byte() -> None:
    table = TokenTable.from_tokenizer(listed(decoders.ByteLevel(), ["ä", "½", "ł", "a"]))
    stream = Detokenizer(table)
    assert [stream.push([token]) for token in (3, 4, 5)] == ["", "", "你"]
    assert not stream.pending
    assert stream.push([3]) == ""
    assert stream.pending
    assert stream.push([6]) == "\ufffda"
    assert stream.push([3, 4]) == ""
    assert stream.finish() == "\ufffd"


def test_a_skipped_special_token_leaves_a_character_whole() -> None:
    tokenizer = listed(decoders.ByteLevel(), ["ä½", "ł"])
    skipping = Detokenizer(TokenTable.from_tokenizer(tokenizer))
    assert skipping.push([3, 2, 4]) == "你"
    keeping = Detokenizer(TokenTable.from_tokenizer(tokenizer, skip_special_tokens=False))
    assert keeping.push([3, 2, 4]) == "\ufffd</s>\ufffd"


def test_one_invalid_byte_spoils_a_run_of_byte_tokens() -> None:
    names = ["<0x41>", "<0xE4>", "<0xBD>", "<0xA0>", "a"]
    table = TokenTable.from_tokenizer(listed(decoders.ByteFallback(), names))
    stream = Detokenizer(table)
    assert stream.push([4, 5, 6]) == ""
    assert stream.push([7]) == "你a"
    assert stream.push([3, 4, 5, 6, 4]) == ""
    assert stream.finish() == "\ufffd" * 5


def test_the_bytes_of_a_surrogate_are_replaced_one_by_one() -> None:
    tokenizer = listed(decoders.ByteLevel(), ["í", "ł", "ã", "a"])  # ED A0 80, a
    tokenizer.add_tokens(["Ģ"])
    for tokens in ([3, 4], [3, 4, 7], [3, 4, 6], [3, 3, 4, 7, 6]):
        stream = Detokenizer(TokenTable.from_tokenizer(tokenizer))
        assert "".join([stream.push([token]) for token in tokens]) + stream.finish() == tokenizer.decode(
            tokens
        )


def test_the_context_of_a_decoder_that_cannot_be_streamed_is_an_ordinary_token() -> None:
    # Not "b", which has no text when alone: it would seem to belong to the stream.
    tokenizer = listed(
        decoders.Sequence([decoders.Fuse(), decoders.Strip("b", 0, 1)]), ["b", " ", "\ufffd", "x"]
    )
    stream = Detokenizer(TokenTable.from_tokenizer(tokenizer))
    assert stream.push([6, 4, 6]) == ""
    assert stream.finish() == "x x"
