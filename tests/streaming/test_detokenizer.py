"""Every stream must read as `tokenizers` decodes all its tokens at once, however the tokens arrive."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.streaming.decoder_plan import Mode
from penstock.streaming.detokenizer import Detokenizer
from penstock.streaming.token_table import TokenTable, escape_json

CORPUS = [
    "The quick brown fox doesn't jump over the lazy dog; it's I'm, we've, they're done. Do not!",
    "Wait ... what ? No ! Yes , ' quoted ' and n't.",
    "敏捷的棕色狐狸跳过了懒狗。今天天气很好，我们去公园吧！你好世界",
    "Zażółć gęślą jaźń — naïve café, Ærøskøbing, Straße, coöperate",
    "الثعلب البني السريع يقفز فوق الكلب الكسول مرحبا بالعالم",
    "😀 👩‍👩‍👧‍👦 👍🏽 🇫🇷 flags and ❤️ hearts 😀😀 ☃",
    "def f(x: int) -> str:\n\treturn f\"{x!r}\\n\" if x > 0 else '\\x00'  # comment\n\n    pass\r\n",
    "tab\tnul\x00bell\x07escape\x1b[0m delete\x7f nbsp\xa0 separator\u2028 bom\ufeff end",
    '0123456789 3.14159 1,000,000 <html attr="v">&amp;</html> a/b\\c',
] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
# Ordinary added tokens: outside the byte alphabet, in it but no UTF-8 (Ġé is b" \xe9"), with marks, controls.
ADDED = ["<think>", "Ġé", " 中\n", "▁▁", "##added", '\x01"\\']


def trained_byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=700, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
        ),
    )
    return tokenizer


def trained_byte_fallback() -> Tokenizer:
    """Llama 2's kind: BPE over marked words, with a token for each byte."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.Metaspace()
    plain.train_from_iterator(CORPUS[1::2], trainers.BpeTrainer(vocab_size=500, show_progress=False))
    model = json.loads(plain.to_str())["model"]
    names = dict.fromkeys([*SPECIAL, *BYTE_TOKENS, *model["vocab"], "▁", "▁▁▁", "<0x+1>", "<0xe4>", "<0x 1>"])
    merges = [tuple(pair) for pair in model["merges"]]
    vocab = {name: id for id, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def trained_unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def trained_word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Pieces whose artifacts cleanup mends: " ' ", " n't", " do not".
    tokenizer.add_tokens(["n't", "'s", "do not", "a ' b", "' ", "##.", "#"])
    return tokenizer


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

TRAINED = {
    "byte-level BPE": trained_byte_level,
    "BPE with byte fallback": trained_byte_fallback,
    "Metaspace Unigram": trained_unigram,
    "WordPiece with cleanup": trained_word_piece,
}
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


@dataclass(frozen=True)
class Case:
    """A tokenizer, its tables with and without special tokens, and the ids to draw from."""

    tokenizer: Tokenizer
    tables: dict[bool, TokenTable]
    context: int
    """An ordinary token with a complete text, never drawn."""
    ids: list[int]
    delicate: list[int]
    """Ids without a text of their own, special tokens, added tokens, unknown ids."""

    def decode(self, tokens: list[int], *, skip: bool, has_context: bool) -> str:
        if not has_context:
            return self.tokenizer.decode(tokens, skip_special_tokens=skip)
        before = self.tokenizer.decode([self.context], skip_special_tokens=skip)
        text = self.tokenizer.decode([self.context, *tokens], skip_special_tokens=skip)
        assert text.startswith(before)
        return text[len(before) :]


@cache
def case(name: str) -> Case:
    tokenizer = (TRAINED | OTHERS)[name]()
    tokenizer.add_tokens(ADDED)
    tables = {skip: TokenTable.from_tokenizer(tokenizer, skip_special_tokens=skip) for skip in (True, False)}
    size = len(tables[True].text)
    texts = [tokenizer.decode([token]) for token in range(size)]
    plain = [token for token, text in enumerate(texts) if text.isascii() and text.isalnum()]
    context = next(token for token in plain if tokenizer.id_to_token(token) not in BYTE_TOKENS)
    ids = [token for token in range(size + 2) if token != context]
    table = tables[False].text
    delicate = [
        token for token in ids if token >= size - len(ADDED) or token < len(SPECIAL) or table[token] is None
    ]
    return Case(tokenizer, tables, context, ids, delicate)


@cache
def tokens_of(name: str) -> st.SearchStrategy[list[int]]:
    """Tokens of texts, any tokens, and delicate ones, in any mixture."""
    tokenizer, ids, context = case(name).tokenizer, case(name).ids, case(name).context
    encoded = [[id for id in tokenizer.encode(text).ids if id != context] for text in set(CORPUS)]
    text = st.sampled_from([ids[at : at + 6] for ids in encoded for at in range(0, len(ids), 6)])
    single = st.one_of(st.sampled_from(ids), st.sampled_from(case(name).delicate)).map(lambda id: [id])
    return st.lists(st.one_of(text, single), max_size=12).map(lambda parts: [*chain.from_iterable(parts)])


def unescape(text: bytes) -> str:
    decoded = json.loads(b'"' + text + b'"')
    assert isinstance(decoded, str)
    return decoded


def check_stream(name: str, tokens: list[int], skip: bool, has_context: bool, steps: list[int]) -> None:
    """A stream whose tokens are pushed `steps` at a time; 0: taken from the table if that is allowed."""
    expected = case(name).decode(tokens, skip=skip, has_context=has_context)
    table = case(name).tables[skip]

    at_once = Detokenizer(table, has_context=has_context)
    assert at_once.push(tokens) + at_once.finish() == expected

    stream, sent, place = Detokenizer(table, has_context=has_context), "", 0
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
@settings(max_examples=1000, deadline=None, database=None)
@given(data=st.data())
def test_a_stream_reads_as_the_whole_decode(name: str, data: st.DataObject) -> None:
    tokens, steps = data.draw(tokens_of(name)), data.draw(STEPS)
    check_stream(name, tokens, data.draw(st.booleans()), data.draw(st.booleans()), steps)


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=100, deadline=None, database=None)
@given(data=st.data())
def test_a_stream_of_any_decoder_reads_as_the_whole_decode(name: str, data: st.DataObject) -> None:
    tokens, steps = data.draw(tokens_of(name)), data.draw(STEPS)
    check_stream(name, tokens, data.draw(st.booleans()), data.draw(st.booleans()), steps)


