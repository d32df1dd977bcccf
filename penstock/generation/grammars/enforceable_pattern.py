"""Writes patterns of JSON schemas as regular expressions that llguidance takes and that match the same texts.

llguidance has no assertions but ``^`` and ``$`` at the ends. Word boundaries are replaced by what may stand
on their two sides; look-ahead at the start becomes a pattern of its own, that the same text must match.
"""

from __future__ import annotations

from penstock.generation.grammars.negative_look import without
from penstock.generation.grammars.pattern_syntax import (
    ANYTHING,
    WORD,
    Char,
    Edge,
    Group,
    RepeatedPart,
    Sequence,
    Unenforceable,
    parsed,
)

MAX_ALTERNATIVES = 64
"""Maximum alternatives that replace the word boundaries of one pattern."""
MAX_PATTERN = 16 << 10
"""Maximum characters of a pattern that is rewritten."""
_ANY = RepeatedPart(Char(ANYTHING, None), 0, None)
_START, _END = "^", "$"
_CASELESS = "(?i)"
"""A flag that ECMAScript does not have, but pydantic's patterns have it."""


def enforceable(pattern: str) -> list[str]:
    """Regular expressions of Rust that a text must all match, searching, to match ``pattern``. Raises
    Unenforceable."""
    if len(pattern) > MAX_PATTERN:
        raise Unenforceable(f"it has {len(pattern)} characters, at most {MAX_PATTERN} are rewritten")
    flag = _CASELESS if pattern.startswith(_CASELESS) else ""
    alternatives = parsed(pattern.removeprefix(flag))
    heads: list[str] = []
    if len(alternatives) == 1:
        heads, rest = _without_look(alternatives[0])
        alternatives = [rest]
    return [flag + each for each in (*heads, _written(alternatives))]


def _without_look(sequence: Sequence) -> tuple[list[str], Sequence]:
    """Patterns for the look-aheads at the start, and the sequence without look-around at its ends."""
    start = 1 if sequence and _is_edge(sequence[0], _START) else 0
    heads: list[str] = []
    rest = sequence[start:]
    while start and rest and _look(rest[0]) in ("=", "!"):
        group = rest.pop(0).part
        assert isinstance(group, Group)
        if group.look == "=":
            heads.append(_written([[sequence[0], RepeatedPart(Group(group.alternatives))]]))
        else:
            heads += without(group)
    # What a search looks at beyond its own ends may as well belong to it.
    if not start and rest and _look(rest[0]) == "<=":
        rest[0] = _taken(rest[0])
    if rest and _look(rest[-1]) == "=":
        rest[-1] = _taken(rest[-1])
    return heads, sequence[:start] + rest


def _written(alternatives: list[Sequence]) -> str:
    if not any(map(_has_boundary, alternatives)):
        return "|".join(map(_text, alternatives))
    whole = []
    for alternative in alternatives:
        for sequence in _distributed(alternative):
            whole += _bounded(_anchored(sequence))
            if len(whole) > MAX_ALTERNATIVES:
                raise Unenforceable("its word boundaries have too many alternatives")
    if not whole:
        raise Unenforceable("a word boundary that no text has")
    return f"^(?:{'|'.join(map(_text, whole))})$"


# -- word boundaries


def _anchored(sequence: Sequence) -> Sequence:
    """A sequence that matches the whole text, without ``^`` and ``$`` at the ends."""
    start, end = bool(sequence) and _is_edge(sequence[0], _START), False
    sequence = sequence[1:] if start else [_ANY, *sequence]
    end = bool(sequence) and _is_edge(sequence[-1], _END)
    return sequence[:-1] if end else [*sequence, _ANY]


def _distributed(sequence: Sequence) -> list[Sequence]:
    """The sequence without groups that have boundaries: one for each of their alternatives."""
    found: list[Sequence] = [[]]
    for item in sequence:
        options: list[Sequence] = [[item]]
        if isinstance(item.part, Group) and any(map(_has_boundary, item.part.alternatives)):
            if item[1:] != (1, 1) or item.part.look:
                raise Unenforceable(f"the word boundary within the group at character {item.part.at}")
            options = [each for option in item.part.alternatives for each in _distributed(option)]
        found = [[*before, *option] for before in found for option in options]
        if len(found) > MAX_ALTERNATIVES:
            raise Unenforceable("its word boundaries have too many alternatives")
    return found


