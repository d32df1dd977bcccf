"""Looks up a token's text: a table per vocabulary from token id to JSON-escaped UTF-8 bytes.

Made once per process from the tokenizer, so that most tokens take one list look-up. `TokenTable.text[id]` is
the text of a token, ready to be sent, if it is *context-free*: the same after any tokens, unless the
detokenizer holds something back (`Detokenizer.pending`). By the modes of `decoder_plan`:

* BYTES: tokens whose bytes are valid UTF-8 by themselves;
* TEXT: all but byte tokens such as `<0xE4>`;
* PAIR and WHOLE: none.

Unknown ids, and special tokens where these are skipped, add nothing in any mode: `tokenizers` drops them
before its decoder runs, so they do not even interrupt a run of byte tokens.
"""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Sequence
from typing import cast

import msgspec
from tokenizers import Tokenizer

from penstock.streaming.decoder_plan import DecoderMode, DecoderPlan, DecoderStage, read_decoder_plan

log = logging.getLogger(__name__)

_decode_text = msgspec.json.Decoder(str).decode

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_encode_json = msgspec.json.Encoder().encode


def unescape_json(text: bytes) -> str:
    """The text that ``text`` is inside a JSON string."""
    return _decode_text(b'"%b"' % text)


def escape_json(text: str) -> bytes:
    """`text` as UTF-8, escaped to stand between the quotes of a JSON string.

    Quotes, backslashes and characters below U+0020 are escaped; all others stay as they are.
    """
    return _encode_json(text)[1:-1]


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's byte alphabet as an encoding map for `codecs.charmap_encode`: code point to byte.

    Printable Latin-1 characters map to themselves; the other 68 bytes are U+0100 and up, in order.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    return {byte: byte for byte in shown} | {0x100 + index: byte for index, byte in enumerate(hidden)}


_BYTE_ALPHABET = _byte_alphabet()

# tokenizers reads the digits with Rust's from_str_radix, which accepts a leading plus sign.
_is_byte_token = re.compile(r"<0x[0-9A-Fa-f+][0-9A-Fa-f]>").fullmatch


