"""Tokenizers of the four kinds that models have, trained on a little text of many alphabets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain

from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.streaming.token_table import TokenTable

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


TRAINED = {
    "byte-level BPE": trained_byte_level,
    "BPE with byte fallback": trained_byte_fallback,
    "Metaspace Unigram": trained_unigram,
    "WordPiece with cleanup": trained_word_piece,
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

    def decode(self, tokens: list[int], *, skip: bool) -> str:
        before = self.tokenizer.decode([self.context], skip_special_tokens=skip)
        text = self.tokenizer.decode([self.context, *tokens], skip_special_tokens=skip)
        assert text.startswith(before)
        return text[len(before) :]


def make_case(tokenizer: Tokenizer) -> Case:
    """Adds the tokens of ``ADDED``."""
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


def token_lists(case: Case) -> st.SearchStrategy[list[int]]:
    """Tokens of texts, any tokens, and delicate ones, in any mixture."""
    tokenizer, ids, context = case.tokenizer, case.ids, case.context
    encoded = [[id for id in tokenizer.encode(text).ids if id != context] for text in set(CORPUS)]
    text = st.sampled_from([ids[at : at + 6] for ids in encoded for at in range(0, len(ids), 6)])
    single = st.one_of(st.sampled_from(ids), st.sampled_from(case.delicate)).map(lambda id: [id])
    return st.lists(st.one_of(text, single), max_size=12).map(lambda parts: [*chain.from_iterable(parts)])
