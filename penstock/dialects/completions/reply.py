"""Events and whole replies of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from penstock.dialects.openai_reply import OpenAIReply
from penstock.generation.parsers.delta import Delta
from penstock.generation.replies.logprobs import PIECE_CANDIDATES, TokenLogprobs
from penstock.generation.replies.reply import Choice
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.errors import encode_json
from penstock.streaming.rows.token_fields import ItemKind
from penstock.streaming.token_names import TokenNames


class CompletionReply(OpenAIReply):
    """A completion: choices are text."""

    __slots__ = ()

    api = "completions"

    event_object = body_object = "text_completion"
    text_start, text_end = b',"text":"', b'"'
    logprob_lists = (
        (b'"text_offset":[', ItemKind.PLACE),
        (b'],"token_logprobs":[', ItemKind.LOGPROB),
        (b'],"tokens":[', ItemKind.TEXT),
        (b'],"top_logprobs":[', ItemKind.BY_TEXT),
    )
    prompt_in_choice = True

    def first(self, index: int, prompt_token_ids: Any, usage: TokenUsage | None) -> bytes:
        return b""

    def content(self, index: int, text: bytes, delta: Delta | None) -> bytes:
        return b"".join((self.head(index), text, self.text_end))

    def logprobs(self, logprobs: TokenLogprobs) -> Iterator[bytes]:
        """One list per field, with an entry per token."""
        if logprobs.wide:
            yield from _wide_logprobs(logprobs)
            return
        columns = []
        for piece in logprobs.columns():
            columns.append(piece)
            yield b""
        places, *lists = zip(*columns, strict=True) if columns else ((),) * 4
        yield b'{"text_offset":' + encode_json(list(chain(*places)))
        for name, pieces in zip((b"token_logprobs", b"tokens", b"top_logprobs"), lists, strict=True):
            separator = b',"%b":[' % name
            for piece in pieces:
                yield separator + piece
                separator = b","
            yield b"]" if pieces else separator + b"]"
        yield b"}"

    def choice_content(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.prompt.echo + choice.text.decode()}


def _wide_logprobs(logprobs: TokenLogprobs) -> Iterator[bytes]:
    """The lists of tokens with very many candidates, in pieces."""
    names = logprobs.names
    unscored = [] if logprobs.unscored is None else [logprobs.unscored]
    own, spelled = [b"null"] * len(unscored), [names[token].quoted for token in unscored]
    tops = list(own)
    yield b'{"text_offset":'
    yield encode_json(list(chain(*logprobs.text_offsets())))
    for row in range(len(logprobs.ids)):
        ids, values = next(logprobs.slices(row))
        own.append(values[0])
        spelled.append(names[ids[0]].quoted)
        yield b""
    yield b',"token_logprobs":[%b],"tokens":[' % b",".join(own)
    yield b",".join(spelled)
    yield b'],"top_logprobs":[' + b",".join(tops)
    separator = b"," if tops else b""
    for row in range(len(logprobs.ids)):
        yield separator
        yield from _wide_by_text(logprobs, row)
        separator = b","
    yield b"]}"


def _by_text(names: TokenNames, ids: list[int], values: list[bytes]) -> dict[bytes, bytes]:
    """Logprobs by text: the token itself and its alternatives; of equal texts the last one's."""
    quoted = [names[token].quoted for token in ids if token >= 0]
    return dict(zip(quoted, values, strict=False))


def _wide_by_text(logprobs: TokenLogprobs, row: int) -> Iterator[bytes]:
    """The object of one token with very many candidates, in pieces."""
    shown: dict[bytes, bytes] = {}
    for ids, values in logprobs.slices(row):
        shown |= _by_text(logprobs.names, ids, values)
        yield b""
    separator = b"{"
    items = iter(shown.items())
    while some := list(islice(items, PIECE_CANDIDATES)):
        yield separator + b",".join([b"%b:%b" % each for each in some])
        separator = b","
    yield b"}"
