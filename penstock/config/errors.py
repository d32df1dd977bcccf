"""The error for every mistake in the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from penstock.config.hidden import hide_credentials


class ConfigError(Exception):
    """An invalid flag, variable, file or value. The message is for the user: where the value was set, the
    value, and what is allowed; credentials of URLs are hidden. It ends the command with exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(hide_credentials(message))


class NeedsVllm(ConfigError):
    """Only vLLM's engine does what is asked for, with the arguments ``behind`` the ``--`` of its command
    line; the command adds the line."""

    def __init__(self, message: str, behind: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.behind = behind


class Problems:
    """What is wrong with several things, so that all of it is told at once, a line each."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Take a ConfigError or ValueError of the block for a problem, and go on after it."""
        try:
            yield
        except (ConfigError, ValueError) as error:
            self.found += str(error).splitlines()

    def raise_all(self, kind: type[Exception] = ConfigError) -> None:
        """Raise an error of this kind if there are problems."""
        if self.found:
            raise kind("\n".join(self.found))


def one_line(error: BaseException) -> str:
    """The text of an error, or its type where it has none, without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def did_you_mean(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """``; did you mean X?`` for the valid name that ``name`` is a misspelling of; empty when there is none.

    ``prefix``, with which every valid name begins, is not compared.
    """
    near = nearest(name.removeprefix(prefix), (one.removeprefix(prefix) for one in valid))
    return "" if near is None else f"; did you mean {prefix}{near}?"


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The name that differs in a character, or in one of six; else one that ``name`` begins, or has in common
    all but a "no-"."""
    word = _plain(name)
    names = {_plain(one): one for one in valid}
    if len(word) < 3:
        return names.get(word)
    near = {one: _distance(word, plain) for plain, one in names.items()}
    best = min(near, key=near.__getitem__, default=None)
    if best is not None and near[best] <= max(1, len(word) // 6):
        return best
    begun = [one for plain, one in names.items() if plain.startswith(word)]
    return min(begun, key=len, default=None) or names.get(word.removeprefix("no-"))


def _plain(name: str) -> str:
    return name.lstrip("-").lower().replace("_", "-")


def _distance(one: str, other: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours that turn one text into the other."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, mine in enumerate(one):
        row = [i + 1]
        for j, theirs in enumerate(other):
            cost = min(last[j] + (mine != theirs), last[j + 1] + 1, row[j] + 1)
            if i and j and mine == other[j - 1] and one[i - 1] == theirs:
                cost = min(cost, before[j - 1] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]
