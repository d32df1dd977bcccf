"""Fields in errors: by the names that they have in an API, and in the message where it has no other place."""

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


def with_field(error: ApiError) -> str:
    """The message, with the field at fault, of an API whose errors have no place for it."""
    name = (error.param or "").rpartition(".")[2].partition("[")[0]  # schema of tools[0].schema[1]
    return error.message if name in error.message else f"{error.param}: {error.message}"
