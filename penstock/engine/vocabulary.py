"""Reads the vocabulary, the EOS token ids and the maximum model length from a model directory.

Needs no torch: tokenizer.json is read through ``tokenizers``, the other files as JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from penstock.config.errors import ConfigError
from penstock.engine.model_length import DEFAULT_MAX_MODEL_LEN, length_field
from penstock.wire.arrays import I32

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(slots=True, frozen=True)
class Vocabulary:
    ordinary: I32
    """int32[N]: ids of the tokens that decode to text by themselves, ascending; never empty."""
    size: int
    """The largest id plus one."""


def read_vocabulary(tokenizer_dir: Path) -> Vocabulary:
    """The vocabulary of ``tokenizer_dir``/tokenizer.json.

    Ordinary tokens are not added ones (which include special ones), and decode to text that is neither empty
    nor part of a UTF-8 character. Raises ConfigError when the file is missing, is not a tokenizer, or has no
    ordinary token.
    """
    path = tokenizer_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; the synthetic engine draws its tokens from a tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - tokenizers raises Exception itself
        raise ConfigError(f"{path}: not a tokenizer: {error}") from None
    added = tokenizer.get_added_tokens_decoder()
    ids = sorted(set(tokenizer.get_vocab(with_added_tokens=False).values()) - set(added))
    texts = tokenizer.decode_batch([[token] for token in ids])
    ordinary = [token for token, text in zip(ids, texts, strict=True) if text and _REPLACEMENT not in text]
    if not ordinary:
        raise ConfigError(f"{path}: no token of this tokenizer reads as text by itself")
    return Vocabulary(np.array(ordinary, np.int32), max(*ids, *added, ordinary[-1]) + 1)


def read_eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """eos_token_id of generation_config.json, else of config.json (its text_config first); possibly none.
    Raises ConfigError."""
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        for part in _parts(path):
            eos = part.get("eos_token_id")
            if eos is not None:
                return tuple(
                    _count(path, "eos_token_id", token, 0)
                    for token in (eos if isinstance(eos, list) else [eos])
                )
    return ()


def read_vocab_size(model_dir: Path) -> int:
    """vocab_size of config.json, its text_config first. Raises ConfigError, also when there is none."""
    path = model_dir / "config.json"
    for part in _parts(path):
        if "vocab_size" in part:
            return _count(path, "vocab_size", part["vocab_size"], 1)
    raise ConfigError(f"{path}: has no vocab_size")


def read_max_model_len(model_dir: Path) -> int:
    """The length that config.json states, its text_config first; else :data:`DEFAULT_MAX_MODEL_LEN`. Raises
    ConfigError."""
    path = model_dir / "config.json"
    for part in _parts(path):
        name = length_field(part)
        if name is not None:
            return _count(path, name, part[name], 2)
    return DEFAULT_MAX_MODEL_LEN


def _parts(path: Path) -> list[dict[str, Any]]:
    """The JSON object in ``path``, preceded by its text_config if it has one (a multimodal model); empty when
    there is no such file."""
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds {type(content).__name__}, not an object")
    text = content.get("text_config")
    return [text, content] if isinstance(text, dict) else [content]


def _count(path: Path, name: str, value: object, least: int) -> int:
    if type(value) is not int or value < least:
        raise ConfigError(f"{path}: {name} is {value!r}, not an integer of at least {least}")
    return value
