"""Names that clients and servers choose, in the length in which they are kept and written."""

from __future__ import annotations

import hashlib

MAX_NAME = 256
"""Characters. A model's name may be a path, or the id of a revision; metrics keep some of them forever."""
_DIGITS = 16


def bounded_name(name: str, most: int = MAX_NAME) -> str:
    """``name``, or if it is long its begin and a hash of it all, so that other names stay others."""
    if len(name) <= most:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"{name[: most - _DIGITS - 1]}~{digest[:_DIGITS]}"
