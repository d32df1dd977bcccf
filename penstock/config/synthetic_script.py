"""Reads the file of ``--synthetic-script``: rules by which the synthetic engine answers prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import yaml

from penstock.config.errors import ConfigError
from penstock.config.script_rules import (
    MAX_SCRIPT_BYTES,
    Call,
    Pace,
    PromptMatch,
    Reply,
    Script,
    ScriptPart,
    ScriptRule,
)

_KINDS: dict[str, type[ScriptPart]] = {
    "": Script,
    "rules": ScriptRule,
    "match": PromptMatch,
    "reply": Reply,
    "calls": Call,
    "pace": Pace,
}
"""Parts by the key that holds them."""
_ALLOWED = {
    "rules": "a list of at least one rule",
    "match": "a mapping of conditions",
    "last": "user or tool",
    "text": "a text; in match also a list of texts, none of them empty",
    "regex": "a regular expression",
    "tool": "the name of a tool",
    "turn": "an integer of at least 1",
    "prompt": "a regular expression",
    "times": "an integer of at least 1",
    "reply": "a mapping with text, reasoning and calls, or output",
    "reasoning": "a text",
    "output": "a text",
    "calls": "a list of calls, each with a name and arguments",
    "name": "the name of a tool",
    "arguments": "a mapping or a text",
    "pace": "a mapping",
    "first-token-ms": "a number from 0 to 3600000",
    "token-ms": "a number from 0 to 3600000",
    "tokens-per-step": "an integer from 1 to 1024",
    "end": "stop, length, error, stall, exit or hang",
    "after-tokens": "an integer of at least 1",
    "end-times": "an integer of at least 1",
}
"""Values of the keys, in words."""


_KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


class _Loader(yaml.SafeLoader):
    """Dates stay texts, for arguments become JSON."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the base class declares it so
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """JSON writes some characters as pairs of escapes, of which YAML makes two halves."""
        value = super().construct_scalar(node)
        if not isinstance(value, str) or value.isascii():
            return value
        try:
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            half = "half of a surrogate pair, which is no character"
            raise yaml.constructor.ConstructorError(None, None, half, node.start_mark) from None


def read_script(path: str) -> Script:
    """The script in a YAML or JSON file. Raises ConfigError with the file, the line and the field."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--synthetic-script {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--synthetic-script {path}: the file is not UTF-8 (byte {error.start})") from None
    if len(text.encode()) > MAX_SCRIPT_BYTES:
        raise ConfigError(f"--synthetic-script {path}: the file is longer than {MAX_SCRIPT_BYTES} bytes")
    return parse_script(text, path)


def parse_script(text: str, path: str) -> Script:
    """:func:`read_script` for the text of a file; ``path`` is its name in errors."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        _check_keys(path, root)
        content = None if root is None else loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            f"{path}:{mark.line + 1 if mark else 1}: not valid YAML: {error.problem or 'malformed'}"
        ) from None
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"{path}: not valid YAML") from None
    except RecursionError:
        raise ConfigError(f"{path}: the file is nested too deeply") from None
    finally:
        loader.dispose()
    if root is None:
        raise ConfigError(f"{path}:1: the file is empty; a script is a mapping with the key rules")
    try:
        script = msgspec.convert(content, Script)
    except msgspec.ValidationError as error:
        raise _misfit(path, root, str(error)) from None
    whole = None
    for number, rule in enumerate(script.rules):
        _check_rule(path, root, number, rule)
        if whole is not None:
            place = _place(path, root, ["rules", number])
            raise ConfigError(
                f"{place} never answers: rules[{whole}] takes every prompt without a limit of times"
            )
        if rule.match == PromptMatch() and rule.times is None:
            whole = number
    return script


