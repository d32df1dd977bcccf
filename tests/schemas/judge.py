"""What the grammar of a schema admits: given texts, and texts drawn at random from it."""

from __future__ import annotations

import asyncio
import json
import random
from types import TracebackType
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from penstock.engine.sampling.grammar_compiler import LIMITS
from penstock.generation.grammars.checker import GrammarChecker
from penstock.generation.request.structured_output import SchemaPart, json_constraint
from penstock.http.errors import ApiError

TOKENIZER = LLTokenizer("byte")
MAX_DRAWN = 1500
"""Bytes after which a random text that has not ended is given up."""
_SHORT = 60
"""Bytes after which a random text closes what is open."""
_CLOSING = frozenset(b'"]}')


class Refused(Exception):
    """The schema is refused; the message is the client's."""


class Judge:
    """Makes grammars of schemas as requests do."""

    def __init__(self) -> None:
        self._checker = GrammarChecker()
        self._runner = asyncio.Runner()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._checker.close()
        self._runner.close()

    def grammar(self, schema: Any, *, strict: bool = True) -> str:
        """Raises Refused."""
        part = SchemaPart((), "schema", loose=not strict)
        try:
            constraint = json_constraint("schema", schema, "compact", parts=(part,))
            return self._runner.run(self._checker.check_grammar(constraint)).grammar
        except ApiError as error:
            raise Refused(error.message) from None


def matcher(grammar: str) -> LLMatcher:
    """Raises Refused if the engine would refuse the grammar."""
    made = LLMatcher(TOKENIZER, grammar, log_level=0, limits=LIMITS)
    if made.is_error():
        raise Refused(made.get_error())
    return made


def admits(made: LLMatcher, text: str) -> bool:
    """Whether the grammar of ``made`` admits ``text`` as a whole. ``made`` stays as it is."""
    walked = made.deep_copy()
    return walked.consume_tokens(TOKENIZER.tokenize_str(text)) and walked.is_accepting()


def drawn(made: LLMatcher, seed: int) -> str | None:
    """A random text of the grammar of ``made``, which stays as it is; None if it does not end in time."""
    walked, choice, text = made.deep_copy(), random.Random(seed), bytearray()
    size = TOKENIZER.vocab_size
    while len(text) < MAX_DRAWN:
        if walked.is_stopped() or (walked.is_accepting() and choice.random() < 0.5):
            break
        bits = np.unpackbits(np.frombuffer(walked.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits[:size]) if token < 256]
        if not allowed:
            break
        ends = [token for token in allowed if token in _CLOSING]
        plain = [token for token in allowed if 32 <= token < 127 and token != ord("\\")] or allowed
        token = choice.choice(ends if ends and (len(text) > _SHORT or choice.random() < 0.3) else plain)
        if not walked.consume_token(token):
            return None
        text.append(token)
    if not walked.is_accepting():
        return None
    return text.decode(errors="replace")


def text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
