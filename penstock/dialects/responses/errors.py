"""Errors as clients of the API expect them."""

from __future__ import annotations

from penstock.http.errors import ApiError

TOO_LONG = "context_length_exceeded"
"""How clients recognize that they must shorten the conversation."""


def error_body(error: ApiError) -> bytes:
    """The body of an error reply."""
    if error.param == "input_tokens":  # the prompt is longer than the context
        error = ApiError(error.status, error.message, param="input", code=TOO_LONG)
    return error.body()
