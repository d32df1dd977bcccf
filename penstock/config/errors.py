"""The error for every mistake in the configuration."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigError(Exception):
    """An invalid flag, variable, file or value. The message is for the user: where the value was set, the
    value, and what is allowed. It ends the command with exit code 2."""


def did_you_mean(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """``; did you mean X?`` for the valid name closest to ``name``; empty when none is close.

    ``prefix``, with which every valid name begins, is not compared.
    """
    from difflib import get_close_matches

    ends = [one.removeprefix(prefix) for one in valid]
    matches = get_close_matches(name.removeprefix(prefix), ends, n=1)
    return f"; did you mean {prefix}{matches[0]}?" if matches else ""
