"""Reads how a tokenizer's decoder can be run token by token, from its chain of decoders.

`tokenizers` decodes a whole list of tokens at once. `read_decoder_plan` finds the mode in which a stream can
be decoded incrementally with the same result:

| decoders                                                      | mode  | the text of a token              |
| ------------------------------------------------------------- | ----- | -------------------------------- |
| ByteLevel                                                     | BYTES | bytes of a lossy UTF-8 text      |
| Replace, Metaspace, WordPiece, Strip, ByteFallback, then Fuse | TEXT  | fixed, except for byte tokens    |
| none (tokens are joined with spaces)                          | TEXT  | fixed                            |
| CTC, BPEDecoder                                               | PAIR  | depends on the token before it   |
| any other chain, decoders written in Python                   | WHOLE | depends on the whole stream      |

ByteLevel and Fuse join the tokens. After them two decoders are supported: Strip, which drops leading
characters and so affects only the prompt, and Replace of a single character, but not after ByteLevel.
Rules for the first token of a text never apply: that token belongs to the prompt.
"""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from tokenizers import Regex, decoders

log = logging.getLogger(__name__)


class DecoderMode(enum.Enum):
    """What a token's text depends on; see the module's table."""

    BYTES = enum.auto()
    TEXT = enum.auto()
    PAIR = enum.auto()
    WHOLE = enum.auto()


DecoderStage = Callable[[str], str]
"""A decoder that rewrites each token by itself, as a token that is not the first of its text."""


class DecoderPlan(NamedTuple):
    """How to decode a tokenizer's tokens incrementally.

    Tokens pass through `before`; then, with `byte_fallback`, runs of byte tokens become characters; then all
    pass through `after`.
    """

    mode: DecoderMode
    before: tuple[DecoderStage, ...] = ()
    byte_fallback: bool = False
    after: tuple[DecoderStage, ...] = ()
    stripped: bool = False
    """Whether the decoder finally strips leading characters of the joined text, which are the prompt's."""
    context: str = ""
    """PAIR: a complete, ordinary token in place of the prompt's last one."""


_WHOLE = DecoderPlan(DecoderMode.WHOLE)


def read_decoder_plan(decoder: decoders.Decoder | None, tokens: list[str | None]) -> DecoderPlan:
    """The plan for this decoder and vocabulary; mode WHOLE for a chain that is not supported.

    `tokens`: the vocabulary by id, as passed to the decoder; None for tokens that never reach it.
    """
    if decoder is None:
        return DecoderPlan(DecoderMode.TEXT, before=(lambda token: " " + token,))
    try:
        description = json.loads(decoder.__getstate__())
    except Exception as error:  # noqa: BLE001 - tokenizers raises this for a decoder written in Python
        log.debug("decoder without a description: %s", error)
        return _WHOLE
    links = _flatten(description)
    if len(links) == 1 and links[0]["type"] in ("CTC", "BPEDecoder"):
        return _pair_plan(links[0], tokens)
    plan = DecoderPlan(DecoderMode.TEXT)
    joined = False
    for link in links:
        longer = _extend_joined(plan, link) if joined else _extend(plan, link)
        if longer is None:
            return _WHOLE
        plan = longer
        joined = joined or link["type"] in ("Fuse", "ByteLevel")
    return plan


def _flatten(link: dict[str, Any]) -> list[dict[str, Any]]:
    if link["type"] != "Sequence":
        return [link]
    return [inner for outer in link["decoders"] for inner in _flatten(outer)]


def _extend(plan: DecoderPlan, link: dict[str, Any]) -> DecoderPlan | None:
    """`plan` followed by a decoder that still gets single tokens; None if it is not supported."""
    match link["type"]:
        case "Fuse":
            return plan
        case "ByteLevel" if not plan.byte_fallback:
            return plan._replace(mode=DecoderMode.BYTES)
        case "ByteFallback" if not plan.byte_fallback:
            return plan._replace(byte_fallback=True)
    return _with_stage(plan, _stage(link))


def _with_stage(plan: DecoderPlan, stage: DecoderStage | None) -> DecoderPlan | None:
    if stage is None:
        return None
    if plan.byte_fallback:
        return plan._replace(after=(*plan.after, stage))
    return plan._replace(before=(*plan.before, stage))


def _extend_joined(plan: DecoderPlan, link: dict[str, Any]) -> DecoderPlan | None:
    """`plan` followed by a decoder that gets the joined text as one token; None if it is not supported."""
    match link:
        case {"type": "Fuse"}:
            return plan
        case {"type": "Strip", "stop": 0} if not plan.stripped:
            return plan._replace(stripped=True)
        case {"type": "Replace", "pattern": {"String": str(old)}} if len(old) == 1 and not plan.stripped:
            # Equal before and after joining, since a match of one character lies within one token.
            return _with_stage(plan, _stage(link)) if plan.mode is DecoderMode.TEXT else None
    return None


def _stage(link: dict[str, Any]) -> DecoderStage | None:
    match link:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return lambda token: token.replace(old, new)
        case {"type": "Replace", "pattern": {"Regex": str(pattern)}, "content": str(new)}:
            replace = decoders.Replace(Regex(pattern), new)
            return lambda token: replace.decode([token])
        case {"type": "Metaspace", "replacement": str(mark)}:
            return lambda token: token.replace(mark, " ")
        case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleanup)}:
            return _word_piece(prefix, cleanup)
        # With stop > 0, tokenizers panics on a token that it would empty.
        case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0}:
            return lambda token: strip_start(token, char, start)
    return None


# WordPiece's cleanup, in the order tokenizers applies it, to each token by itself.
_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _word_piece(prefix: str, cleanup: bool) -> DecoderStage:
    def rewrite(token: str) -> str:
        token = token[len(prefix) :] if token.startswith(prefix) else " " + token
        if cleanup and " " in token:  # every artifact has a space
            for old, new in _CLEANUP:
                token = token.replace(old, new)
        return token

    return rewrite


def strip_start(text: str, char: str, most: int) -> str:
    """`text` without up to `most` leading `char`."""
    return text[min(most, len(text) - len(text.lstrip(char))) :]


def _pair_plan(link: dict[str, Any], tokens: list[str | None]) -> DecoderPlan:
    if link["type"] == "CTC":
        # CTC drops a token equal to the one before it, so the context must equal no token.
        return DecoderPlan(DecoderMode.PAIR, context="\0before")
    # The suffix becomes a space except in the last token. At a token's end that only appends text; elsewhere
    # it would change text that was already sent.
    suffix = link["suffix"]
    if not suffix or any(token and -1 < token.find(suffix) < len(token) - len(suffix) for token in tokens):
        return _WHOLE
    return DecoderPlan(DecoderMode.PAIR, context="x" + suffix)
