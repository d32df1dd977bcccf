"""Finds the token counts in replies with vectors, scores or labels, without reading the numbers.

Such a reply may be of many megabytes. Its counts are among the last fields of its object, or among the first
ones, or it is no JSON and they are in its headers or at its beginning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.gateway.responses.token_usage import ReportedUsage, UsageFields, read_usage

END_BYTES = 4 << 10
"""Bytes at the end of a reply that are searched; the counts and what follows them are a few hundred."""
MAX_FIELD = 2 << 10
"""Bytes of a field with counts."""
MAX_FINDS = 4
"""Occurrences of a field's name that are looked at: an input that is repeated may have it, too."""


class _Usage(UsageFields):
    total_tokens: Any = None


class _Counts(msgspec.Struct):
    input_tokens: Any = None


class _Meta(msgspec.Struct):
    """Cohere's."""

    tokens: _Counts | None = None
    billed_units: _Counts | None = None


class _UsageMetadata(msgspec.Struct):
    """Gemini's."""

    promptTokenCount: Any = None
    totalTokenCount: Any = None


class _Reply(msgspec.Struct):
    usage: _Usage | None = None
    meta: _Meta | None = None
    usageMetadata: _UsageMetadata | None = None
    prompt_eval_count: Any = None
    """Ollama's."""


class _Metadata(msgspec.Struct):
    usage: str


class _SafetensorsHead(msgspec.Struct):
    metadata: _Metadata = msgspec.field(name="__metadata__")


_NAMES = (b'"usage"', b'"meta"', b'"prompt_eval_count"', b'"usageMetadata"')
_TOKENS = b"x-compute-tokens"
"""The header of TEI and Penstock with the tokens of all inputs."""
_METADATA = b"metadata"
"""The header with which vLLM sends the JSON of a reply whose body is the vectors alone."""
_decode = msgspec.json.Decoder(_Reply).decode
_decode_usage = msgspec.json.Decoder(_Usage).decode
_decode_head = msgspec.json.Decoder(_SafetensorsHead).decode
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_first_value = json.JSONDecoder().raw_decode
_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def usage_in_headers(fields: Mapping[bytes, bytes]) -> ReportedUsage | None:
    """The counts in a reply's headers, by name in lower case; None: there are none."""
    value = fields.get(_TOKENS, b"")
    if value.isdigit() and len(value) < 16:
        return _reported(UsageFields(input_tokens=int(value)))
    told = fields.get(_METADATA)
    return None if told is None else _in_end(told[-END_BYTES:])


def usage_in_body(begin: bytes, end: bytes) -> ReportedUsage | None:
    """The counts in a reply: in the last bytes of a JSON object, in the first ones, or in the metadata of a
    safetensors file."""
    if begin[:1] == b"{" or begin[:64].lstrip()[:1] == b"{":
        return _in_end(end) or _in_beginning(begin)
    return _in_safetensors(begin) if begin[8:9] == b"{" else None


def _in_end(end: bytes) -> ReportedUsage | None:
    """The counts in the last bytes of an object. A field of the object itself is one with which the rest
    is an object, too: what is deeper has more brackets behind it."""
    for name in _NAMES:
        at = len(end)
        for _ in range(MAX_FINDS):
            at = end.rfind(name, 0, at)
            if at < 0:
                break
            if (found := _read(b"{" + end[at:])) is not None:
                return found
    return None


def _in_beginning(begin: bytes) -> ReportedUsage | None:
    """The counts in the first bytes of an object. A field of the object itself is one before which nothing is
    open but the object."""
    for name in _NAMES:
        at = begin.find(name)
        if at < 0 or not _is_object(begin[:at] + b'"":0}'):
            continue
        value = begin[at + len(name) : at + MAX_FIELD].lstrip()
        try:
            text = value[1:].lstrip().decode("latin-1")
            _, size = _first_value(text)
        except (ValueError, RecursionError):
            continue
        if (found := _read(b"{%b:%b}" % (name, text[:size].encode("latin-1")))) is not None:
            return found
    return None


def _in_safetensors(begin: bytes) -> ReportedUsage | None:
    try:
        head = _decode_head(begin[8 : 8 + int.from_bytes(begin[:8], "little")])
        return _reported(_decode_usage(head.metadata.usage))
    except _ERRORS:
        return None


def _is_object(data: bytes) -> bool:
    try:
        _object(data)
    except _ERRORS:
        return False
    return True


def _read(data: bytes) -> ReportedUsage | None:
    """The counts of an object, None: it is none, or has none."""
    try:
        reply = _decode(data)
    except _ERRORS:
        return None
    if reply.usage is not None:
        return _reported(reply.usage)
    count = reply.prompt_eval_count
    if (meta := reply.meta) is not None and (counts := meta.tokens or meta.billed_units) is not None:
        count = counts.input_tokens
    elif (gemini := reply.usageMetadata) is not None:
        count = gemini.promptTokenCount or gemini.totalTokenCount
    return _reported(UsageFields(input_tokens=count))


def _reported(usage: UsageFields) -> ReportedUsage | None:
    """What counts: such a reply has no output tokens unless the server says so."""
    found = read_usage(usage)
    if found is None and isinstance(usage, _Usage):
        found = read_usage(UsageFields(input_tokens=usage.total_tokens))
    if found is None or found.output_tokens is not None:
        return found
    return msgspec.structs.replace(found, output_tokens=0)
