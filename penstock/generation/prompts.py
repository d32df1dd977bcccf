"""Checks the field ``prompt`` in its four forms, and prompt truncation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from penstock.generation.request_schemas import GenerateRequest
from penstock.generation.request_validation import check_streams
from penstock.http.errors import MALFORMED, ApiError, refused, shown


def parse_prompts(
    prompt: str | list[str | int | list[int]] | None, vocab_size: int
) -> Sequence[str | list[int]]:
    """The prompts as texts or lists of token ids, at least one. Raises ApiError."""
    if not prompt:
        if prompt == []:
            raise ApiError(400, "You must pass at least one prompt", param="prompt")
        raise refused("prompt must be provided and non-empty.", "prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt[0], int):
        check_streams(len(prompt), 1)
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise ApiError(
            400,
            "prompt: a list must hold texts, or token ids, or lists of token ids, not a mix of them.",
            type=MALFORMED,
            param="body.prompt.0",
        )
    kind = kinds.pop()
    if kind is str:
        return cast(list[str], prompt)
    prompts = cast(list[list[int]], [prompt] if kind is int else prompt)
    for number, ids in enumerate(prompts):
        if not ids:
            raise ApiError(400, f"prompt[{number}] is an empty list of token ids.", param="prompt")
        check_vocabulary("prompt", max(ids), vocab_size)
    return prompts


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