@pytest.mark.parametrize("name", TRAINED)
@settings(max_examples=300, deadline=None, database=None)
@given(data=st.data())
def test_always_taking_the_table_where_allowed_reads_the_same(name: str, data: st.DataObject) -> None:
    case_ = case(name)
    tokens = data.draw(tokens_of(name))
    has_context = data.draw(st.booleans())
    table = case_.tables[True]
    stream, sent = Detokenizer(table, has_context=has_context), b""
    for token in tokens:
        text = table.text[token] if token < len(table.text) and not stream.pending else None
        sent += escape_json(stream.push((token,))) if text is None else text
    sent += escape_json(stream.finish())
    assert unescape(sent) == case_.decode(tokens, skip=True, has_context=has_context)


@pytest.mark.parametrize("name", TRAINED)
@settings(max_examples=300, deadline=None, database=None)
@given(data=st.data())
def test_text_is_held_only_while_it_is_uncertain(name: str, data: st.DataObject) -> None:
    case_ = case(name)
    table = case_.tables[True]
    stream, sent = Detokenizer(table, has_context=True), ""
    tokens = data.draw(tokens_of(name))
    for place, token in enumerate(tokens):
        sent += stream.push((token,))
        held = case_.decode(tokens[: place + 1], skip=True, has_context=True)[len(sent) :]
        if table.plan.mode is Mode.BYTES:
            # All that may be missing is one unfinished character, or the two bytes that start a surrogate.
            assert held in ("", "\ufffd", "\ufffd\ufffd")
        elif held:
            assert token >= len(table.text) or table.text[token] in (None, b"")
        assert stream.pending == bool(held)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", TRAINED)
