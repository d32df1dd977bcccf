"""The option file: a YAML mapping from option names to values.

Scalars stay text, so that ``revision: 0123`` or ``max-model-len: 32k`` mean the same as on the command line.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import yaml

from penstock.config.errors import ConfigError

NULL = "tag:yaml.org,2002:null"


class YamlEntry(msgspec.Struct, frozen=True):
    """One key of the file; ``value`` is text, a list of texts, or None for null.

    No option takes anything else; if the file has something else, ``value`` is its JSON text and
    ``misfit_line`` its line.
    """

    key: str
    line: int
    value: str | list[str] | None
    misfit_line: int | None = None


def read(path: str) -> list[YamlEntry]:
    """The entries of the file, in its order, keys with dashes.

    Raises ConfigError, with the line, for a file that cannot be read, is not YAML, is not a mapping or has a
    duplicate key. The error never contains a value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the option file {path or repr(path)}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the file is not UTF-8 (byte {error.start})") from None
    return parse(text, path)


def parse(text: str, path: str) -> list[YamlEntry]:
    """:func:`read` for the text of a file; ``path`` is its name in errors."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # The name of an anchor or alias may be part of an unquoted API key.
        problem = re.sub(r"(alias|anchor) '.*'", r"\1", error.problem or "malformed")
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: not valid YAML: {problem}") from None
    except yaml.YAMLError:
        raise ConfigError(f"{path}: not valid YAML: it contains a character that YAML forbids") from None
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
    return YamlEntry(name, _line(key), _json(value), _line(value))


def _json(node: yaml.Node) -> str:
    """What the other server would get as text: vLLM passes mappings on as JSON."""
    loader = yaml.SafeLoader("")
    try:
        return json.dumps(loader.construct_object(node, deep=True), default=str)
    except (yaml.YAMLError, TypeError, ValueError, RecursionError):
        return ""
    finally:
        loader.dispose()


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
