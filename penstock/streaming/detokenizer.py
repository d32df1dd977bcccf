"""Incremental detokenization: text of tokens as they arrive, equal to `tokenizers`' decode of all of them.

A `Detokenizer` belongs to one stream, which continues a prompt, and keeps undecided input:

* bytes of an unfinished character (ByteLevel). Ill-formed bytes become one U+FFFD per maximal ill-formed
  part, as in a lossy decode of the whole text, as soon as they are known to be ill-formed. One exception:
  CPython's decoder holds the first two bytes of an encoded surrogate until the next byte;
* a run of byte tokens (ByteFallback). `tokenizers` decodes such a run as a whole, and if it is not valid
  UTF-8 every byte of it becomes U+FFFD, even those of complete characters. So a run is held until another
  token or the stream's end closes it;
* the previous token, or all tokens, for decoders that need them (modes PAIR and WHOLE of the plan).

While `pending` is false nothing is kept, and a token with a text in the table has that text regardless of
earlier tokens. The caller may then use `table.text[token]` and bypass the detokenizer.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from penstock.streaming.decoder_plan import DecoderMode
from penstock.streaming.token_table import TokenTable


class Detokenizer:
    """The text of one stream: what its tokens add after an ordinary, complete token of the prompt.

    pending: whether the next token's text depends on state kept here. While it is false, tokens whose
    `table.text` is not None may bypass `push`.

    Token ids must not be negative. Unknown ids add nothing.
    """

    __slots__ = ("_held", "_run", "_table", "_tokens", "_window", "pending")

    def __init__(self, table: TokenTable) -> None:
        plan = table.plan
        self._table = table
        self._held = b""  # BYTES: an unfinished character
        self._run = bytearray()  # TEXT: a run of byte tokens
        self.pending = plan.mode is DecoderMode.PAIR or plan.mode is DecoderMode.WHOLE
        if self.pending:
            self._window = [plan.context]  # PAIR: the previous token
            self._tokens: list[int] = []  # WHOLE: all tokens

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens make final: whole characters only."""
        mode = self._table.plan.mode
        if mode is DecoderMode.BYTES:
            text = self._push_bytes(tokens)
            self.pending = bool(self._held)
        elif mode is DecoderMode.TEXT:
            text = self._push_text(tokens)
            self.pending = bool(self._run)
        elif mode is DecoderMode.PAIR:
            return self._push_pair(tokens)
        else:
            self._tokens += tokens
            return ""
        return text

    def finish(self) -> str:
        """The text that was held back. To be called once, at the end."""
        table = self._table
        match table.plan.mode:
            case DecoderMode.BYTES:
                return self._held.decode(errors="replace")
            case DecoderMode.TEXT:
                return self._end_run().decode() if self._run else ""
            case DecoderMode.PAIR:
                return ""
            case DecoderMode.WHOLE:
                return table.decode(self._tokens)

    def _push_bytes(self, tokens: Sequence[int]) -> str:
        raw = self._table.raw
        try:
            data = self._held + b"".join([raw[token] for token in tokens])
        except IndexError:
            data = self._held + b"".join([raw[token] for token in tokens if token < len(raw)])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def _push_text(self, tokens: Sequence[int]) -> str:
        pieces = self._table.pieces
        size = len(pieces)
        out: list[bytes] = []
        for token in tokens:
            piece = pieces[token] if token < size else None
            if piece is None:
                continue
            if isinstance(piece, int):
                self._run.append(piece)
            else:
                if self._run:
                    out.append(self._end_run())
                out.append(piece)
        return b"".join(out).decode()

    def _end_run(self) -> bytes:
        run = bytes(self._run)
        self._run.clear()
        return self._table.run_text(run)

    def _push_pair(self, tokens: Sequence[int]) -> str:
        table = self._table
        kept = table.kept(tokens)
        if not kept:
            return ""
        before = table.decode_strings(self._window)
        text = table.decode_strings(self._window + kept)
        self._window = kept[-1:]
        return text[len(before) :]