def test_the_table_says_what_push_says(name: str, skip: bool) -> None:
    table = case(name).tables[skip]
    stream = Detokenizer(table, has_context=True)
    for token, text in enumerate(table.text):
        if text is not None:
            assert not stream.pending
            assert stream.push((token,)) == unescape(text)


def test_an_unfinished_character_is_held_until_its_last_byte() -> None:
    table = TokenTable.from_tokenizer(listed(decoders.ByteLevel(), ["ä", "½", "ł", "a"]))
    stream = Detokenizer(table, has_context=True)
    assert [stream.push([token]) for token in (3, 4, 5)] == ["", "", "你"]
    assert not stream.pending
    assert stream.push([3]) == ""
    assert stream.pending
    assert stream.push([6]) == "\ufffda"
    assert stream.push([3, 4]) == ""
    assert stream.finish() == "\ufffd"


def test_a_skipped_special_token_leaves_a_character_whole() -> None:
    tokenizer = listed(decoders.ByteLevel(), ["ä½", "ł"])
    skipping = Detokenizer(TokenTable.from_tokenizer(tokenizer), has_context=True)
    assert skipping.push([3, 2, 4]) == "你"
    keeping = Detokenizer(TokenTable.from_tokenizer(tokenizer, skip_special_tokens=False), has_context=True)
    assert keeping.push([3, 2, 4]) == "\ufffd</s>\ufffd"


def test_one_invalid_byte_spoils_a_run_of_byte_tokens() -> None:
    names = ["<0x41>", "<0xE4>", "<0xBD>", "<0xA0>", "a"]
    table = TokenTable.from_tokenizer(listed(decoders.ByteFallback(), names))
    stream = Detokenizer(table, has_context=True)
    assert stream.push([4, 5, 6]) == ""
    assert stream.push([7]) == "你a"
    assert stream.push([3, 4, 5, 6, 4]) == ""
    assert stream.finish() == "\ufffd" * 5


def test_a_text_without_context_loses_its_leading_space() -> None:
    table = case("BPE with byte fallback").tables[True]
    the = next(token for token, text in enumerate(table.text) if text and text[:1] == b" " and len(text) > 1)
    word = unescape(table.text[the] or b"")
    stream = Detokenizer(table, has_context=False)
    assert stream.pending
    assert stream.push([the]) == word[1:]
    assert not stream.pending
    assert stream.push([the]) == word
    continued = Detokenizer(table, has_context=True)
    assert not continued.pending
    assert continued.push([the]) == word


def test_a_leading_space_is_dropped_even_from_a_run_that_the_end_closes() -> None:
    tokenizer = listed(
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]), ["<0x20>"]
    )
    table = TokenTable.from_tokenizer(tokenizer)
    for tokens, text in (([3], ""), ([3, 3], " ")):
        stream = Detokenizer(table, has_context=False)
        assert stream.push(tokens) == ""
        assert stream.finish() == text == tokenizer.decode(tokens)


def test_the_bytes_of_a_surrogate_are_replaced_one_by_one() -> None:
    tokenizer = listed(decoders.ByteLevel(), ["í", "ł", "ã", "a"])  # ED A0 80, a
    tokenizer.add_tokens(["Ģ"])
    for tokens in ([3, 4], [3, 4, 7], [3, 4, 6], [3, 3, 4, 7, 6]):
        stream = Detokenizer(TokenTable.from_tokenizer(tokenizer), has_context=True)
        assert "".join([stream.push([token]) for token in tokens]) + stream.finish() == tokenizer.decode(
            tokens
        )


def test_the_context_of_a_decoder_that_cannot_be_streamed_is_an_ordinary_token() -> None:
    # Not "b", which has no text when alone: it would seem to belong to the stream.
    tokenizer = listed(
        decoders.Sequence([decoders.Fuse(), decoders.Strip("b", 0, 1)]), ["b", " ", "\ufffd", "x"]
    )
    stream = Detokenizer(TokenTable.from_tokenizer(tokenizer), has_context=True)
    assert stream.push([6, 4, 6]) == ""
    assert stream.finish() == "x x"