def _check_rule(path: str, root: yaml.Node, number: int, rule: ScriptRule) -> None:
    """Raises ConfigError for what a type cannot say."""
    reply, where = rule.reply, ["rules", number]
    for name in ("regex", "prompt"):
        pattern = getattr(rule.match, name)
        try:
            re.compile(pattern or "")
        except re.error as error:
            place = _place(path, root, [*where, "match", name])
            raise ConfigError(f"{place} is {pattern!r}, not a regular expression: {error}") from None
    if rule.match.tool is not None and rule.match.last == "user":
        place = _place(path, root, [*where, "match", "tool"])
        raise ConfigError(f"{place} is for turns with results of tools, but match.last is user")
    if reply.output is not None and (reply.text or reply.reasoning or reply.calls):
        place = _place(path, root, [*where, "reply", "output"])
        raise ConfigError(f"{place} excludes text, reasoning and calls: it is all that the model writes")
    if rule.end_times is not None and rule.end == "stop":
        place = _place(path, root, [*where, "end-times"])
        raise ConfigError(f"{place} needs an end other than stop")
    for place_of_call, call in enumerate(reply.calls):
        try:
            json.dumps(call.arguments, allow_nan=False)
        except (TypeError, ValueError):
            place = _place(path, root, [*where, "reply", "calls", place_of_call, "arguments"])
            raise ConfigError(f"{place} cannot be written as JSON: numbers are finite") from None


def _check_keys(path: str, root: yaml.Node | None, keys: tuple[Any, ...] = ()) -> None:
    """Raises ConfigError for a key that is no text, and for one that a mapping has twice: YAML's last one
    would win."""
    if isinstance(root, yaml.SequenceNode):
        for number, node in enumerate(root.value):
            _check_keys(path, node, (*keys, number))
    elif isinstance(root, yaml.MappingNode):
        lines: dict[str, int] = {}
        for name, node in root.value:
            if not isinstance(name, yaml.ScalarNode):
                continue
            line = name.start_mark.line + 1
            if name.tag not in _KEY_TAGS:
                place = _field(list(keys)) or "the file"
                raise ConfigError(
                    f"{path}:{line}: {place}: the key {name.value} is no text in YAML, write it in quotes"
                )
            if name.value in lines:
                field = _field([*keys, name.value])
                raise ConfigError(f"{path}:{line}: {field} is given twice, first in line {lines[name.value]}")
            lines[name.value] = line
            _check_keys(path, node, (*keys, name.value))


def _misfit(path: str, root: yaml.Node, message: str) -> ConfigError:
    """The error for a value that msgspec refuses, with what is allowed in its place."""
    problem, _, at = message.partition(" - at `$")
    keys = [
        int(index) if index else key
        for key, index in re.findall(r"\.?([^.\[\]`]+)(?=[.\[`])|\[(\d+)\]", at.removesuffix("`") + "`")
    ]
    names = [key for key in keys if isinstance(key, str)]
    kind = _KINDS.get(names[-1] if names else "", Script)
    fields = ", ".join(kind.__struct_encode_fields__)
    unknown = re.search(r"unknown field `(.*)`", problem)
    if unknown:
        place = _place(path, root, [*keys, unknown[1]])
        return ConfigError(f"{place}: no such key; {_allowed_in(names)} takes {fields}")
    missing = re.search(r"missing required field `(.*)`", problem)
    if missing:
        return ConfigError(f"{_place(path, root, keys)}: the key {missing[1]} is missing")
    allowed = _ALLOWED[names[-1]] if names else "a mapping with the key rules"
    return ConfigError(f"{_place(path, root, keys)} is {_shown(_node(root, keys))}, it takes {allowed}")


def _shown(node: yaml.Node) -> str:
    """A value in an error. Quotes stand around texts only, for a number may have to be one."""
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list" if node.value else "an empty list"
    match node.tag.rpartition(":")[2]:
        case "null":
            return "empty"
        case "bool":
            return f"the truth value {node.value}"
        case "int" | "float":
            return f"the number {node.value[:60]}"
    return repr(node.value[:60])


def _allowed_in(names: list[str]) -> str:
    """The part of a script at a path, in words."""
    if not names:
        return "a script"
    return {"rules": "a rule", "calls": "a call"}.get(names[-1], names[-1])


def _place(path: str, root: yaml.Node, keys: list[Any]) -> str:
    """``FILE:LINE: rules[0].match.turn``."""
    return f"{path}:{_node(root, keys).start_mark.line + 1}: {_field(keys) or 'the file'}"


def _field(keys: list[Any]) -> str:
    """``rules[0].match.turn``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")


def _node(node: yaml.Node, keys: list[Any]) -> yaml.Node:
    """The node at a path, or the last one on the way that exists."""
    for key in keys:
        if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
        elif isinstance(node, yaml.MappingNode):
            node = next((value for name, value in node.value if name.value == key), node)
    return node
