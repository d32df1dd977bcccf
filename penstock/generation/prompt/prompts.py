"""Checks prompts in the four forms that a field may have, and prompt truncation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np

from penstock.generation.request.schemas import GenerateRequest
from penstock.generation.request.validation import MAX_STREAMS, check_streams
from penstock.http.errors import MALFORMED, ApiError, refused, shown

_IDS_AND_COMMAS = b"0123456789, \t\r\n"
"""The bytes of a JSON list of token ids, without its brackets."""
_MAX_ID = (1 << 31) - 1

_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


def token_columns(value: bytes, *, flat: bool = False) -> list[bytes] | None:
    """The token ids in ``value``, valid JSON of a list of ids or (unless ``flat``) of a list of such lists:
    int32 little-endian per list. None for all other values, for empty lists and for ids that are not below
    2**31.

    2,000 ids take 40 us, a quarter of what they take as Python's ints (measured).
    """
    if not value.startswith(b"["):
        return None
    lists = [value] if flat or value.find(b"[", 1) < 0 else list(map(bytes, _decode_items(value)))
    if len(lists) > MAX_STREAMS:
        return None
    columns = [column for column in map(_token_column, lists) if column]
    return columns if len(columns) == len(lists) else None


def _token_column(value: bytes) -> bytes:
    """One list of token ids as a column of int32; empty for anything else."""
    ids = value[1:-1]
    if not value.startswith(b"[") or ids.translate(None, _IDS_AND_COMMAS) or not ids.strip():
        return b""
    column = np.fromstring(ids, np.int64, sep=",")  # digits beyond an int64 become the greatest one
    return b"" if column.max() > _MAX_ID else column.astype("<i4").tobytes()


def parse_prompts(
    prompt: str | list[str | int | list[int]] | list[int] | list[bytes] | None,
    vocab_size: int,
    field: str = "prompt",
) -> Sequence[str | bytes]:
    """The prompts, at least one: texts, or token ids as int32 little-endian. Lists of ids may be columns
    (:func:`token_columns`). ``field``: the request's name of them. Raises ApiError."""
    if not prompt:
        if prompt == []:
            raise ApiError(400, "You must pass at least one prompt", param=field)
        raise refused(f"{field} must be provided and non-empty.", field)
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt[0], int):
        check_streams(len(prompt), 1, field)
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise ApiError(
            400,
            f"{field}: a list must hold texts, or token ids, or lists of token ids, not a mix of them.",
            type=MALFORMED,
            param=f"body.{field}.0",
        )
    kind = kinds.pop()
    if kind is str:
        return cast(list[str], prompt)
    if kind is bytes:
        columns = cast(list[bytes], prompt)
        for column in columns:
            check_vocabulary(field, int(np.frombuffer(column, "<i4").max()), vocab_size)
        return columns
    lists = cast(list[list[int]], [prompt] if kind is int else prompt)
    for number, ids in enumerate(lists):
        if not ids:
            raise ApiError(400, f"{field}[{number}] is an empty list of token ids.", param=field)
        check_vocabulary(field, max(ids), vocab_size)
    return [np.array(ids, "<i4").tobytes() for ids in lists]


def check_vocabulary(field: str, token: int, vocab_size: int) -> None:
    """Raises ApiError for a token id outside the vocabulary."""
    if token >= vocab_size:
        raise ApiError(400, f"Token id {shown(token)} is out of vocabulary", param=field)


def truncation(
    request: GenerateRequest, max_model_len: int, max_tokens: int | None, max_total: int
) -> tuple[int | None, bool]:
    """Maximum prompt tokens to keep (None: all), and whether to drop tokens at the start. ``max_total``: how
    many tokens prompt and output may have with -1. Raises ApiError."""
    side = request.truncation_side
    if side not in (None, "left", "right"):
        raise ApiError(
            400, f"truncation_side must be left or right, got {side[:60]!r}.", param="truncation_side"
        )
    most = request.truncate_prompt_tokens
    if most == -1:  # as many as leave room for max_tokens
        most = max(1, max_total - (max_tokens or 1))
    if most is not None and not 1 <= most <= max_model_len:
        raise refused(
            f"truncate_prompt_tokens must be -1 or in [1, {max_model_len}], got {shown(most)}.",
            "truncate_prompt_tokens",
            most,
        )
    return most, side != "right"
