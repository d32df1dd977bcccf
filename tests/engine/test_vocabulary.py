from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from penstock.config.errors import ConfigError
from penstock.engine.model_length import DEFAULT_MAX_MODEL_LEN
from penstock.engine.vocabulary import (
    read_eos_token_ids,
    read_max_model_len,
    read_vocabulary,
)
from tests.engine.support import byte_level_tokenizer


def test_ordinary_tokens_read_as_text(model_dir: Path) -> None:
    vocabulary = read_vocabulary(model_dir)
    tokenizer = byte_level_tokenizer()
    texts = [tokenizer.decode([token]) for token in vocabulary.ordinary.tolist()]
    assert sorted(texts) == sorted([*map(chr, range(128)), "é"])


def test_size_covers_added_tokens(model_dir: Path) -> None:
    tool = byte_level_tokenizer().token_to_id("<tool>")
    vocabulary = read_vocabulary(model_dir)
    assert vocabulary.size == tool + 1
    assert tool not in vocabulary.ordinary


def test_ordinary_tokens_ascend(model_dir: Path) -> None:
    ordinary = read_vocabulary(model_dir).ordinary
    assert (ordinary[1:] > ordinary[:-1]).all()


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        read_vocabulary(tmp_path)


def test_broken_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
        read_vocabulary(tmp_path)


def test_tokenizer_without_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0}, unk_token="<s>"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="no token of this tokenizer"):
        read_vocabulary(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"config.json": {}}, ()),
        ({"config.json": {"eos_token_id": 0}}, (0,)),
        ({"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": [4, 5]}}, (4, 5)),
        ({"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": None}}, (3,)),
        ({"config.json": {"text_config": {"eos_token_id": 7}}}, (7,)),
    ],
)
def test_eos(tmp_path: Path, files: dict[str, object], expected: tuple[int, ...]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, DEFAULT_MAX_MODEL_LEN),
        ({}, DEFAULT_MAX_MODEL_LEN),
        ({"max_position_embeddings": 77}, 77),
        ({"max_position_embeddings": 77, "text_config": {"max_position_embeddings": 78}}, 78),
        ({"n_positions": 79, "n_ctx": 80}, 79),
        ({"text_config": {"max_seq_len": 81}}, 81),
        ({"seq_length": 82}, 82),
        ({"model_type": "cohere", "max_position_embeddings": 83, "model_max_length": 84}, 84),
    ],
)
def test_max_model_len(tmp_path: Path, config: object, expected: int) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_max_model_len(tmp_path) == expected


@pytest.mark.parametrize(("text", "reason"), [("{", "not JSON"), ("[]", "holds list, not an object")])
def test_config_that_cannot_be_read(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_max_model_len(tmp_path)


@pytest.mark.parametrize("value", ["1", 1.5, -1, [1, "2"], True])
def test_eos_that_is_no_id(tmp_path: Path, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=r"config\.json: eos_token_id"):
        read_eos_token_ids(tmp_path)


@pytest.mark.parametrize("value", ["1", 1.5, 0, None])
def test_length_that_is_none(tmp_path: Path, value: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": value}))
    with pytest.raises(ConfigError, match=r"config\.json: max_position_embeddings"):
        read_max_model_len(tmp_path)
