"""Turns a Lark grammar of a text into one of the same text within a JSON string.

What JSON escapes (quotes, backslashes, control characters) is escaped in the terminals. The result is one
terminal: where a terminal that ends before an escape would be cut depends on what follows, which is known
within a terminal alone. So rules must not be recursive, unless no text has anything to escape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

MAX_GRAMMAR = 64 << 10
"""Maximum characters of a grammar of a tool's input."""
_TOKEN = re.compile(
    r"""
    (?P<skip>\s+|//[^\n]*|\#[^\n]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?!/)(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*)
    |(?P<name>[!?]?[a-zA-Z_]\w*)
    |(?P<directive>%\w+)
    |(?P<number>\d+)
    |(?P<mark>->|\.\.|[:|()\[\]*+?~{},.\-])
    """,
    re.VERBOSE,
)
COMMON = {
    "CNAME": r"/[_a-zA-Z][_a-zA-Z0-9]*/",
    "CR": r"/\r/",
    "DIGIT": r"/[0-9]/",
    "FLOAT": r"/[0-9]+\.[0-9]*(?:[eE][+\-]?[0-9]+)?/",
    "HEXDIGIT": r"/[a-fA-F0-9]/",
    "INT": r"/[0-9]+/",
    "LETTER": r"/[a-zA-Z]/",
    "LF": r"/\n/",
    "NEWLINE": r"/(?:\r?\n)+/",
    "NUMBER": r"/[0-9]+(?:\.[0-9]*)?(?:[eE][+\-]?[0-9]+)?/",
    "SIGNED_INT": r"/[+\-]?[0-9]+/",
    "SIGNED_NUMBER": r"/[+\-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+\-]?[0-9]+)?/",
    "WORD": r"/[a-zA-Z]+/",
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
}
"""Terminals that grammars may import from ``common``."""
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
"""Characters that JSON strings escape by a letter; other control characters are not allowed."""
_PLAIN = r'[^"\\\x00-\x1f]'
_ASCII = "".join(map(chr, range(127)))
_CONTROLS = frozenset(map(chr, range(32)))
_ATOM = re.compile(
    r"\\[pP]\{\w+\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]|.", re.DOTALL
)
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)
_SYNTAX = frozenset("()|*+?^$")
_GROUP = re.compile(r"\(\?(?::|P?<\w+>)")
_COUNT = re.compile(r"\{\d+(?:,\d*)?\}\??")
_ASSERTIONS = frozenset("bBAzZ<>")


class NotEmbeddable(ValueError):
    """The grammar uses what cannot be written within a JSON string."""


class Token(NamedTuple):
    kind: str
    text: str


def in_json_string(grammar: str) -> str:
    """A Lark grammar of the escaped text, without quotes. Raises NotEmbeddable."""
    if len(grammar) > MAX_GRAMMAR:
        raise NotEmbeddable(f"it has {len(grammar)} characters, at most {MAX_GRAMMAR} are allowed")
    rules = _rules(grammar)
    if "start" not in rules:
        raise NotEmbeddable("it has no rule 'start'")
    escaped = {name: [_escaped(token) for token in tokens] for name, tokens in rules.items()}
    if escaped == rules:
        return grammar
    return "\n".join(["start: T_START", *_terminals(escaped)])


def regex_in_json_string(regex: str) -> str:
    """A Lark grammar of the escaped texts that match ``regex``, without quotes. Raises NotEmbeddable."""
    if len(regex) > MAX_GRAMMAR:
        raise NotEmbeddable(f"it has {len(regex)} characters, at most {MAX_GRAMMAR} are allowed")
    whole = _unanchored(regex)
    return f"start: T_START\nT_START: {slashed(_escaped_regex(whole, '') or whole)}"


def _unanchored(regex: str) -> str:
    """The whole text must match in any case."""
    return regex.removeprefix("^").removesuffix("$") if not regex.endswith("\\$") else regex.removeprefix("^")


# -- Lark


def _tokens(grammar: str) -> Iterator[Token]:
    place = 0
    while place < len(grammar):
        found = _TOKEN.match(grammar, place)
        if found is None:
            raise NotEmbeddable(f"{grammar[place : place + 20]!r} is not supported in it")
        place = found.end()
        if found.lastgroup != "skip":
            assert found.lastgroup is not None
            yield Token(found.lastgroup, found[0])


def _rules(grammar: str) -> dict[str, list[Token]]:
    """The right side of each rule and terminal by name."""
    rules: dict[str, list[Token]] = {}
    tokens = list(_tokens(grammar))
    current: list[Token] | None = None
    place = 0
    while place < len(tokens):
        token = tokens[place]
        follows = tokens[place + 1].text if place + 1 < len(tokens) else ""
        if token.text == "%import":
            place = _import(tokens, place + 1, rules)
            current = None
            continue
        if token.kind == "directive":
            raise NotEmbeddable(f"{token.text} is not supported in it")
        if token.kind == "name" and follows == ":":
            current = rules[token.text.lstrip("!?")] = []
            place += 2
        elif (
            token.kind == "name" and follows == "." and tokens[place + 3 : place + 4] == [Token("mark", ":")]
        ):
            current = rules[token.text.lstrip("!?")] = []  # a priority, which does not matter here
            place += 4
        elif current is None:
            raise NotEmbeddable(f"{token.text[:20]!r} is outside of a rule")
        elif token.text == "->":
            place += 2  # an alias
        else:
            current.append(token)
            place += 1
    return rules


