"""``/tokenizer_info``: the tokenizer's configuration, as vLLM shows it, for clients that render prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.generation.prompt.chat_template import ChatTemplate

_FILES = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")
"""Fields with paths on this machine."""
_GENERIC_CLASS = "PreTrainedTokenizerFast"
"""What transformers loads a tokenizer.json with if the configuration names no class."""


def tokenizer_info(directory: Path, template: ChatTemplate | None) -> bytes:
    """JSON with the fields of tokenizer_config.json in ``directory``, with special tokens as plain texts and
    with the server's chat template."""
    path = directory / "tokenizer_config.json"
    # The standard library's JSON: model_max_length is often an integer of 31 digits.
    config: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    info = {name: _plain(value) for name, value in config.items() if name not in _FILES}
    info["tokenizer_class"] = info.get("tokenizer_class") or _GENERIC_CLASS
    if template is not None:
        info["chat_template"] = template.default_source
    return json.dumps(info).encode()


def _plain(value: Any) -> Any:
    """A special token's text in place of the object that describes it, also in a list; else ``value``."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    is_token = isinstance(value, dict) and isinstance(value.get("content"), str)
    return value["content"] if is_token else value