class TokenTable:
    """The texts of one tokenizer's tokens. Immutable once made, and shared by all streams.

    text:   per id, the JSON-escaped UTF-8 of the token's text if that is context-free, `b""` for tokens that
            add nothing, None for all others. An id past the end adds nothing.
    raw:    mode BYTES, per id: the token's bytes.
    pieces: mode TEXT, per id: UTF-8, the value of a byte token, or None for a token that adds nothing.
    """

    __slots__ = ("_skip_special_tokens", "_tokenizer", "pieces", "plan", "raw", "text")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self.plan = DecoderPlan(DecoderMode.WHOLE)
        self.text: list[bytes | None] = []
        self.raw: list[bytes] = []
        self.pieces: list[bytes | int | None] = []

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> TokenTable:
        """The table of `tokenizer`, with or without the text of special tokens."""
        table = cls(tokenizer, skip_special_tokens=skip_special_tokens)
        tokens = _decoded_tokens(tokenizer, skip_special_tokens)
        table.plan = read_decoder_plan(tokenizer.decoder, tokens)
        match table.plan.mode:
            case DecoderMode.BYTES:
                table._fill_bytes(tokens)
            case DecoderMode.TEXT:
                table._fill_text(tokens)
            case DecoderMode.PAIR | DecoderMode.WHOLE:
                table._fill_dropped(tokens)
        if not table._agrees():
            log.warning("tokenizers does not decode as its decoder %s says", tokenizer.decoder)
            table.plan, table.raw, table.pieces = DecoderPlan(DecoderMode.WHOLE), [], []
            table._fill_dropped(tokens)
        if table.plan.mode is DecoderMode.WHOLE:
            log.warning("the tokenizer's decoder cannot be streamed: text is sent when a stream ends")
        return table

    def bytes_of(self, token: int) -> bytes | None:
        """The token's own bytes, which may be a part of a character; None if its decoder does not tell."""
        if self.plan.mode is DecoderMode.BYTES:
            return self.raw[token] if token < len(self.raw) else b""
        if self.plan.mode is not DecoderMode.TEXT:
            return None
        piece = self.pieces[token] if token < len(self.pieces) else None
        return piece.to_bytes() if isinstance(piece, int) else piece or b""

    # ---- for detokenizers ----

    def run_text(self, run: bytes) -> bytes:
        """Mode TEXT: a run of byte tokens as UTF-8; all U+FFFD if one byte of it is invalid."""
        try:
            parts = [run.decode()]
        except UnicodeDecodeError:
            parts = [REPLACEMENT] * len(run)
        return "".join([_rewrite(self.plan.after, part) for part in parts]).encode()

    def kept(self, tokens: Sequence[int]) -> list[str]:
        """Mode PAIR: the strings of the tokens that reach the decoder."""
        dropped, name = self.text, self._tokenizer.id_to_token
        strings = [name(token) for token in tokens if token < len(dropped) and dropped[token] is None]
        return [string for string in strings if string is not None]

    def decode_strings(self, tokens: list[str]) -> str:
        """Mode PAIR: the decoder's text of these strings."""
        return cast(str, self._tokenizer.decoder.decode(tokens))

    def decode(self, tokens: list[int]) -> str:
        """Mode WHOLE: the tokenizer's text of these tokens after an ordinary token."""
        context = self._ordinary_token()
        before = self._tokenizer.decode(context, skip_special_tokens=self._skip_special_tokens)
        text = self._tokenizer.decode(context + tokens, skip_special_tokens=self._skip_special_tokens)
        return text.removeprefix(before)

    # ---- making ----

    def _fill_bytes(self, tokens: list[str | None]) -> None:
        before = self.plan.before
        for token in tokens:
            if token is None:
                raw = b""
            else:
                if before:
                    token = _rewrite(before, token)
                try:
                    raw, _ = codecs.charmap_encode(token, "strict", _BYTE_ALPHABET)
                except UnicodeEncodeError:  # added tokens are not in the byte alphabet
                    raw = token.encode()
            self.raw.append(raw)
            self.text.append(_escape_piece(raw))

    def _fill_text(self, tokens: list[str | None]) -> None:
        for token in tokens:
            piece = None if token is None else self._read(token)
            self.pieces.append(piece)
            if piece is None:
                self.text.append(b"")
            else:
                self.text.append(None if isinstance(piece, int) else _escape_piece(piece))

    def _fill_dropped(self, tokens: list[str | None]) -> None:
        self.text = [b"" if token is None else None for token in tokens]

    def _read(self, token: str) -> bytes | int:
        plan = self.plan
        token = _rewrite(plan.before, token)
        if plan.byte_fallback:
            if len(token) == 6 and _is_byte_token(token):
                return int(token[3:5], 16)
            token = _rewrite(plan.after, token)
        return token.encode()

    def _agrees(self) -> bool:
        """Whether `tokenizers` decodes the sequence of all context-free tokens to the table's text."""
        known: dict[int, bytes] = {}
        for token, piece in enumerate(self.raw or self.pieces):
            if self.text[token] and isinstance(piece, bytes):
                known[token] = piece
        if not known:
            return True
        opening = max(known, key=lambda token: len(known[token]))  # has characters left after Strip
        text = self._tokenizer.decode([opening, *known], skip_special_tokens=False)
        return text.endswith(b"".join(known.values()).decode())

    def _ordinary_token(self) -> list[int]:
        """One token with visible text, or an empty list."""
        for token, text in enumerate(self.text):
            if text is None:
                alone = self._tokenizer.decode([token])
                if alone.strip() and REPLACEMENT not in alone:
                    return [token]
        return []


def _decoded_tokens(tokenizer: Tokenizer, skip_special_tokens: bool) -> list[str | None]:
    """Per id, the string that `tokenizers` passes to its decoder, None if it passes none."""
    ids = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    tokens = [tokenizer.id_to_token(token) for token in range(ids)]
    if not skip_special_tokens:
        return tokens
    # By content, as tokenizers does: an ordinary token with the same content is skipped as well.
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    return [None if token in special else token for token in tokens]


def _rewrite(stages: tuple[DecoderStage, ...], token: str) -> str:
    for stage in stages:
        token = stage(token)
    return token


def _escape_piece(piece: bytes) -> bytes | None:
    """`piece` escaped for JSON, the same object if nothing is escaped; None if it is not UTF-8."""
    try:
        escaped = _encode_json(piece.decode())[1:-1]
    except UnicodeDecodeError:
        return None
    return piece if escaped == piece else escaped
