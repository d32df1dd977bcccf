"""What may be written about an error that a model server sent.

Its message may quote the prompt or the output, so it stands in no log, span or metric; type and code do, if
they look like such names.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

_is_name = re.compile(r"[\w.:-]{1,64}", re.ASCII).fullmatch


class _Error(msgspec.Struct):
    type: Any = None
    code: Any = None
    error_type: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Error).decode


def error_kind(raw: bytes) -> str:
    """Type and code of the error in ``raw``, JSON of any shape; empty: it has none."""
    try:
        error = _decode(raw)
        if isinstance(error.error, dict):  # an event with the error in it
            error = msgspec.convert(error.error, _Error)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    names = (error.type, error.code, error.error_type)
    texts = [str(name) for name in names if isinstance(name, (str, int)) and not isinstance(name, bool)]
    return " ".join(dict.fromkeys(text for text in texts if _is_name(text) and text != "error"))
