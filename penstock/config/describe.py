"""Options and groups of options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, dataclass_transform

from msgspec import Meta

KEY_PATTERN = r"^[!-~]+\Z"
"""Visible ASCII without spaces, which a header carries unchanged. A newline in a key, or after it, would end
the header, or all of them: what follows would be another request."""
Key = Annotated[str, Meta(pattern=KEY_PATTERN)]
ALLOWED_KEY = "visible ASCII without spaces"
HeaderName = Annotated[str, Meta(pattern=r"^[!#-'*+.0-9A-Z^-z|~-]+\Z")]
ALLOWED_HEADER = "a header's name"

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def option_group(cls: type[T]) -> type[T]:
    """Make ``cls`` a group of options: a frozen dataclass, every field of which is described with
    :func:`option`.

    A config is a group that names others as its bases, side by side; one that is written again has another
    default there. ``--help`` and the documentation show the options in the order of the bases.
    """
    return dataclass(frozen=True, kw_only=True)(cls)


def option(description: str, group: str, **meta: Any) -> Meta:
    """The metadata of one option. ``group`` is its heading in ``--help`` and in the documentation.

    ``meta`` takes msgspec bounds (``ge``, ``le``, ``min_length`` …); the keyword ``metavar`` names the
    value in ``--help``; ``allowed`` says in words what a pattern allows; ``secret=True`` keeps the value out
    of logs and banners; ``rest=True`` gives it what follows ``--`` on the command line.
    """
    extra = {"group": group}
    extra |= {
        key: meta.pop(key) for key in ("metavar", "allowed", "secret", "positional", "rest") if key in meta
    }
    return Meta(description=description, extra=extra, **meta)