def _bounded(sequence: Sequence) -> list[Sequence]:
    """Sequences for a match of the whole text that together match the same, without boundaries."""
    place = max((at for at, item in enumerate(sequence) if _is_edge(item, "b", "B")), default=None)
    if place is None:
        return [sequence]
    left, right = sequence[:place], _mirrored(sequence[place + 1 :])
    same = _is_edge(sequence[place], "B")
    found = []
    for word in (True, False):
        for end in _ending(right, word):
            for start in _ending(left, word if same else not word):
                found += _bounded([*start, *_mirrored(end)])
    return found


def _ending(sequence: Sequence, word: bool) -> list[Sequence]:
    """Sequences for the texts of ``sequence`` whose last character is a word's, or is not. None is none."""
    found, empty = _endings(sequence, word)
    return [*found, []] if empty and not word else found


def _endings(sequence: Sequence, word: bool) -> tuple[list[Sequence], bool]:
    """The sequence without the empty text, and whether that is possible."""
    found: list[Sequence] = []
    for place in reversed(range(len(sequence))):
        item, before = sequence[place], sequence[:place]
        part, least, most = item
        empty = least == 0
        if isinstance(part, Edge) or (isinstance(part, Group) and part.look):
            raise Unenforceable(f"the assertion at character {part.at} beside a word boundary")
        if least > 1 or most != 1:
            before = [
                *before,
                RepeatedPart(part, max(0, least - 1), None if most is None else max(0, most - 1)),
            ]
        if isinstance(part, Char):
            last = _only(part, word)
            if last is not None:
                found.append([*before, RepeatedPart(last)])
        else:
            for option in part.alternatives:
                ends, may_be_empty = _endings(option, word)
                found += [[*before, *end] for end in ends]
                empty = empty or may_be_empty
        if not empty:
            return found, False
    return found, True


def _only(char: Char, word: bool) -> Char | None:
    """``char`` if it is a word's, or is not; None if it cannot be."""
    if char.word is None:
        return Char(f"[{char.text}&&[{'' if word else '^'}{WORD}]]", word)
    return char if char.word == word else None


def _mirrored(sequence: Sequence) -> Sequence:
    found = []
    for item in reversed(sequence):
        part = item.part
        if isinstance(part, Group):
            part = part._replace(alternatives=[_mirrored(each) for each in part.alternatives])
        found.append(item._replace(part=part))
    return found


# -- text


def _text(sequence: Sequence) -> str:
    return "".join(map(_item_text, sequence))


def _item_text(item: RepeatedPart) -> str:
    part, least, most = item
    if isinstance(part, Edge):
        if part.kind in "bB":
            raise Unenforceable(f"the word boundary at character {part.at}")
        return part.kind
    if isinstance(part, Group):
        if part.look:
            raise Unenforceable(f"the look-around at character {part.at}")
        text = f"(?:{'|'.join(map(_text, part.alternatives))})"
    else:
        text = part.text
    if (least, most) == (1, 1):
        return text
    if most is None:
        return text + ("*" if least == 0 else "+" if least == 1 else f"{{{least},}}")
    return text + ("?" if (least, most) == (0, 1) else f"{{{least},{most}}}")


def _has_boundary(sequence: Sequence) -> bool:
    return any(
        _is_edge(item, "b", "B")
        or (isinstance(item.part, Group) and any(map(_has_boundary, item.part.alternatives)))
        for item in sequence
    )


def _is_edge(item: RepeatedPart, *kinds: str) -> bool:
    return isinstance(item.part, Edge) and item.part.kind in kinds


def _taken(item: RepeatedPart) -> RepeatedPart:
    """The group of a look-around as one that takes what it looks at."""
    assert isinstance(item.part, Group)
    return RepeatedPart(Group(item.part.alternatives))


def _look(item: RepeatedPart) -> str:
    return item.part.look if isinstance(item.part, Group) else ""
