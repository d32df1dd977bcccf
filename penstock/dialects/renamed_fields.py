"""Errors of requests that become chat completions, with the names that fields have in their own API."""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.http.errors import ApiError


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """``error`` with its field called as the client has it. ``names``: by those of chat completions."""
    for theirs, own in names.items():
        param = error.param or ""
        if param == theirs or param.startswith((f"{theirs}.", f"{theirs}[")):
            name = rf"(?<!\w){re.escape(theirs)}(?!\w)"  # not within a word
            return ApiError(
                error.status,
                re.sub(name, own, error.message),
                type=error.type,
                param=own + param[len(theirs) :],
                code=error.code,
                headers=error.headers,
            )
    return error
