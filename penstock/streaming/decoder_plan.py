"""A tokenizer's decoder, reduced to what decoding token by token has to know.

`tokenizers` decodes a whole list of tokens at once, through a chain of decoders. `read_decoder_plan` says
what such a chain does to a stream:

| decoders                                                      | mode  | the text of a token              |
| ------------------------------------------------------------- | ----- | -------------------------------- |
| ByteLevel                                                     | BYTES | bytes of a lossy UTF-8 text      |
| Replace, Metaspace, WordPiece, Strip, ByteFallback, then Fuse | TEXT  | its own, but for byte tokens     |
| none (tokens are joined with spaces)                          | TEXT  | its own                          |
| CTC, BPEDecoder                                               | PAIR  | depends on the token before it   |
| any other chain, decoders written in Python                   | WHOLE | depends on the whole stream      |

ByteLevel and Fuse join the tokens; of the decoders that may come after them, dropping leading characters
(Strip, which concerns the prompt before a stream) and replacing a single character (Replace, not after
ByteLevel) are known. Where a decoder treats the first token of a text in a way of its own, that is the
prompt's.
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
    """How the text of a stream follows from its tokens; see the module's table."""

    BYTES = enum.auto()
    TEXT = enum.auto()
    PAIR = enum.auto()
    WHOLE = enum.auto()


DecoderStage = Callable[[str], str]
"""A decoder that rewrites each token by itself; not the first of a text."""


class DecoderPlan(NamedTuple):
    """A tokenizer's decoder, reduced to what incremental decoding has to know.

    Tokens pass `before`, then runs of byte tokens become characters if `byte_fallback`, then all pass
    `after`.
    """

    mode: DecoderMode
    before: tuple[DecoderStage, ...] = ()
    byte_fallback: bool = False
    after: tuple[DecoderStage, ...] = ()
    stripped: bool = False
    """Whether leading characters of the joined text, the prompt's, are dropped last."""
    context: str = ""
    """PAIR: a complete, ordinary token that stands for the text before a stream."""


_WHOLE = DecoderPlan(DecoderMode.WHOLE)


def read_decoder_plan(decoder: decoders.Decoder | None, tokens: list[str | None]) -> DecoderPlan:
    """The plan for a tokenizer with this decoder and vocabulary; mode WHOLE where no better is known.

    `tokens` holds the vocabulary as the decoder may see it, None for what it never sees.
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
    """`plan` followed by a decoder that still sees single tokens."""
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
    """`plan` followed by a decoder that sees the whole text as a single token."""
    match link:
        case {"type": "Fuse"}:
            return plan
        case {"type": "Strip", "stop": 0} if not plan.stripped:
            return plan._replace(stripped=True)
        case {"type": "Replace", "pattern": {"String": str(old)}} if len(old) == 1 and not plan.stripped:
            # The same before joining, as no token's end can complete a match.
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
        # With a stop, tokenizers panics on a token that it would empty.
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
        # CTC drops a token equal to the one before it: this one is to equal none.
        return DecoderPlan(DecoderMode.PAIR, context="\0before")
    # The suffix turns into a space unless in the last token. At a token's end that only adds to the text;
    # elsewhere it would change text that was sent.
    suffix = link["suffix"]
    if not suffix or any(token and -1 < token.find(suffix) < len(token) - len(suffix) for token in tokens):
        return _WHOLE
    return DecoderPlan(DecoderMode.PAIR, context="x" + suffix)
