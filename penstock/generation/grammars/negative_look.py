"""Negative look-ahead at the start of a pattern as patterns that a text must match instead.

Regular expressions have no complement. What schemas mostly exclude has a simple one: a given beginning, a
given text, texts of certain characters alone, and one or two characters anywhere.
"""

from __future__ import annotations

from penstock.generation.grammars.pattern_syntax import (
    ANYTHING,
    Char,
    Edge,
    Group,
    RepeatedPart,
    Sequence,
    Unenforceable,
)

MAX_ALTERNATIVES = 256
"""Maximum texts that one look-ahead excludes."""


def without(group: Group) -> list[str]:
    """Regular expressions that a text must all match for ``group`` not to match at its start. Raises
    Unenforceable."""
    found: list[Sequence] = []
    for alternative in group.alternatives:
        found += _flat(alternative, group.at)
        if len(found) > MAX_ALTERNATIVES:
            raise _unknown(group.at)
    return [_without(each, group.at) for each in found]


def _unknown(at: int) -> Unenforceable:
    return Unenforceable(f"the negative look-ahead at character {at}")


def _flat(sequence: Sequence, at: int) -> list[Sequence]:
    """The sequence without groups: one for each of their alternatives."""
    found: list[Sequence] = [[]]
    for item in sequence:
        options: list[Sequence] = [[item]]
        if isinstance(item.part, Group):
            if item[1:] != (1, 1) or item.part.look:
                raise _unknown(at)
            options = [each for option in item.part.alternatives for each in _flat(option, at)]
        found = [[*before, *option] for before in found for option in options]
        if len(found) > MAX_ALTERNATIVES:
            raise _unknown(at)
    return found


def _without(sequence: Sequence, at: int) -> str:
    rest = list(sequence)
    if rest and _is_edge(rest[0], "^"):
        del rest[0]
    whole = bool(rest) and _is_edge(rest[-1], "$")
    if whole:
        del rest[-1]
    anywhere = (
        bool(rest) and rest[0].part == Char(r"[^\n\r\x{2028}\x{2029}]", None) and rest[0][1:] == (0, None)
    )
    if anywhere:
        del rest[0]
    chars = [item.part for item in rest if isinstance(item.part, Char)]
    if len(chars) < len(rest):
        raise _unknown(at)
    if whole and not anywhere and len(rest) == 1 and rest[0].most is None and rest[0].least <= 1:
        other = _other(chars[0])
        return other if rest[0].least == 0 else f"^$|{other}"
    if any(item[1:] != (1, 1) for item in rest) or (anywhere and whole) or not (chars or whole):
        raise _unknown(at)
    return _nowhere(chars, at) if anywhere else f"^{_not_at_start(chars, whole=whole)}"


def _not_at_start(chars: list[Char], *, whole: bool) -> str:
    if not chars:
        return ANYTHING
    first, *others = chars
    further = f"|{first.text}{_not_at_start(others, whole=whole)}" if others or whole else ""
    return f"(?:$|{_other(first)}{further})"


def _nowhere(chars: list[Char], at: int) -> str:
    """Texts without the one or two characters, in any of their lines."""
    if not 1 <= len(chars) <= 2:
        raise _unknown(at)
    first, *others = chars
    if not others:
        return f"^{_other(first)}*$"
    if first == others[0]:
        return f"^(?:{_other(first)}|{first.text}{_other(first)})*{first.text}?$"
    if not _are_apart(first, others[0]):
        raise _unknown(at)
    neither = f"[^{first.text}{others[0].text}]"
    return f"^(?:{_other(first)}|{first.text}+{neither})*{first.text}*$"


def _are_apart(first: Char, second: Char) -> bool:
    """Whether both are single characters, and not the same."""
    return not first.text.startswith("[") and not second.text.startswith("[") and first.text != second.text


def _other(char: Char) -> str:
    return f"[^{char.text}]"


def _is_edge(item: RepeatedPart, kind: str) -> bool:
    return isinstance(item.part, Edge) and item.part.kind == kind
