"""The option file: a YAML mapping from option names to values.

Scalars stay text, so that ``revision: 0123`` or ``max-model-len: 32k`` mean the same as on the command line.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import yaml

from penstock.config.errors import ConfigError
from penstock.config.watched_file import TextFiles

NULL = "tag:yaml.org,2002:null"
MAX_DEPTH = 100
"""Collections within collections; no file needs more than ten."""


class YamlEntry(msgspec.Struct, frozen=True):
    """One key of the file; ``value`` is text, a list of texts, or None for null.

    No option takes anything else; if the file has something else, ``value`` is its JSON text and
    ``misfit_line`` its line.
    """

    key: str
    line: int
    value: str | list[str] | None
    misfit_line: int | None = None


class DuplicateKeyError(yaml.MarkedYAMLError):
    """A mapping has a key twice."""


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's loader; libyaml's, which is much faster, where PyYAML has it."""


class _UniqueKeyLoader(_SafeLoader):  # type: ignore[misc]
    """Reads plain YAML values; a mapping with a duplicate key is an error, too."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._seen: set[yaml.MappingNode] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Called before a mapping is constructed, and when it is merged into another one by ``<<``, which may
        have the same keys. Raises DuplicateKeyError."""
        if node not in self._seen:
            self._seen.add(node)
            lines: dict[str, int] = {}
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                if key.value in lines:
                    problem = f"the key {key.value!r} is given twice, first in line {lines[key.value]}"
                    raise DuplicateKeyError(problem=problem, problem_mark=key.start_mark)
                lines[key.value] = _line(key)
        super().flatten_mapping(node)


def load(text: str) -> Any:
    """The values of a YAML document. Raises ValueError with the line; the text repeats no value."""
    try:
        _check_depth(text)
        return yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError as error:
        line, problem = _problem(error)
        kind = "" if isinstance(error, DuplicateKeyError) else "not valid YAML: "
        raise ValueError(f"{f'line {line}: ' if line else ''}{kind}{problem}") from None
    except ValueError:
        raise ValueError("not valid YAML: a date or a number is none") from None
    except RecursionError:
        raise ValueError("the file is nested too deeply") from None


def _check_depth(text: str) -> None:
    """libyaml builds what is nested by recursion, and has no end to it but the process's. Raises
    RecursionError."""
    depth = 0
    for event in yaml.parse(text, _SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise RecursionError
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _problem(error: yaml.YAMLError) -> tuple[int, str]:
    """Line, 0: unknown, and text of an error. Names in it may be part of an unquoted API key."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return 0, "it contains a character that YAML forbids"
    mark = error.problem_mark or error.context_mark
    problem = re.sub(r"(alias|anchor|tag|tag handle) '.*'", r"\1", error.problem or "malformed")
    return (mark.line + 1 if mark else 1), problem


def read(path: str, files: TextFiles) -> list[YamlEntry]:
    """The entries of the file, in its order, keys with dashes.

    Raises ConfigError, with the line, for a file that cannot be read, is not YAML, is not a mapping or has a
    duplicate key. The error never contains a value.
    """
    try:
        text = files.read_file(path)
    except OSError as error:
        raise ConfigError(f"cannot read the option file {path or repr(path)}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the file is not UTF-8 (byte {error.start})") from None
    except ValueError as error:
        raise ConfigError(f"cannot read the option file {path}: {error}") from None
    return parse(text, path)


def parse(text: str, path: str) -> list[YamlEntry]:
    """:func:`read` for the text of a file; ``path`` is its name in errors."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        line, problem = _problem(error)
        raise ConfigError(f"{path}{f':{line}' if line else ''}: not valid YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{path}: the file is nested too deeply") from None
    if root is None or root.tag == NULL:
        return []
    if not isinstance(root, yaml.MappingNode):
        what = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise ConfigError(f"{path}:{_line(root)}: the file must map option names to values, this is {what}")
    entries: dict[str, YamlEntry] = {}
    for key_node, value_node in root.value:
        entry = _entry(path, key_node, value_node)
        if entry.key in entries:
            raise ConfigError(
                f"{path}:{entry.line}: {entry.key} is given twice, first in line {entries[entry.key].line}"
            )
        entries[entry.key] = entry
    return list(entries.values())


def _entry(path: str, key: yaml.Node, value: yaml.Node) -> YamlEntry:
    if not isinstance(key, yaml.ScalarNode):
        raise ConfigError(f"{path}:{_line(key)}: a key must be the name of an option")
    name = key.value.replace("_", "-")
    if isinstance(value, yaml.ScalarNode):
        return YamlEntry(name, _line(key), None if value.tag == NULL else value.value)
    if isinstance(value, yaml.SequenceNode) and all(
        isinstance(item, yaml.ScalarNode) and item.tag != NULL for item in value.value
    ):
        return YamlEntry(name, _line(key), [item.value for item in value.value])
    return YamlEntry(name, _line(key), _json(path, value), _line(value))


def _json(path: str, node: yaml.Node) -> str:
    """What the other server would get as text: vLLM passes mappings on as JSON. Raises ConfigError for a
    duplicate key."""
    loader = _UniqueKeyLoader("")
    try:
        return json.dumps(loader.construct_object(node, deep=True), default=str)
    except DuplicateKeyError as error:
        raise ConfigError(f"{path}:{_problem(error)[0]}: {error.problem}") from None
    except (yaml.YAMLError, TypeError, ValueError, RecursionError):
        return ""
    finally:
        loader.dispose()


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
