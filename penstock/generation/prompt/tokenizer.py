"""The tokenizer of an API server: text to token ids and back."""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import fastokens
import numpy as np
import tokenizers

INLINE_FAST = 64 * 1024
"""Characters that fastokens encodes in about 1 ms (measured: 10 to 160 ns per token)."""
INLINE_SLOW = 4 * 1024
"""Characters that ``tokenizers`` encodes in about 1 ms or less (measured: 0.7 us per token)."""
LONG_DECODE = 4096
"""Token ids that are decoded in about 1 ms (measured: 0.3 us per token); decode() holds the GIL meanwhile."""

ESTIMATED_ABOVE = 4
"""Characters per allowed token above which a text is estimated before it is encoded."""
PIECE = 64 * 1024
"""Characters of such a text that are encoded at a time."""
CUT_TOKENS = 16
"""Tokens by which the ends of a piece may differ from those of the whole text."""

FlatEncoder = Callable[[list[str], bool], tuple[bytes, bytes]]
"""Texts and add_special_tokens to uint32 ids and uint64 offsets, as little-endian bytes."""


class Tokenizer:
    """A model's tokenizer, with the fastest encoder that gives exact ids.

    ``tokenizers`` is the reference. fastokens is about a hundred times as fast but supports only some kinds
    of tokenizers; it is used if it gives the same ids for all texts of a check set. This is decided
    separately for encoding with and without special tokens.
    """

    def __init__(self, raw: tokenizers.Tokenizer, fast: FlatEncoder | None) -> None:
        """``fast``: an encoder that is used if it agrees with ``raw``."""
        self.raw = raw
        """The reference implementation, from which decoding tables are built."""
        self.vocab_size: int = raw.get_vocab_size(with_added_tokens=True)
        """Number of entries, including added tokens; the model may have more output rows."""
        added = raw.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        texts = list(check_texts(raw)) if fast else []
        self._fast = {special: _if_exact(fast, raw, texts, special) for special in (False, True)}
        self.inline_characters = {
            special: INLINE_SLOW if encoder is None else INLINE_FAST
            for special, encoder in self._fast.items()
        }
        """Longest text to encode on the event loop (about 1 ms), by whether special tokens are added; longer
        texts belong in a thread."""

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Tokenizer:
        """From ``tokenizer.json`` in ``directory``. Raises ValueError if it cannot be loaded."""
        path = str(Path(directory) / "tokenizer.json")
        if not os.path.isfile(path):
            raise ValueError(f"{path} does not exist; a model is served with its tokenizer.json")
        try:
            raw = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # noqa: BLE001 - tokenizers raises Exception itself
            raise ValueError(f"{path} is not a tokenizer: {error}") from None
        raw.no_truncation()
        raw.no_padding()
        return cls(raw, _fast_encoder(path))

    def is_fast(self, add_special_tokens: bool) -> bool:
        """Whether fastokens encodes, otherwise ``tokenizers``. Both let other threads run."""
        return self._fast[add_special_tokens] is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``."""
        if self._fast[add_special_tokens] is None:
            return self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        ids: list[int] = np.frombuffer(self.encode_bytes(text, add_special_tokens)[0], "<i4").tolist()
        return ids

    def encode_bytes(self, text: str, add_special_tokens: bool = True) -> tuple[bytes, int]:
        """Token ids as little-endian int32 bytes (as in ``Submit.prompt``), and their count."""
        fast = self._fast[add_special_tokens]
        if fast is None:
            return self.pack(self.encode(text, add_special_tokens))
        ids, _ = fast([text], add_special_tokens)
        return ids, len(ids) >> 2

    def encode_each(self, texts: list[str], add_special_tokens: bool = True) -> list[bytes]:
        """The token ids of each text as little-endian int32 bytes. Several threads may take part."""
        fast = self._fast[add_special_tokens]
        if fast is None:
            found = self.raw.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [np.array(encoding.ids, "<i4").tobytes() for encoding in found]
        ids, offsets = fast(texts, add_special_tokens)
        ends = (np.frombuffer(offsets, "<u8") * 4).tolist()
        return [ids[start:end] for start, end in itertools.pairwise(ends)]

    def is_longer(self, text: str, most: int) -> bool:
        """Whether ``text`` surely has more than ``most`` tokens: its pieces have a quarter more.

        To encode a whole text takes up to 100 bytes and 0.5 us per character (measured); this ends after
        about ``most`` tokens.
        """
        if len(text) <= max(PIECE, ESTIMATED_ABOVE * most):
            return False
        total, allowed = 0, most * 1.25
        for start in range(0, len(text), PIECE):
            total += self.encode_bytes(text[start : start + PIECE], False)[1]
            allowed += CUT_TOKENS
            if total > allowed:
                return True
        return False

    def pack(self, ids: Sequence[int]) -> tuple[bytes, int]:
        """Ids below 2**31 as little-endian int32 bytes, and their count."""
        return np.array(ids, "<i4").tobytes(), len(ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ``ids``; ids outside the vocabulary are skipped. A long list lets other threads run."""
        if len(ids) <= LONG_DECODE:
            return self.raw.decode(ids, skip_special_tokens=skip_special_tokens)
        [text] = self.raw.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def has_special(self, texts: Iterable[str]) -> bool:
        """Whether any of ``texts`` is a special token."""
        return any(self.raw.token_to_id(text) in self.special_ids for text in texts)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary entry of each id; empty for ids outside the vocabulary."""
        return [self.raw.id_to_token(id) or "" for id in ids]


def _fast_encoder(path: str) -> FlatEncoder | None:
    if sys.byteorder != "little":
        return None
    try:
        fast = fastokens.Tokenizer.from_file(path)
    except Exception:  # noqa: BLE001 - the reference encodes instead
        return None
    fast.no_truncation()
    fast.no_padding()
    encoder: FlatEncoder = fast.encode_batch_flat
    return encoder


def _if_exact(
    fast: FlatEncoder | None, raw: tokenizers.Tokenizer, texts: list[str], special: bool
) -> FlatEncoder | None:
    """``fast`` if it gives the ids of ``raw`` for each of ``texts``, else None."""
    if fast is None:
        return None
    expected = [encoding.ids for encoding in raw.encode_batch_fast(texts, add_special_tokens=special)]
    try:
        for text, ids in zip(texts, expected, strict=True):
            if fast([text], special)[0] != np.array(ids, "<u4").tobytes():
                return None
    except Exception:  # noqa: BLE001 - an encoder that fails on any text is not exact
        return None
    return fast


# -- the check set

_PROSE = (
    "",
    " ",
    "Hello, world! It's 12:30; we'll say \"don't\" -- isn't that (quite) odd?\n",
    "def f(x: int) -> list[str]:\n\tif x >= 10_000:\n        return ['a'] * 3  # comment\r\n\r\n\r\n",
    '{"key": [1, 2.5e-10, null], "url": "https://example.org/a?b=c&d=%20#e"}',
    "   leading, trailing and   inner\t\tspaces  \n\n \n  ",
    "CamelCase snake_case SCREAMING_CASE x1y2z3 1234567890 3.14159 1,000,000 0xDEADBEEF",
    "I'M YOU'RE he'll we've they'd 'tis o'clock ’twas “quoted” l'été",
    "Größenwahn naïve façade Ångström Ænima œuvre ﬁnal İstanbul ıq ẞ ß",
    "nai\u0308ve fac\u0327ade A\u030angstro\u0308m e\u0301\u0302 \u1e9b\u0323 \u212b \u2126",
    "Съешь же ещё этих мягких булок. Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία.",
    "我能吞下玻璃而不伤身体。私はガラスを食べられます。ｶﾀｶﾅ 나는 유리를 먹을 수 있어요。㍿①Ⅷ",
    "أنا قادر على أكل الزجاج ١٢٣ אני יכול לאכול זכוכית मैं काँच खा सकता हूँ ฉันกินกระจกได้ ខ្ញុំ",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 ☃️ 😀😃 \U0001f9d1\u200d\U0001f680 𝔘𝔫𝔦 𐍈 \U0010fffd",
    "a\u00a0b\u2003c\u200bd\u2028e\u2029f\u3000g\ufeffh\u00adi\u2060j\x85k\x0bl\x0cm\x1cn",
    "\x01\x02\x1b[31m\x7f\ufffd\ufffe\ue000",
    "a" * 300 + " " * 100 + "\n" * 40 + "!?" * 50 + "1" * 50 + "=-" * 60,
    "x ▁y ▁▁z Ġw Ċ <0x0A> ## ##ing ing## @@ </w>",
)


def check_texts(raw: tokenizers.Tokenizer) -> Iterator[str]:
    """About a hundred varied texts of at most 1,000 characters, always the same for the same tokenizer."""
    yield from _PROSE
    added = [token.content for token in raw.get_added_tokens_decoder().values()]
    for token in itertools.islice(added, 24):
        yield f"{token}a {token} b{token}{token}\n{token} "
        yield f"{token.strip()[:-1]} {token.upper()}{token.lower()}"
    draw = random.Random(0)
    words = sorted(raw.get_vocab())
    for _ in range(24):
        yield "".join(draw.choices(words, k=24))
        yield raw.decode([draw.randrange(len(words)) for _ in range(48)], skip_special_tokens=False)
    for top in (0x80, 0x500, 0xD800):
        yield "".join(chr(draw.randrange(1, top)) for _ in range(200))
        yield "".join(chr(draw.randrange(1, top)) + draw.choice((" ", "", "\n")) for _ in range(200))