def _import(tokens: list[Token], place: int, rules: dict[str, list[Token]]) -> int:
    """Read what follows ``%import``. Returns the place after it."""
    texts = [token.text for token in tokens[place : place + 5]]
    if texts[:1] != ["common"]:
        raise NotEmbeddable("it may import from 'common' alone")
    if texts[1:2] == ["("]:
        end = place + 2
        while end < len(tokens) and tokens[end].text != ")":
            end += 1
        names = [token.text for token in tokens[place + 2 : end] if token.text != ","]
        aliases, end = names, end + 1
    elif texts[3:4] == ["->"]:
        names, aliases, end = texts[2:3], texts[4:5], place + 5
    else:
        names, end = texts[2:3], place + 3
        aliases = names
    for name, alias in zip(names, aliases, strict=False):
        if name not in COMMON:
            raise NotEmbeddable(f"common.{name} is not supported in it")
        rules[alias] = [Token("regex", COMMON[name])]
    return end


def _terminals(rules: dict[str, list[Token]]) -> Iterator[str]:
    """All that ``start`` refers to as terminals."""
    done: set[str] = set()
    open: list[str] = []

    def visit(name: str) -> Iterator[str]:
        if name in open:
            raise NotEmbeddable(
                f"the rule {name!r} refers to itself, and JSON escapes parts of the text; this model writes "
                "inputs of tools as JSON"
            )
        if name in done:
            return
        if name not in rules:
            raise NotEmbeddable(f"it has no rule {name!r}")
        open.append(name)
        for token in rules[name]:
            if token.kind == "name":
                yield from visit(token.text)
        open.pop()
        done.add(name)
        yield f"T_{name.upper()}: {' '.join(_written(token) for token in rules[name])}"

    if len(rules) > 500:
        raise NotEmbeddable(f"it has {len(rules)} rules, at most 500 are allowed")
    yield from visit("start")


def _written(token: Token) -> str:
    if token.kind == "name":
        return f"T_{token.text.upper()}"
    return {"[": "(", "]": ")?"}.get(token.text, token.text)


# -- literals


def _escaped(token: Token) -> Token:
    if token.kind == "string":
        return _escaped_string(token)
    if token.kind == "regex":
        body, _, flags = token.text[1:].rpartition("/")
        escaped = _escaped_regex(body, flags)
        return token if escaped is None else Token("regex", slashed(escaped) + flags.replace("s", ""))
    return token


def _escaped_string(token: Token) -> Token:
    literal = token.text.removesuffix("i")
    try:
        text = json.loads(literal.replace("\\'", "'"))
    except ValueError:
        raise NotEmbeddable(f"the text {literal[:40]} in it has an unknown escape") from None
    escaped = _escaped_text(text)
    if escaped == text:
        return token
    if token.text.endswith("i"):
        raise NotEmbeddable(f"the text {literal[:40]} in it cannot ignore case")
    return Token("string", json.dumps(escaped, ensure_ascii=False))


def _escaped_text(text: str) -> str:
    escaped = []
    for char in text:
        if char < " " and char not in _ESCAPES:
            raise NotEmbeddable(f"the control character {char!r} in it is not supported")
        escaped.append(_ESCAPES.get(char, char))
    return "".join(escaped)


def slashed(regex: str) -> str:
    """A regular expression, some of whose slashes may be escaped, as a terminal."""
    return f"/{_SLASH.sub(lambda found: found[1] or chr(92) + '/', regex)}/"


# -- regular expressions


def _escaped_regex(regex: str, flags: str) -> str | None:
    """``regex`` for escaped text; None if it matches nothing that JSON escapes."""
    if set(flags) - set("su"):
        if _escaped_regex(regex, "s") is None:
            return None
        raise NotEmbeddable(f"the flags {flags!r} of /{regex[:40]}/ are not supported in it")
    written = []
    place = 0
    while place < len(regex):
        group = _GROUP.match(regex, place)
        count = _COUNT.match(regex, place)
        if group or count:
            found = group or count
            assert found is not None
            written.append(found[0])
            place = found.end()
            continue
        atom = _ATOM.match(regex, place)
        assert atom is not None  # any character is one
        if atom[0] in ("^", "$") or regex.startswith("(?", place):
            raise NotEmbeddable(
                f"/{regex[:40]}/ in it has an anchor, look-around or flags, which is not supported"
            )
        written.append(atom[0] if atom[0] in _SYNTAX else _escaped_atom(atom[0], dot_all="s" in flags))
        place = atom.end()
    escaped = "".join(written)
    return None if escaped == regex else escaped


def _escaped_atom(atom: str, *, dot_all: bool) -> str:
    """What matches one character, for its escaped form."""
    if atom in _PLAIN_ATOMS or atom.startswith("\\p"):
        return atom
    if atom.startswith("\\P") or (atom[0] == "\\" and atom[1:] in _ASSERTIONS):
        raise NotEmbeddable(f"{atom} is not supported in it")
    if atom[0] == "[" and ("[" in atom[1:] or any(each in atom for each in ("&&", "--", "~~"))):
        raise NotEmbeddable(f"the nested class {atom[:40]} is not supported in it")
    try:
        matched = frozenset(re.findall(atom, _ASCII, re.DOTALL if dot_all else 0))
    except re.error:
        raise NotEmbeddable(f"{atom[:40]!r} is not supported in it") from None
    escapes = [re.escape(escape) for char, escape in _ESCAPES.items() if char in matched]
    if not escapes:
        if _CONTROLS.isdisjoint(matched):
            return atom
        if matched <= _CONTROLS:
            raise NotEmbeddable(f"the control characters of {atom[:40]} are not supported in it")
    elif len(matched) == 1 and atom[0] != "[":
        return escapes[0]
    plain = _PLAIN if atom == "." else f"[{atom}&&{_PLAIN}]"
    return f"(?:{'|'.join([plain, *escapes])})"


_PLAIN_ATOMS = frozenset((r"\d", r"\w"))
