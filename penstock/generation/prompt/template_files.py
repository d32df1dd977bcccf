"""Reads the chat templates of a model, in every layout that transformers writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.config.watched_file import read_regular

DEFAULT = "default"
_ADDITIONAL = "additional_chat_templates"
"""Beside ``chat_template.jinja``: a directory of further templates, each named as its file."""


class TemplateFiles(NamedTuple):
    """What a model's files say of its chat templates."""

    origin: Path
    """The file with the templates, or with the first of them."""
    sources: dict[str, str]
    """Texts by name; empty: there is none."""
    special_tokens: dict[str, str]
    """Texts by name, such as bos_token."""


def read_template_files(directory: Path, override_file: Path | None) -> TemplateFiles:
    """The template in ``override_file``, or else those of the model in ``directory``. Raises ValueError that
    names the file that cannot be read."""
    config = _json_object(directory / "tokenizer_config.json")
    if override_file is not None:
        origin, sources = override_file, {DEFAULT: _text(override_file)}
    else:
        origin, sources = _model_templates(directory, config)
    tokens = _special_tokens(_json_object(directory / "special_tokens_map.json") | config)
    return TemplateFiles(origin, sources, tokens)


def _model_templates(directory: Path, config: dict[str, Any]) -> tuple[Path, dict[str, str]]:
    """The file with a model's template, and its texts by name; chat_template.jinja takes precedence."""
    path = directory / "chat_template.jinja"
    more = {each.stem: _text(each) for each in sorted((directory / _ADDITIONAL).glob("*.jinja"))}
    if path.is_file():
        return path, more | {DEFAULT: _text(path)}
    path = directory / "tokenizer_config.json"
    template = config.get("chat_template")
    if template is None:
        path = directory / "chat_template.json"
        template = _json_object(path).get("chat_template")
    if template is None:
        return directory / _ADDITIONAL, more
    if isinstance(template, str):
        return path, more | {DEFAULT: template}
    try:
        named = msgspec.convert(template, list[_Named])
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: chat_template must be a text or a list of named ones: {error}") from None
    return path, more | {each.name: each.template for each in named}


class _Named(msgspec.Struct):
    name: str
    template: str


def _text(path: Path) -> str:
    try:
        return read_regular(str(path))  # each API server that starts reads it again
    except OSError as error:
        raise ValueError(f"chat template {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"chat template {path}: {error}") from None


def _json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Every ``…_token`` of a tokenizer's configuration: a string, or an object with the field content."""
    tokens = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens
