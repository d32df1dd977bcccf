"""Changes the clients' keys file: one client's fields, and nothing else of its text.

Comments and layout stay. What a change would say is read before it is written; where the text is written in a
way that cannot be changed so, for example with an alias, an error says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from penstock.config.document import convert_document
from penstock.config.watched_file import read_regular
from penstock.gateway.admission.clients_file import ClientsDocument, read_clients, read_document
from penstock.gateway.admission.keys_file import KeyEntry

Edit = Callable[[str], str]
"""Makes a new text of the file. Raises ValueError."""
NEW_MODE = 0o600
NEW_LINE = "\n"
STANDS_FOR = {"sha256": "key"}
"""The field in whose place another one is written."""
_is_word = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*\Z").match


def change_file(path: str, edit: Edit) -> None:
    """Replace the file by what ``edit`` makes of its text; without a file, of an empty one. Mode and owner
    stay, and no reader sees a part of it. Others who do the same wait. Raises OSError and ValueError."""
    target = Path(path).resolve()
    with _locked(target.parent):
        try:
            before, status = read_regular(str(target)), target.stat()
        except FileNotFoundError:
            before, status = "", None
        text = edit(before)
        read_clients(text)
        descriptor, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                if status is not None and (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), status.st_uid, status.st_gid)
                os.fchmod(file.fileno(), NEW_MODE if status is None else status.st_mode & 0o7777)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException:
            os.unlink(beside)
            raise


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """The directory is what is locked: the file itself is replaced."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def change_entry(text: str, name: str, change: Callable[[KeyEntry], dict[str, Any]]) -> str:
    """``text`` with the fields of the client ``name`` that ``change`` gives; None: without that field. Raises
    ValueError."""
    entry = next((each for each in _entries(text) if each.name == name), None)
    if entry is None:
        raise ValueError(f"there is no key with the name {name!r}")
    said = {field: value for field, value in msgspec.to_builtins(entry).items() if value not in (None, "")}
    after = text
    for field, value in change(entry).items():
        try:
            node = _entry_node(after, name)
        except yaml.YAMLError:  # by the change before
            raise _by_hand(name) from None
        if value is None:
            after = _remove(after, node, field)
            said.pop(field, None)
        else:
            after = _put(after, node, field, _yaml(value))
            said[field] = value
    _check_change(text, after, said)
    return after


def add_entry(text: str, fields: dict[str, Any]) -> str:
    """``text`` with another client. Raises ValueError."""
    name = fields["name"]
    if any(each.name == name for each in _entries(text)):
        raise ValueError(f"the name {name!r} is given already; penstock keys rotate gives it a new key")
    after = _with_entry(text, [f"{field}: {_yaml(value)}" for field, value in fields.items()])
    _check_change(text, after, fields)
    return after


def _with_entry(text: str, lines: list[str]) -> str:
    listed = _keys_node(text)
    if listed is None:
        return f"{text}{'' if not text or text.endswith(NEW_LINE) else NEW_LINE}keys:\n{_block(lines, 2)}"
    at = _end(listed.value[-1])
    if listed.flow_style:
        return f"{text[:at]}, {{{', '.join(lines)}}}{text[at:]}"
    at = _line_end(text, at)
    start = text[:at] if text[:at].endswith(NEW_LINE) else text[:at] + NEW_LINE
    return start + _block(lines, listed.start_mark.column) + text[at:]


def _check_change(before: str, after: str, said: dict[str, Any]) -> None:
    """Raise ValueError unless one client is what is ``said``, and all else is as before."""
    expected = convert_document(said, KeyEntry)
    try:
        old, new = _document(before), _document(after)
    except ValueError:
        raise _by_hand(expected.name) from None
    others, now = (
        [each for each in document.keys or [] if each.name != expected.name] for document in (old, new)
    )
    named = [each for each in new.keys or [] if each.name == expected.name]
    old.keys = new.keys = None
    if named != [expected] or now != others or old != new:
        raise _by_hand(expected.name)


def _by_hand(name: str) -> ValueError:
    return ValueError(
        f"the entry of {name} is written in a way that cannot be changed by a program (with an alias, for "
        "example): change it by hand"
    )


def _document(text: str) -> ClientsDocument:
    return read_document(text) if text.strip() else ClientsDocument()


def _entries(text: str) -> list[KeyEntry]:
    return _document(text).keys or []


def _yaml(value: Any) -> str:
    """In one line: JSON, but for times and plain words."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_yaml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, str) and _is_word(value) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _block(lines: list[str], column: int) -> str:
    starts = ["- ", *["  "] * (len(lines) - 1)]
    return "".join(f"{' ' * column}{start}{line}\n" for start, line in zip(starts, lines, strict=True))


def _keys_node(text: str) -> Any:
    """The list of clients; None: there is none."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return None if root is None else next((value for key, value in root.value if key.value == "keys"), None)


def _entry_node(text: str, name: str) -> Any:
    for entry in getattr(_keys_node(text), "value", ()):
        if any(key.value == "name" and value.value == name for key, value in entry.value):
            return entry
    raise ValueError(f"there is no key with the name {name!r}")


def _end(node: Any) -> int:
    """Where the text of a node ends. That of a block ends where the next thing begins, after comments."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1


def _put(text: str, entry: Any, field: str, value: str) -> str:
    fields = {key.value for key, _ in entry.value}
    place = STANDS_FOR.get(field, field) if field not in fields else field
    for key, old in entry.value:
        if key.value == place:
            return f"{text[: key.start_mark.index]}{field}: {value}{text[_end(old) :]}"
    if entry.flow_style:
        at = _end(entry.value[-1][1])
        return f"{text[:at]}, {field}: {value}{text[at:]}"
    name = next(value for key, value in entry.value if key.value == "name")
    at = _line_end(text, _end(name))
    start = "" if text[:at].endswith("\n") else "\n"
    return f"{text[:at]}{start}{' ' * entry.start_mark.column}{field}: {value}\n{text[at:]}"


def _remove(text: str, entry: Any, field: str) -> str:
    for number, (key, value) in enumerate(entry.value):
        if key.value != field:
            continue
        if entry.flow_style:
            if number:
                return text[: _end(entry.value[number - 1][1])] + text[_end(value) :]
            return text[: key.start_mark.index] + text[entry.value[1][0].start_mark.index :]
        if number:
            begin = text.rfind("\n", 0, key.start_mark.index) + 1
            return text[:begin] + text[_line_end(text, _end(value)) :]
        return text[: key.start_mark.index] + text[entry.value[1][0].start_mark.index :]
    return text
