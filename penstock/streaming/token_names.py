"""The spellings of single tokens in logprobs, as columns of prepared JSON by token id."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock.streaming.detokenizer import Detokenizer
from penstock.streaming.rows.http_framing import Objects
from penstock.streaming.token_table import TokenTable, escape_json
from penstock.wire.arrays import I32

MAX_NAMES = 1 << 16
"""Tokens whose spellings are remembered, at most about 500 bytes each; all of a vocabulary where requests may
ask for the logprobs of all."""


_PREFIX = b'{"token":%b,"bytes":%b,"logprob":'


class TokenName(NamedTuple):
    """The spelling of one token in JSON."""

    quoted: bytes
    """The text in quotes."""
    prefix: bytes
    """An object with the text and the token's bytes, which may be a part of a character, up to the
    logprob."""


class TokenNames:
    """The spellings of single tokens, special ones included; one object per process.

    The columns have an entry for every token that was asked for with :meth:`spell`; those of an earlier call
    may be gone.
    """

    def __init__(self, table: TokenTable, most: int = MAX_NAMES) -> None:
        """``table``: with the text of special tokens; ``most``: maximum spellings to remember, unless more
        are asked for at once."""
        self.table = table
        self._most = most
        self._known: dict[int, TokenName] = {}
        self._tokens: dict[bytes, int] = {}
        """A token that is spelled like this."""
        self.known = np.zeros(0, np.bool_)
        """Whether the columns have the token."""
        self.quoted = np.zeros(0, np.object_)
        """The text in quotes; None: the columns lack the token."""
        self.next_keys = np.zeros(0, np.object_)
        """The text as a key of an object, behind another pair."""
        self.prefixes = np.zeros(0, np.object_)
        """An object with the text and the token's bytes, up to the logprob. It is one piece of an event, so
        the logprob comes last."""
        self.next_prefixes = np.zeros(0, np.object_)
        """The same behind the end of another object."""
        self.ambiguous = np.zeros(0, np.bool_)
        """Whether another token is spelled the same."""

    def __getitem__(self, token: int) -> TokenName:
        name = self._known.get(token)
        if name is None:
            if len(self._known) >= self._most:
                self._known.clear()
            quoted, own = self._spell(token)
            self._known[token] = name = TokenName(quoted, _PREFIX % (quoted, own))
        return name

    def spell(self, tokens: I32) -> None:
        """Make sure that the columns have these tokens; none of them is negative."""
        try:
            if b"\0" not in self.known.take(tokens).tobytes():  # cheaper than all()
                return
        except IndexError:
            self._grow(int(tokens.max()) + 1)
        missing = self._missing(tokens)
        if len(self._tokens) + len(missing) > self._most:
            self._forget()
            missing = self._missing(tokens)
        for token in missing:
            self._add(token)

    def _missing(self, tokens: I32) -> list[int]:
        return list(dict.fromkeys(tokens[~self.known.take(tokens)].tolist()))

    def _add(self, token: int) -> None:
        """Add a token to the columns."""
        quoted, own = self._spell(token)
        prefix = _PREFIX % (quoted, own)
        self.quoted[token], self.next_keys[token] = quoted, b",%b:" % quoted
        self.prefixes[token], self.next_prefixes[token] = prefix, b"}," + prefix
        self.known[token] = True
        other = self._tokens.setdefault(quoted, token)
        if other != token:
            self.ambiguous[token] = self.ambiguous[other] = True

    def detokenizer(self) -> Detokenizer:
        """For the text of consecutive tokens, special ones included."""
        return Detokenizer(self.table)

    def _spell(self, token: int) -> tuple[bytes, bytes]:
        """The text in quotes, and the token's bytes as a list."""
        table = self.table
        escaped = table.text[token] if token < len(table.text) else b""
        own = table.bytes_of(token)
        if escaped is None or own is None:
            detokenizer = self.detokenizer()
            text = detokenizer.push((token,)) + detokenizer.finish()
            escaped = escape_json(text)
            own = text.encode() if own is None else own
        return b'"%b"' % escaped, orjson.dumps(list(own))

    def _columns(self) -> tuple[Objects, ...]:
        return self.quoted, self.next_keys, self.prefixes, self.next_prefixes

    def _forget(self) -> None:
        for column in self._columns():
            column.fill(None)
        self.known.fill(False)
        self.ambiguous.fill(False)
        self._tokens.clear()

    def _grow(self, size: int) -> None:
        """There are ids below ``size``."""
        more = max(size, 2 * len(self.known)) - len(self.known)

        def longer(column: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate((column, np.empty(more, np.object_)))

        self.quoted, self.next_keys, self.prefixes, self.next_prefixes = map(longer, self._columns())
        self.known = np.concatenate((self.known, np.zeros(more, np.bool_)))
        self.ambiguous = np.concatenate((self.ambiguous, np.zeros(more, np.bool_)))


class TokenIdNames(TokenNames):
    """Spellings by which every token can be told from all others; bytes are still those of its text."""

    def _spell(self, token: int) -> tuple[bytes, bytes]:
        return b'"token_id:%d"' % token, super()._spell(token)[1]
