"""``/tokenizer_info``: the tokenizer's configuration, as vLLM shows it, for clients that render prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from penstock.generation.chat_template import ChatTemplate

_FILES = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")
"""Fields with paths on this machine."""
_GENERIC_CLASS = "PreTrainedTokenizerFast"
"""What transformers loads a tokenizer.json with if the configuration names no class."""


def tokenizer_info(directory: Path, template: ChatTemplate | None) -> dict[str, Any]:
    """The fields of tokenizer_config.json in ``directory``, with special tokens as plain texts and with the
    server's chat template."""
    path = directory / "tokenizer_config.json"
    config: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict) if path.is_file() else {}
    info = {name: _plain(value) for name, value in config.items() if name not in _FILES}
    info["tokenizer_class"] = info.get("tokenizer_class") or _GENERIC_CLASS
    if template is not None:
        info["chat_template"] = template.default_source
    return info


def _plain(value: Any) -> Any:
    """``value`` with the text of each special token in place of the object that describes it."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("content"), str):
        return value["content"]
    return {name: _plain(inner) for name, inner in value.items()}
