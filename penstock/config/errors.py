"""The one error of everything a user configures."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigError(Exception):
    """A flag, variable, file or value that cannot be used. The message is for the user and names all three:
    where the value stands, the value, and what is allowed. It ends the command with exit code 2."""


def did_you_mean(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """``; did you mean X?`` for the valid name that is most like ``name``, or nothing when none is.

    ``prefix`` begins every valid name and does not count as likeness.
    """
    from difflib import get_close_matches

    ends = [one.removeprefix(prefix) for one in valid]
    matches = get_close_matches(name.removeprefix(prefix), ends, n=1)
    return f"; did you mean {prefix}{matches[0]}?" if matches else ""
