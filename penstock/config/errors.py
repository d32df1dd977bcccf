"""The one error of everything a user configures."""

from collections.abc import Iterable


class ConfigError(Exception):
    """A flag, variable, file or value that cannot be used. The message is for the user and names all three:
    where the value stands, the value, and what is allowed. It ends the command with exit code 2."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """``; did you mean X?`` for the valid name that is most like ``name``, or nothing when none is."""
    from difflib import get_close_matches

    matches = get_close_matches(name, list(valid), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""
